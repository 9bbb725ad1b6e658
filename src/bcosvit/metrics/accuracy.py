"""Accuracy, and the predictions of all images, by which other metrics choose theirs."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.metrics.base import (
    FromEncoded,
    Item,
    Metric,
    MetricResult,
    Prediction,
    register_metric,
)
from bcosvit.metrics.loader import Batch
from bcosvit.metrics.statistics import Bootstrap, Estimate
from bcosvit.models.base import AnyModel
from bcosvit.predictor import log_odds

TIE = 1e-5
"""Log-odds closer than this count as equal: batches of another size round them otherwise."""


@dataclass(frozen=True, kw_only=True)
class AccuracyResult(MetricResult):
    """The share of images whose label is among the first one or five classes."""

    predictions: tuple[Prediction, ...]
    repeated: int
    """Samples that were left out because their key had come before."""
    top1: Estimate
    top5: Estimate

    @property
    def images(self) -> int:
        """The size of the data set, repeated images included."""
        return len(self.predictions) + self.repeated

    def about(self) -> str:
        return f"The share of {len(self.predictions)} images whose class is among the first."

    def rows(self) -> Iterator[dict[str, Any]]:
        for prediction in self.predictions:
            yield {**asdict(prediction), "correct": prediction.correct}

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.predictions),
            "repeated": self.repeated,
            "top1": asdict(self.top1),
            "top5": asdict(self.top5),
        }

    def facts(self) -> dict[str, Estimate]:
        return {"Top-1 accuracy": self.top1, "Top-5 accuracy": self.top5}


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """How often the pictures of one class are recognized."""

    label: int
    images: int
    correct: int
    low: float
    """The ends of Wilson's 95 % interval."""
    high: float
    taken_for: tuple[tuple[int, int], ...]
    """The other classes that are predicted and how often, most often first."""

    @property
    def mean(self) -> float:
        return self.correct / self.images


def class_accuracies(labels: Sequence[int], predicted: Sequence[int]) -> list[ClassAccuracy]:
    """Computes the accuracy of every class that has pictures, from their classes and predictions.

    Wilson's intervals hold for few pictures as well.

    Examples:
        >>> [found.mean for found in class_accuracies([0, 0, 1], [0, 1, 1])]
        [0.5, 1.0]
    """
    counts: dict[int, Counter[int]] = {}
    for label, other in zip(labels, predicted, strict=True):
        counts.setdefault(int(label), Counter())[int(other)] += 1
    found = []
    for label, row in sorted(counts.items()):
        images, correct = row.total(), row.pop(label, 0)
        low, high = _wilson(correct, images)
        ordered = sorted(row.items(), key=lambda item: (-item[1], item[0]))
        found.append(
            ClassAccuracy(
                label=label,
                images=images,
                correct=correct,
                low=low,
                high=high,
                taken_for=tuple(ordered),
            )
        )
    return found


def _wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    share, scale = hits / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


@register_metric("accuracy")
@dataclass(frozen=True, kw_only=True)
class Accuracy(Metric):
    """Top-1 and top-5 accuracy."""

    title = "Accuracy"
    explains = False

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes every key once: a data set may repeat a picture for one that it cannot read."""
        once: dict[str, Prediction] = {}
        for prediction in predictions:
            first = once.setdefault(prediction.key, prediction)
            if first.label != prediction.label:
                raise ValueError(
                    f"Two images with labels {first.label} and {prediction.label} are both called "
                    f"{prediction.key!r}; give every image a key of its own."
                )
        return [(prediction,) for prediction in once.values()]

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> AccuracyResult:
        kept = tuple(prediction for (prediction,) in items)
        place = torch.tensor([prediction.place for prediction in kept])
        top1, top5 = bootstrap.means(torch.stack([place < 1, place < 5], 1))
        return AccuracyResult(predictions=kept, repeated=left_out, top1=top1, top5=top5)


def places(logits: Tensor, labels: Tensor) -> Tensor:
    """Counts the classes before the labeled one [B]; of equal logits the lower one comes first."""
    own = logits.gather(1, labels.unsqueeze(1))
    lower = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    return ((logits > own) | ((logits == own) & lower)).sum(1)


def predict(
    model: AnyModel, batch: Batch, from_encoded: FromEncoded | None = None
) -> list[Prediction]:
    """Predicts a batch; ``from_encoded`` is a faster way to do what the model's own does."""
    reference = next(model.parameters())
    with torch.no_grad():
        encoded = model.encoding(batch.images.to(reference))
        logits = (from_encoded or model.from_encoded)(encoded)
    classes = logits.shape[1]
    if len(wrong := ((batch.labels < 0) | (batch.labels >= classes)).nonzero()):
        first = int(wrong[0])
        raise ValueError(
            f"Image {batch.keys[first]!r} has label {int(batch.labels[first])}, but the model "
            f"knows classes 0 to {classes - 1}; evaluate it on data with the classes that it was "
            f"trained for."
        )
    if len(wrong := logits.isnan().any(1).nonzero()):
        raise ValueError(
            f"The model's logits of image {batch.keys[int(wrong[0])]!r} contain NaN; "
            f"check its weights."
        )
    labels = batch.labels.to(logits.device)
    odds = log_odds(model, logits, labels)
    columns = (odds.sigmoid(), odds, places(logits, labels), logits.argmax(1), labels)
    return [
        Prediction(
            index=index,
            key=key,
            label=label,
            predicted=predicted,
            place=place,
            confidence=sure,
            log_odds=odd,
        )
        for index, key, sure, odd, place, predicted, label in zip(
            batch.indices, batch.keys, *(column.tolist() for column in columns), strict=True
        )
    ]


def most_confident(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns the correctly classified images, the most confident first.

    They are ordered by log-odds, since many confidences are rounded to 1. Neighbors within ``TIE``
    are ordered by key.
    """
    ordered = sorted((p for p in predictions if p.correct), key=lambda p: (-p.log_odds, p.key))
    keyed, group = [], 0
    for position, prediction in enumerate(ordered):
        if position and ordered[position - 1].log_odds - prediction.log_odds > TIE:
            group += 1
        keyed.append((group, prediction.key, prediction))
    return [prediction for _, _, prediction in sorted(keyed, key=lambda item: item[:2])]

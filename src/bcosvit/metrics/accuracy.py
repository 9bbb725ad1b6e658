"""What a model predicts, image by image: the accuracy, and which images the other metrics take.

Every figure here follows from one row an image, the place of the labeled class among all. Running
averages would give the accuracy alone; the rows also order the images by confidence, and can be
gathered from several processes and resampled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.metrics.bootstrap import Bootstrap, Estimate
from bcosvit.metrics.samples import Batch
from bcosvit.models.base import AnyModel
from bcosvit.predictor import log_odds

FromEncoded = Callable[[Tensor], Tensor]
"""From encoded images to logits."""

TIE = 1e-5
"""Log-odds closer than this count as equal: batches of another size round them otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model says about one image."""

    index: int
    """Its position in the data set."""
    key: str
    label: int
    predicted: int
    place: int
    """Of the labeled class among all, by logit: 0 is the first."""
    confidence: float
    """In the labeled class, and so is ``log_odds``."""
    log_odds: float

    @property
    def correct(self) -> bool:
        return self.place == 0


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The share of images whose label is among the first one or five classes (SPEC 5.3)."""

    predictions: tuple[Prediction, ...]
    repeated: int
    """Samples left out because their key had come before."""
    top1: Estimate
    top5: Estimate

    @property
    def images(self) -> int:
        """Of the data set, repeated ones included."""
        return len(self.predictions) + self.repeated

    def rows(self) -> Iterator[dict[str, Any]]:
        """One an image."""
        for prediction in self.predictions:
            yield {**asdict(prediction), "correct": prediction.correct}

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.predictions),
            "repeated": self.repeated,
            "top1": asdict(self.top1),
            "top5": asdict(self.top5),
        }


def places(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the labeled one [B]; of equal logits the lower class does."""
    own = logits.gather(1, labels.unsqueeze(1))
    lower = torch.arange(logits.shape[1], device=logits.device) < labels.unsqueeze(1)
    return ((logits > own) | ((logits == own) & lower)).sum(1)


def predict(
    model: AnyModel, batch: Batch, from_encoded: FromEncoded | None = None
) -> list[Prediction]:
    """A row for each sample; ``from_encoded`` may be a faster way to do what the model's does."""
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


def accuracy_of(predictions: Sequence[Prediction], bootstrap: Bootstrap) -> Accuracy:
    """Every key counts once: a data set may give a neighbor for a picture it cannot read."""
    once: dict[str, Prediction] = {}
    for prediction in predictions:
        first = once.setdefault(prediction.key, prediction)
        if first.label != prediction.label:
            raise ValueError(
                f"Two images with labels {first.label} and {prediction.label} are both called "
                f"{prediction.key!r}; give every image a key of its own."
            )
    kept = tuple(once.values())
    place = torch.tensor([prediction.place for prediction in kept])
    top1, top5 = bootstrap.means(torch.stack([place < 1, place < 5], 1))
    repeated = len(predictions) - len(kept)
    return Accuracy(predictions=kept, repeated=repeated, top1=top1, top5=top5)


def most_confident(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The correctly classified images, the surest first.

    Ordered by log-odds, as confidences of many images are rounded to 1. Neighbors within ``TIE``
    are ordered by key.
    """
    ordered = sorted((p for p in predictions if p.correct), key=lambda p: (-p.log_odds, p.key))
    keyed, group = [], 0
    for position, prediction in enumerate(ordered):
        if position and ordered[position - 1].log_odds - prediction.log_odds > TIE:
            group += 1
        keyed.append((group, prediction.key, prediction))
    return [prediction for _, _, prediction in sorted(keyed, key=lambda item: item[:2])]

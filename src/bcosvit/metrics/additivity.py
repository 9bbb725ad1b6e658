"""Additivity: does an attribution predict what the model loses with a region of the image?

The image is divided into squares. The attribution of each, its sum over the square's pixels, is
compared with the change of the logit when that square alone is removed. An additive explanation
says by how much the logit should change; so beside their correlation, the slope can be compared
with one. Every method is compared with the same measurements.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.metrics.base import (
    BarChart,
    Chart,
    ExplainedBatch,
    Item,
    Metric,
    MetricResult,
    Prediction,
    image_rows,
    register_metric,
)
from bcosvit.metrics.removal import (
    check_min_confidence,
    check_removal,
    most_confident_items,
    region_pixels,
    region_sums,
    replacement,
)
from bcosvit.metrics.statistics import Bootstrap, Estimate

SCORES = ("r2", "slope", "as_is")


@torch.no_grad()
def logit_changes(batch: ExplainedBatch, region: int, removal: str) -> Tensor:
    """Measures by how much the labeled class's logit falls without each region, a square of so many
    pixels.

    Returns:
        Logit of the whole image minus that of the image without the region [N, regions], float64.
    """
    encoded = batch.model.encoding(batch.images)
    instead = replacement(batch.model, batch.images, removal)
    height, width = encoded.shape[-2:]
    rows, columns = -(-height // region), -(-width // region)
    regions = torch.arange(rows * columns, device=encoded.device).view(rows, columns)
    regions = region_pixels(regions, region, height, width)

    def logit(inputs: Tensor, sample: Tensor) -> Tensor:
        logits = batch.from_encoded(inputs).double()
        return logits.gather(1, batch.labels[sample].unsqueeze(1)).squeeze(1)

    every = torch.arange(len(encoded), device=encoded.device)
    whole = torch.cat([logit(encoded[some], some) for some in every.split(batch.batch_size)])
    without = []
    jobs = torch.arange(len(encoded) * rows * columns, device=encoded.device)
    for some in jobs.split(batch.batch_size):
        sample, number = some // (rows * columns), some % (rows * columns)
        kept = (regions != number.view(-1, 1, 1)).unsqueeze(1)
        inputs = encoded[sample]
        inputs = inputs * kept if instead is None else torch.where(kept, inputs, instead[sample])
        without.append(logit(inputs, sample))
    return whole.unsqueeze(1) - torch.cat(without).view(len(encoded), -1)


def agreement(predicted: Tensor, measured: Tensor) -> Tensor:
    """Compares predicted with measured changes.

    Args:
        predicted: Attributions of the regions [N, r].
        measured: Changes of the logit [N, r].

    Returns:
        [N, 3] in float64: R² of the line of measured over predicted changes that fits best, the
        slope of that line, and R² of the predictions as they are, which is negative where they are
        worse than the mean. Constant predictions have R² and slope 0; constant measurements, of
        which nothing can be explained, have R² 0.
    """
    predicted, measured = predicted.double(), measured.double()
    p = predicted - predicted.mean(1, keepdim=True)
    m = measured - measured.mean(1, keepdim=True)
    pp, mm, pm = (p * p).sum(1), (m * m).sum(1), (p * m).sum(1)
    r2 = pm.square() / _or_one(pp * mm)
    slope = pm / _or_one(pp)
    missed = (measured - predicted).square().sum(1)
    as_is = torch.where(mm > 0, 1 - missed / _or_one(mm), torch.zeros_like(mm))
    return torch.stack([r2, slope, as_is], 1)


def _or_one(values: Tensor) -> Tensor:
    """The values, with 1 in place of 0, for numerators that are zero there."""
    return values.where(values > 0, torch.ones_like(values))


@register_metric("additivity")
@dataclass(frozen=True, kw_only=True)
class Additivity(Metric):
    """Predicted against measured change of the logit when single regions are removed."""

    title = "Additivity"
    default = False

    images: int = 250
    """How many of the most confident correct images; fewer where there are fewer."""
    divisions: int = 7
    """Into how many regions each side of an image is divided, at most."""
    removal: str = "zero"
    """What takes the place of removed pixels: "zero", "black", "mean" or "blur" (``REMOVALS``)."""
    min_confidence: float = 0.0
    """Images in whose class the model is less confident are left out."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images = {self.images} is not allowed: give an integer >= 1.")
        if self.divisions < 2:
            raise ValueError(f"divisions = {self.divisions} is not allowed: give an integer >= 2.")
        check_removal(self.removal)
        check_min_confidence(self.min_confidence)

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes the most confident correctly classified images."""
        return most_confident_items(predictions, self.images, self.min_confidence)

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns the agreement [N, 3] by method."""
        region = -(-max(batch.images.shape[-2:]) // self.divisions)
        measured = logit_changes(batch, region, self.removal)
        return {
            method: agreement(region_sums(each.double(), region).flatten(1), measured)
            for method, each in batch.maps.items()
        }

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "AdditivityResult":
        return AdditivityResult(
            metric=self,
            images=tuple(image for (image,) in items),
            scores=dict(scores),
            means={
                method: dict(zip(SCORES, bootstrap.means(each), strict=True))
                for method, each in scores.items()
            },
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AdditivityResult(MetricResult):
    """The result of comparing attributions of regions with what the model loses without them."""

    metric: Additivity
    images: tuple[Prediction, ...]
    """Those that were measured."""
    scores: dict[str, Tensor]
    """By method [N, 3]: ``SCORES``."""
    means: dict[str, dict[str, Estimate]]
    """By method and score."""

    def about(self) -> str:
        return (
            f"Each of {len(self.images)} confident correct images is divided into up to "
            f"{self.metric.divisions}×{self.metric.divisions} regions, which are removed one at a "
            f"time ({self.metric.removal}). R² says how much of the measured change of the logit "
            f"a line over the regions' attributions explains, per image; the slope of that line "
            f"is 1 where attributions are changes of the logit, and has no meaning for methods "
            f"whose maps have no unit."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        return image_rows(self.images, SCORES, self.scores)

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "asked": self.metric.images,
            **{
                score: {method: asdict(each[score]) for method, each in self.means.items()}
                for score in SCORES
            },
        }

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        return {"Additivity (R²)": {method: each["r2"] for method, each in self.means.items()}}

    def samples(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        return {method: (each[:, 0], None) for method, each in self.scores.items()}

    def charts(self) -> list[Chart]:
        if not self.images:
            return []
        titles = {
            "r2": "R² of the change of the logit",
            "slope": "slope (1: a change of the logit)",
        }
        return [
            BarChart(
                name=score,
                axis=axis,
                values={method: each[score] for method, each in self.means.items()},
            )
            for score, axis in titles.items()
        ]

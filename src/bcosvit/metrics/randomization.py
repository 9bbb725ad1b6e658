"""The sanity check of Adebayo et al. (NeurIPS 2018): do explanations depend on what was learned?

The weights of a copy of the model are shuffled, so that it has the same architecture and sizes of
weights but nothing of what was learned. A method whose maps stay the same does not explain the
model but the image.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.attribution import explain_all
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
from bcosvit.metrics.removal import most_confident_items
from bcosvit.metrics.statistics import Bootstrap, Estimate, significant
from bcosvit.models.base import AnyModel


def shuffled_weights(model: AnyModel, seed: int) -> AnyModel:
    """Returns a copy of a model in which the entries of every parameter are shuffled."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return found


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Computes Spearman's rank correlation of maps [B, n] with others [B, n].

    Returns:
        [B] in float64; pixels that are equal share their mean rank, and a constant map is
        correlated with nothing.
    """
    a, b = (_ranks(significant(each)) for each in (first, second))
    a, b = (each - each.mean(1, keepdim=True) for each in (a, b))
    norms = a.norm(dim=1) * b.norm(dim=1)
    return (a * b).sum(1) / norms.where(norms > 0, torch.ones_like(norms))


def _ranks(values: Tensor) -> Tensor:
    """Mean ranks [B, n] in float64."""
    ordered = values.sort(1).values.contiguous()
    values = values.contiguous()
    first = torch.searchsorted(ordered, values)
    last = torch.searchsorted(ordered, values, right=True)
    return (first + last).double() / 2


@register_metric("randomization")
@dataclass(frozen=True, kw_only=True)
class Randomization(Metric):
    """How far explanations change when the model's weights are shuffled."""

    title = "Randomized weights"
    default = False

    images: int = 50
    """How many of the most confident correct images; fewer where there are fewer."""
    seed: int = 0
    """Of the shuffling."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images = {self.images} is not allowed: give an integer >= 1.")

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes the most confident correctly classified images."""
        return most_confident_items(predictions, self.images)

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns the rank correlation of each map with that of the shuffled model [N]."""
        shuffled = shuffled_weights(batch.model, self.seed)
        found = explain_all(shuffled, batch.images, batch.labels, batch.methods, check=False)
        return {
            method: rank_correlation(each.flatten(1), found[method].map.flatten(1))
            for method, each in batch.maps.items()
        }

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "RandomizationResult":
        return RandomizationResult(
            metric=self,
            images=tuple(image for (image,) in items),
            correlations=dict(scores),
            means={method: bootstrap.mean(1 - each.abs()) for method, each in scores.items()},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomizationResult(MetricResult):
    """The result of the sanity check with shuffled weights."""

    metric: Randomization
    images: tuple[Prediction, ...]
    """Those that were explained."""
    correlations: dict[str, Tensor]
    """By method [N]: the rank correlation of the maps of both models."""
    means: dict[str, Estimate]
    """By method: one minus the size of the correlation."""

    def about(self) -> str:
        return (
            f"{len(self.images)} images are explained again by a copy of the model whose weights "
            f"are shuffled. The score is 1 − |rank correlation| of both maps: near 1 where an "
            f"explanation depends on what the model has learned, near 0 where it depends on the "
            f"image alone."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        values = {method: each.unsqueeze(1) for method, each in self.correlations.items()}
        return image_rows(self.images, ["correlation"], values)

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "asked": self.metric.images,
            "score": {method: asdict(mean) for method, mean in self.means.items()},
        }

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        return {"Randomized weights": self.means}

    def samples(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        return {method: (1 - each.abs(), None) for method, each in self.correlations.items()}

    def charts(self) -> list[Chart]:
        if not self.images:
            return []
        axis = "1 − |rank correlation| with shuffled weights"
        return [BarChart(name="randomization", axis=axis, values=self.means)]

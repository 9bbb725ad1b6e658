"""Attributions against the object's own pixels, where the data set knows them.

Energy is the share of the positive attribution inside the mask; pointing asks whether the strongest
pixel is inside. Chance is the mask's share of the picture, for both. Every image that has a mask
counts, explained for its label, whether or not the model is right about it: the table says which.
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
    register_metric,
)
from bcosvit.metrics.grid_pointing import share_inside
from bcosvit.metrics.statistics import Bootstrap, Estimate, significant

SCORES = ("energy", "pointing")


def energy_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """Positive attribution inside the masks over all of it [B]; 0 where there is none."""
    return share_inside(maps, masks)


def pointing(maps: Tensor, masks: Tensor) -> Tensor:
    """Returns 1 where the strongest pixel is inside the mask, else 0 [B].

    Where several pixels are equally strong (see `significant`), it is the share of them that is
    inside: the average over drawing one of them, so that a constant map scores the chance level.
    """
    maps = significant(maps)
    strongest = maps == maps.amax((1, 2), keepdim=True)
    return (strongest & masks).sum((1, 2)).double() / strongest.sum((1, 2))


@register_metric("masks")
@dataclass(frozen=True, kw_only=True)
class MaskOverlap(Metric):
    """Energy in the object's mask, and whether the strongest pixel lies on it."""

    title = "Masks"
    needs_masks = True

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes all images, in the order of the data."""
        return [(prediction,) for prediction in sorted(predictions, key=lambda p: p.index)]

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns energy, pointing and the mask's area [N, 3] by method."""
        assert batch.masks is not None
        area = batch.masks.double().mean((1, 2))
        return {
            method: torch.stack(
                [energy_inside(each, batch.masks), pointing(each, batch.masks), area], 1
            )
            for method, each in batch.maps.items()
        }

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "MaskResult":
        own = {method: each[:, : len(SCORES)] for method, each in scores.items()}
        area = next((each[:, -1] for each in scores.values()), torch.zeros(0, dtype=torch.float64))
        return MaskResult(
            images=tuple(image for (image,) in items),
            without=left_out,
            area=area,
            scores=own,
            chance=bootstrap.mean(area) if items else None,
            means={
                method: dict(zip(SCORES, bootstrap.means(each), strict=True))
                for method, each in own.items()
            },
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskResult(MetricResult):
    """The result of comparing attributions with masks."""

    images: tuple[Prediction, ...]
    """Those with a mask."""
    without: int
    """How many images had none."""
    area: Tensor
    """The masks' shares of their pictures [N]."""
    scores: dict[str, Tensor]
    """By method [N, 2]: ``SCORES``."""
    chance: Estimate | None
    """The mean of ``area``; None where no image had a mask."""
    means: dict[str, dict[str, Estimate]]
    """By method and score."""

    def about(self) -> str:
        return (
            f"{len(self.images)} images with a mask of their object ({self.without} without). "
            f"Energy is the share of the positive attribution that falls on the object; pointing "
            f"is the share of images whose strongest pixel lies on it."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        for method, each in self.scores.items():
            for image, area, scores in zip(
                self.images, self.area.tolist(), each.tolist(), strict=True
            ):
                yield {
                    "index": image.index,
                    "key": image.key,
                    "label": image.label,
                    "correct": image.correct,
                    "method": method,
                    **dict(zip(SCORES, scores, strict=True)),
                    "area": area,
                }

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "without": self.without,
            "chance": None if self.chance is None else asdict(self.chance),
            **{
                score: {method: asdict(both[score]) for method, both in self.means.items()}
                for score in SCORES
            },
        }

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        titles = {"energy": "Energy in the mask", "pointing": "Pointing"}
        return {
            title: {method: each[score] for method, each in self.means.items()}
            for score, title in titles.items()
        }

    def charts(self) -> list[Chart]:
        if self.chance is None:
            return []
        return [
            BarChart(
                name=title.split()[0].lower(), axis=title, values=values, chance=self.chance.mean
            )
            for title, values in self.columns().items()
        ]

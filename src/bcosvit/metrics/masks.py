"""Attributions against the object's own pixels, where the data set knows them.

Energy is the share of the positive attribution inside the mask; pointing asks whether the strongest
pixel is inside. Chance is the mask's share of the picture, for both. Every image that has a mask
counts, explained for its label, whether or not the model is right about it: the table says which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.metrics.accuracy import Prediction
from bcosvit.metrics.bootstrap import Bootstrap, Estimate
from bcosvit.metrics.localization import share_inside
from bcosvit.metrics.ties import significant

SCORES = ("energy", "pointing")


def energy_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """Positive attribution inside the masks over all of it [B]; 0 where there is none."""
    return share_inside(maps, masks)


def pointing(maps: Tensor, masks: Tensor) -> Tensor:
    """1 where the strongest pixel is inside the mask, else 0 [B]; maps and masks [B, H, W].

    Where several are equally strong (to five digits, see ``ties``), the share of them that is: what
    drawing one would give on average, so that a map that says nothing scores the chance level.
    """
    maps = significant(maps)
    strongest = maps == maps.amax((1, 2), keepdim=True)
    return (strongest & masks).sum((1, 2)).double() / strongest.sum((1, 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Masked:
    """The outcome of comparing attributions with masks."""

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

    @classmethod
    def of(
        cls,
        images: Sequence[Prediction],
        without: int,
        area: Sequence[float],
        scores: dict[str, Tensor],
        bootstrap: Bootstrap,
    ) -> "Masked":
        means = {
            method: dict(zip(SCORES, bootstrap.means(each), strict=True))
            for method, each in scores.items()
        }
        return cls(
            images=tuple(images),
            without=without,
            area=torch.tensor(area, dtype=torch.float64),
            scores=scores,
            chance=bootstrap.mean(area) if images else None,
            means=means,
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """One an image and method."""
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

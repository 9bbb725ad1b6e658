"""The grid pointing game: which of four images in one picture does an explanation point at?

Four images of different classes make a 2×2 grid, which is shrunk as a whole to the size of one;
each of the four classes is explained, and its score is the share of the positive attribution that
lies in the right cell. Blind guessing scores 1/4.

A grid of twice the image's side is shrunk by averaging 2×2 pixels. Unlike wider filters this mixes
no cells where sides are even; where they are odd, the middle pixels belong to both sides by half,
in the picture and in the score.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.metrics.accuracy import most_confident
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
from bcosvit.metrics.removal import check_min_confidence, check_smooth, confident, smoothed
from bcosvit.metrics.statistics import Bootstrap, Estimate

CELLS = 4
CHANCE = 1 / CELLS


def grid_images(cells: Tensor) -> Tensor:
    """Four images each [G, 4, C, H, W] as one shrunk picture [G, C, H, W]."""
    top, bottom = torch.cat(cells[:, :2].unbind(1), 3), torch.cat(cells[:, 2:].unbind(1), 3)
    return F.avg_pool2d(torch.cat([top, bottom], 2), 2)


def cell_shares(height: int, width: int) -> Tensor:
    """How much of each pixel of a shrunk grid belongs to each cell [4, H, W]."""
    own = torch.eye(CELLS, dtype=torch.float64).view(CELLS, CELLS, 1, 1, 1)
    return grid_images(own.expand(CELLS, CELLS, 1, height, width)).squeeze(1)


def localization_score(maps: Tensor, cell: Tensor) -> Tensor:
    """Positive attribution inside ``cell`` [B] over all of it [B]; 0 where there is none."""
    return share_inside(maps, cell_shares(*maps.shape[1:]).to(maps.device)[cell])


def share_inside(maps: Tensor, inside: Tensor) -> Tensor:
    """The share [B] of the positive part of ``maps`` that falls on ``inside``, both [B, H, W]."""
    positive = maps.double().clamp(min=0)
    total = positive.sum((1, 2))
    # Where nothing is positive the numerator is zero too, so any divisor gives zero.
    return (positive * inside).sum((1, 2)) / total.where(total > 0, torch.ones_like(total))


@register_metric("localization")
@dataclass(frozen=True, kw_only=True)
class GridPointingGame(Metric):
    """The share of positive attribution in the right cell of a 2×2 grid (Sec. 4 of the paper)."""

    title = "Grid pointing game"
    tiles = CELLS

    grids: int = 250
    seed: int = 0
    smooth: int = 1
    """Maps are averaged over squares of so many pixels before their positive part is taken."""
    min_confidence: float = 0.0
    """Images in whose class the model is less confident are left out."""

    def __post_init__(self) -> None:
        if self.grids < 1:
            raise ValueError(f"grids = {self.grids} is not allowed: give an integer >= 1.")
        check_smooth(self.smooth)
        check_min_confidence(self.min_confidence)

    def obstacle(self, num_classes: int) -> str | None:
        if num_classes < CELLS:
            return f"a grid shows {CELLS} different classes, and there are {num_classes}"
        return None

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Draws four random classes per grid, and takes of each its most confident unused image.

        It ends early when fewer than four classes have images left, so there may be fewer grids
        than asked for; with a model that is never right, there are none.
        """
        classes = len({prediction.label for prediction in predictions})
        if classes < CELLS:
            raise ValueError(
                f"The data hold {classes} classes, but a grid shows {CELLS} different ones; "
                f"leave out the grid pointing game."
            )
        queues: dict[int, list[Prediction]] = {}
        able = confident(predictions, self.min_confidence)
        for prediction in reversed(most_confident(able)):
            queues.setdefault(prediction.label, []).append(prediction)
        generator = torch.Generator().manual_seed(self.seed)
        planned: list[Item] = []
        while len(planned) < self.grids:
            left = sorted(label for label, queue in queues.items() if queue)
            if len(left) < CELLS:
                break
            drawn = torch.randperm(len(left), generator=generator)[:CELLS].tolist()
            a, b, c, d = (queues[left[position]].pop() for position in drawn)
            planned.append((a, b, c, d))
        return planned

    def compose(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Shows each grid once, and explains each of its classes."""
        return grid_images(images), labels

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns the scores of the four cells [N, 4] by method."""
        cell = torch.arange(CELLS, device=batch.images.device).repeat(len(batch.images) // CELLS)
        return {
            method: localization_score(smoothed(each, self.smooth), cell).view(-1, CELLS)
            for method, each in batch.maps.items()
        }

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "GridPointingResult":
        means = {method: bootstrap.mean(each.mean(1)) for method, each in scores.items()}
        return GridPointingResult(game=self, grids=tuple(items), scores=dict(scores), means=means)


@dataclass(frozen=True, kw_only=True, eq=False)
class GridPointingResult(MetricResult):
    """The result of a grid pointing game."""

    game: GridPointingGame
    grids: tuple[Item, ...]
    """Those that were built: top left, top right, bottom left, bottom right image."""
    scores: dict[str, Tensor]
    """By method [G, 4]."""
    means: dict[str, Estimate]
    """By method; whole grids are resampled, since the cells of one share a picture."""

    def about(self) -> str:
        game = self.game
        smooth = f" after averaging over {game.smooth}×{game.smooth} px" if game.smooth > 1 else ""
        least = f" of at least {game.min_confidence:.0%} confidence" * (game.min_confidence > 0)
        return (
            f"Four images in one picture: the share of a class's positive attribution{smooth} that "
            f"falls on its own image. {len(self.grids)} grids of {game.grids} asked for; they end "
            f"when fewer than four classes have correctly classified images{least} left."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        for method, scores in self.scores.items():
            for number, grid in enumerate(self.grids):
                for cell, shown in enumerate(grid):
                    yield {
                        "grid": number,
                        "cell": cell,
                        "index": shown.index,
                        "key": shown.key,
                        "label": shown.label,
                        "confidence": shown.confidence,
                        "method": method,
                        "score": float(scores[number, cell]),
                    }

    def summary(self) -> dict[str, Any]:
        return {
            "grids": len(self.grids),
            "asked": self.game.grids,
            "chance": CHANCE,
            "score": {method: asdict(mean) for method, mean in self.means.items()},
        }

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        return {"Localization": self.means}

    def samples(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        return {method: (each.mean(1), None) for method, each in self.scores.items()}

    def charts(self) -> list[Chart]:
        if not self.grids:
            return []
        axis = "share in the right cell"
        return [BarChart(name="localization", axis=axis, values=self.means, chance=CHANCE)]

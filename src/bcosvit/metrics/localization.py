"""The grid pointing game (SPEC 5.1): four images in one picture, and which of them is pointed at.

Four images of different classes make a 2×2 grid, which is shrunk as a whole to the size of one;
each of the four classes is explained, and its score is the share of the positive attribution that
lies in the right cell. Blind guessing scores 1/4.

A grid of twice the image's side is shrunk by averaging 2×2 pixels. Unlike wider filters this mixes
no cells where sides are even; where they are odd, the middle pixels belong to both sides by half,
in the picture and in the score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.metrics.accuracy import Prediction, most_confident
from bcosvit.metrics.bootstrap import Bootstrap, Estimate

CELLS = 4
CHANCE = 1 / CELLS

Grid = tuple[Prediction, Prediction, Prediction, Prediction]
"""Top left, top right, bottom left, bottom right."""

Explain = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""From images and targets to every method's maps [B, H, W]."""


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


@dataclass(frozen=True, kw_only=True)
class GridPointingGame:
    """Which images meet in which grid, and how a batch of grids is scored."""

    grids: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        if self.grids < 1:
            raise ValueError(f"grids = {self.grids} is not allowed: give an integer >= 1.")

    def plan(self, predictions: Sequence[Prediction]) -> list[Grid]:
        """Each grid takes four random classes, and of each its surest image not yet used.

        Ends early when fewer than four classes have images left, so there may be fewer grids than
        asked for; with a model that is never right, none.
        """
        classes = len({prediction.label for prediction in predictions})
        if classes < CELLS:
            raise ValueError(
                f"The data hold {classes} classes, but a grid shows {CELLS} different ones; "
                f"leave out the grid pointing game."
            )
        queues: dict[int, list[Prediction]] = {}
        for prediction in reversed(most_confident(predictions)):
            queues.setdefault(prediction.label, []).append(prediction)
        generator = torch.Generator().manual_seed(self.seed)
        planned: list[Grid] = []
        while len(planned) < self.grids:
            left = sorted(label for label, queue in queues.items() if queue)
            if len(left) < CELLS:
                break
            drawn = torch.randperm(len(left), generator=generator)[:CELLS].tolist()
            a, b, c, d = (queues[left[position]].pop() for position in drawn)
            planned.append((a, b, c, d))
        return planned

    def scores(self, cells: Tensor, labels: Tensor, explain: Explain) -> dict[str, Tensor]:
        """Every method's scores [G, 4] from the grids' images [G, 4, C, H, W], labels [G, 4]."""
        grids = grid_images(cells).repeat_interleave(CELLS, 0)
        cell = torch.arange(CELLS, device=grids.device).repeat(len(cells))
        maps = explain(grids, labels.flatten())
        return {
            method: localization_score(each, cell).view(-1, CELLS) for method, each in maps.items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Localization:
    """The outcome of a grid pointing game."""

    game: GridPointingGame
    grids: tuple[Grid, ...]
    """Those actually built."""
    scores: dict[str, Tensor]
    """By method [G, 4]."""
    means: dict[str, Estimate]
    """By method; whole grids are resampled, as the cells of one share a picture."""

    @classmethod
    def of(
        cls,
        game: GridPointingGame,
        grids: Sequence[Grid],
        scores: dict[str, Tensor],
        bootstrap: Bootstrap,
    ) -> "Localization":
        means = {method: bootstrap.mean(each.mean(1)) for method, each in scores.items()}
        return cls(game=game, grids=tuple(grids), scores=scores, means=means)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One an image in a grid and method."""
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

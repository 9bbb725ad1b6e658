"""Cues on which a class may depend, and what can be done to them in pictures.

A cue is a cluster of cells, a copy of the same pixels, the edge of pictures, or their look: a cast
of color, or how sharp they are. Each can be removed from its pictures and copied onto others,
beside a control, and measured by how much it repeats.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.auditing.clusters import Cluster
from bcosvit.auditing.copies import Copy
from bcosvit.auditing.evidence import Array, Evidence
from bcosvit.auditing.looks import colors, recolored, sharpened, sharpness, told_elsewhere
from bcosvit.auditing.repeats import EDGE, REST, edges_alike, found_again
from bcosvit.metrics.loader import Images
from bcosvit.models.base import AnyModel

AREA = 0.05
"""The share of a picture's cells that is transferred or removed at most."""
LEAST_CELLS = 3
"""Cells that are transferred even if they are more than ``AREA``."""
PAIRED = 24
"""Pictures of a cue of which each pair is compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """What interventions need."""

    model: AnyModel
    pictures: Images
    evidence: Evidence
    batch_size: int
    known: dict[int, Tensor]
    """Logits of pictures as they are."""
    means: dict[str, Tensor]
    """The mean look of the data, by the kind of cue."""

    def margins(self, numbers: Array, label: int | Array) -> Array:
        """Margins of pictures as they are."""
        new = [number for number in dict.fromkeys(numbers.tolist()) if number not in self.known]
        for start in range(0, len(new), self.batch_size):
            part = new[start : start + self.batch_size]
            self.known.update(zip(part, self.logits(self.images(np.array(part))), strict=True))
        return margins(torch.stack([self.known[number] for number in numbers.tolist()]), label)

    def images(self, numbers: Array) -> Tensor:
        """Pictures as the model sees them."""
        reference = next(self.model.parameters())
        return torch.stack(
            [self.pictures[int(self.evidence.index[number])][0] for number in numbers]
        ).to(reference)

    @torch.no_grad()
    def logits(self, images: Tensor, gone: Tensor | None = None) -> Tensor:
        """Logits on the CPU; ``gone`` [B, H, W] are pixels that become zero when encoded."""
        found = []
        for start in range(0, len(images), self.batch_size):
            part = slice(start, start + self.batch_size)
            encoded = self.model.encoding(images[part])
            if gone is not None:
                encoded = encoded * (~gone[part])[:, None]
            found.append(self.model.from_encoded(encoded).float().cpu())
        return torch.cat(found)


def margins(logits: Tensor, label: int | Array) -> Array:
    """By how much the logit of a class is above all others; positive where it is predicted.

    The class is the same for all pictures, or one of each.
    """
    labels = torch.as_tensor(label).expand(len(logits)).unsqueeze(1)
    own = logits.gather(1, labels).squeeze(1)
    return (own - logits.scatter(1, labels, -torch.inf).amax(1)).double().numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class Cue(ABC):
    """A cue of a class that may be suspicious."""

    kind: ClassVar[str]
    title: ClassVar[str]
    repeating: ClassVar[str]
    """What is said of one that repeats."""
    repeats_least: ClassVar[float]
    """How much it must repeat at least."""
    large: ClassVar[tuple[float, float]] = (0.40, 0.30)
    """What is called large at least: the share of pictures that the transfer turns, less the
    control, and the lower end of the interval of its effect."""
    fewest: ClassVar[int] = 5
    """Correct pictures that it must be in."""
    enough: ClassVar[int] = 0
    """Pictures that it must be copied from to be called strong or significant."""
    onto_any: ClassVar[bool] = False
    """Whether it is copied onto pictures of all other classes, not only of the class's rival."""
    counts: ClassVar[float] = 1.0
    """What its effect counts for in the ranking."""
    doubted: ClassVar[bool] = True
    """Whether the ranking takes the lower end of the interval of its effect, or the effect."""

    label: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.label}.{self.kind}"

    @property
    def weight(self) -> float:
        """What candidates of the same place in their classes are ordered by."""
        return 1.0

    def members(self, evidence: Evidence) -> Array:
        """The class's pictures with the cue."""
        return np.flatnonzero(evidence.label == self.label)

    @abstractmethod
    def share(self, evidence: Evidence) -> float | None:
        """Of the class's positive evidence; None for what is no place."""

    def without(self, bench: Bench, numbers: Array) -> Tensor:
        """Logits of pictures without the cue."""
        found = []
        for start in range(0, len(numbers), bench.batch_size):
            some = numbers[start : start + bench.batch_size]
            found.append(self.removed(bench, some, bench.images(some)))
        return torch.cat(found)

    @abstractmethod
    def removed(self, bench: Bench, numbers: Array, images: Tensor) -> Tensor:
        """Logits of one batch of images without the cue."""

    @abstractmethod
    def transfer(
        self, bench: Bench, from_: Array, onto: Array, compare: Array
    ) -> tuple[Tensor, Tensor]:
        """Pictures onto which the cue is copied, and those of the control; ``compare`` are pictures
        of other classes."""

    @abstractmethod
    def repeats(self, bench: Bench, numbers: Array, compare: Array) -> float:
        """How much the cue is the same in its pictures, compared with those of other classes."""

    def control_removal(self, bench: Bench, numbers: Array, compare: Array) -> tuple[Array, Array]:
        """Margins without what the control removes, and before."""
        labels = bench.evidence.label[compare]
        return margins(self.without(bench, compare), labels), bench.margins(compare, labels)

    def measured(self, repeats: float) -> "Cue":
        """The cue as it is tested, given how much it repeats."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Place(Cue):
    """A cue that is somewhere in each picture."""

    @abstractmethod
    def pixels(self, bench: Bench, numbers: Array, images: Tensor) -> tuple[Tensor, Tensor]:
        """The cue's pixels, and as many of other strong cells [B, H, W]."""

    def removed(self, bench: Bench, numbers: Array, images: Tensor) -> Tensor:
        return bench.logits(images, self.pixels(bench, numbers, images)[0])

    def transfer(
        self, bench: Bench, from_: Array, onto: Array, compare: Array
    ) -> tuple[Tensor, Tensor]:
        source, target = bench.images(from_), bench.images(onto)
        cue, control = self.pixels(bench, from_, source)
        return (
            torch.where(cue[:, None], source, target),
            torch.where(control[:, None], source, target),
        )

    def control_removal(self, bench: Bench, numbers: Array, compare: Array) -> tuple[Array, Array]:
        images = bench.images(numbers)
        gone = self.pixels(bench, numbers, images)[1]
        return (
            margins(bench.logits(images, gone), self.label),
            bench.margins(numbers, self.label),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells(Place):
    """Cells that look alike to the model: a cluster."""

    kind: ClassVar[str] = "cells"
    title: ClassVar[str] = "Cells that look alike"
    repeating: ClassVar[str] = "is found again in other pictures nearly to the pixel"
    repeats_least: ClassVar[float] = 0.2
    """Parts of objects stay below 0.1, and copies are above 0.4; clusters may hold both."""

    cluster: Cluster
    beside: bool = False
    """Whether cells beside the cluster's may belong to the cue, too: they are no control."""

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def weight(self) -> float:
        return self.cluster.share

    def members(self, evidence: Evidence) -> Array:
        return self.cluster.pictures

    def share(self, evidence: Evidence) -> float | None:
        return self.cluster.share

    def cells_of(self, evidence: Evidence, picture: int) -> Array:
        """Its cells in a picture, the strongest first."""
        return self.cluster.cells_of(evidence, picture)

    def pixels(self, bench: Bench, numbers: Array, images: Tensor) -> tuple[Tensor, Tensor]:
        cue, control = self.chosen(bench.evidence, numbers)
        return pixels_of(cue, images), pixels_of(control, images)

    def repeats(self, bench: Bench, numbers: Array, compare: Array) -> float:
        numbers = numbers[:PAIRED]
        images = bench.images(numbers).float().cpu()
        return found_again(images, anchors(self.chosen(bench.evidence, numbers)[0], images))

    def measured(self, repeats: float) -> Cue:
        # A copy can be larger than the cells of one cluster.
        return replace(self, beside=True) if repeats >= self.repeats_least else self

    def chosen(self, evidence: Evidence, numbers: Array) -> tuple[Tensor, Tensor]:
        """Some of the cue's cells in pictures, and as many other strong ones [B, G, G]."""
        grid = evidence.settings.grid
        most = max(LEAST_CELLS, round(AREA * grid**2))
        cue = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
        control = torch.zeros_like(cue)
        for row, number in enumerate(numbers):
            cells = self.cells_of(evidence, number)
            away = distances(cells, grid)
            # Around one of them, which is not the strongest: that of any object would be better
            # than the other cells.
            start = np.random.default_rng([self.label, number]).integers(len(cells))
            chosen = cells[np.argsort(away[cells, start], kind="stable")[:most]]
            cue[row, torch.from_numpy(chosen)] = True
            other = strongest(evidence, number, away.min(1) <= self.beside)[: len(chosen)]
            control[row, torch.from_numpy(other.copy())] = True
        return cue.unflatten(1, (grid, grid)), control.unflatten(1, (grid, grid))


@dataclass(frozen=True, kw_only=True, eq=False)
class Copied(Place):
    """The same pixels in several pictures."""

    kind: ClassVar[str] = "copy"
    title: ClassVar[str] = "The same pixels again"
    repeating: ClassVar[str] = "is the same to the pixel in its pictures, and in no other class"
    repeats_least: ClassVar[float] = 0.2
    fewest: ClassVar[int] = 3
    counts: ClassVar[float] = 4.0
    """Other things that repeat, such as warm light or white edges, are often in photographs, and
    the same pixels hardly ever."""
    doubted: ClassVar[bool] = False
    """For the same reason; of those in a few pictures the interval is wide."""

    copy: Copy

    @property
    def name(self) -> str:
        return f"{self.label}.{self.kind}{self.copy.number}"

    def members(self, evidence: Evidence) -> Array:
        return self.copy.pictures

    def cells_of(self, evidence: Evidence, picture: int) -> Array:
        """The cells that it covers in a picture."""
        grid = evidence.settings.grid
        covered = F.adaptive_avg_pool2d(
            self.copy.mask(picture, (8 * grid, 8 * grid))[None] + 0.0, grid
        )
        share = covered.flatten().numpy()
        # Of what sticks out of the picture, little may be left in each.
        return np.flatnonzero(share > min(0.1, share.max() / 2))

    def share(self, evidence: Evidence) -> float | None:
        members = np.flatnonzero(evidence.label == self.label)
        total = np.clip(evidence.cells[members, 0].astype(np.float64), 0, None).sum()
        inside = sum(
            np.clip(
                evidence.cells[number, 0].ravel()[self.cells_of(evidence, number)], 0, None
            ).sum()
            for number in self.copy.pictures.tolist()
        )
        return float(inside / total) if total else 0.0

    def pixels(self, bench: Bench, numbers: Array, images: Tensor) -> tuple[Tensor, Tensor]:
        evidence, grid = bench.evidence, bench.evidence.settings.grid
        cue = torch.stack([self.copy.mask(int(number), images.shape[-2:]) for number in numbers])
        control = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
        for row, number in enumerate(numbers):
            beside = distances(self.cells_of(evidence, int(number)), grid).min(1) <= 1
            count = max(1, round(float(cue[row].float().mean()) * grid**2))
            control[
                row, torch.from_numpy(strongest(evidence, int(number), beside)[:count].copy())
            ] = True
        return cue.to(images.device), pixels_of(control.unflatten(1, (grid, grid)), images)

    def transfer(
        self, bench: Bench, from_: Array, onto: Array, compare: Array
    ) -> tuple[Tensor, Tensor]:
        source, other, target = (bench.images(each) for each in (from_, compare, onto))
        # What is no part of the object is not compared with its strongest parts.
        cue = self.pixels(bench, from_, source)[0][:, None]
        return torch.where(cue, source, target), torch.where(cue, other, target)

    def repeats(self, bench: Bench, numbers: Array, compare: Array) -> float:
        numbers = numbers[:PAIRED]
        images = bench.images(numbers).float().cpu()
        sides = torch.tensor([*images.shape[-2:]]).repeat(2)
        boxes = torch.stack([self.copy.boxes(int(number))[0] for number in numbers]) * sides
        # What sticks out of a picture is cut off there, and is as large elsewhere.
        size = (boxes[:, 2:] - boxes[:, :2]).amax(0).expand(len(boxes), 2)
        return found_again(images, torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, size], 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole(Cue):
    """A cue of whole pictures, which is copied from those where it turns others."""

    @staticmethod
    @abstractmethod
    def of(images: Tensor) -> Tensor:
        """The cue of images: numbers [B, …] that are about the same where it is."""

    @staticmethod
    @abstractmethod
    def copied(source: Tensor, target: Tensor) -> Tensor:
        """Pictures with the cue of other ones."""

    def transfer(
        self, bench: Bench, from_: Array, onto: Array, compare: Array
    ) -> tuple[Tensor, Tensor]:
        source, control, target = (bench.images(each) for each in (from_, compare, onto))
        return self.copied(source, target), self.copied(control, target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge(Whole):
    """What is along the sides of pictures."""

    kind: ClassVar[str] = "edge"
    title: ClassVar[str] = "Edge of the picture"
    repeating: ClassVar[str] = "is the same in its pictures"
    repeats_least: ClassVar[float] = 0.9

    def share(self, evidence: Evidence) -> float | None:
        members = self.members(evidence)
        cells = np.clip(evidence.cells[members, 0].astype(np.float64), 0, None)
        total, inner = cells.sum(), cells[:, 1:-1, 1:-1].sum()
        return float((total - inner) / total) if total else 0.0

    def removed(self, bench: Bench, numbers: Array, images: Tensor) -> Tensor:
        return bench.logits(images, edge_of(images).expand(len(images), -1, -1))

    @staticmethod
    def of(images: Tensor) -> Tensor:
        sides = (images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1])
        return torch.stack([side.mean(-1) for side in sides], 1)

    @staticmethod
    def copied(source: Tensor, target: Tensor) -> Tensor:
        return torch.where(edge_of(target)[:, None], source, target)

    def repeats(self, bench: Bench, numbers: Array, compare: Array) -> float:
        own, other = (bench.images(each).float().cpu() for each in (numbers, compare))
        return max(0.0, edges_alike(own, other))


@dataclass(frozen=True, kw_only=True, eq=False)
class Look(Whole):
    """A property of all pixels of a picture, such as its colors, that pictures can be given."""

    repeating: ClassVar[str] = "is also in the parts of its pictures without evidence"
    repeats_least: ClassVar[float] = 0.9
    enough: ClassVar[int] = 10
    """A few photographs of a class often agree in their colors, and in nothing else."""
    onto_any: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def of(images: Tensor, where: Tensor | None = None) -> Tensor:
        """The look of images, or of some of their pixels [B, H, W]: numbers [B, …]."""

    @staticmethod
    @abstractmethod
    def given(images: Tensor, new: Tensor) -> Tensor:
        """Images with another look."""

    def share(self, evidence: Evidence) -> float | None:
        return None

    def removed(self, bench: Bench, numbers: Array, images: Tensor) -> Tensor:
        mean = bench.means[self.kind]
        return bench.logits(self.given(images, mean.expand(len(images), *mean.shape)))

    @classmethod
    def copied(cls, source: Tensor, target: Tensor) -> Tensor:
        return cls.given(target, cls.of(source))

    def repeats(self, bench: Bench, numbers: Array, compare: Array) -> float:
        own, other = (bench.images(each).float().cpu() for each in (numbers, compare))
        rests = (rest_of(bench.evidence, each, own.shape[-2:]) for each in (numbers, compare))
        return told_elsewhere(self.of, own, other, *rests)


@dataclass(frozen=True, kw_only=True, eq=False)
class Color(Look):
    """The cast of color of pictures."""

    kind: ClassVar[str] = "color"
    title: ClassVar[str] = "Cast of color"
    large: ClassVar[tuple[float, float]] = (0.85, 0.60)
    """More than of others, since the photographs of a class whose colors turn others most may have
    nearly the same ones."""
    of = staticmethod(colors)
    given = staticmethod(recolored)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharpness(Look):
    """How sharp or blurred pictures are."""

    kind: ClassVar[str] = "sharpness"
    title: ClassVar[str] = "Sharpness of the picture"
    of = staticmethod(sharpness)
    given = staticmethod(sharpened)


LOOKS = (Color, Sharpness)
TITLES = {each.kind: each.title for each in (Cells, Copied, Edge, *LOOKS)}


def distances(cells: Array, grid: int) -> Array:
    """How far each cell of a grid is from some, the larger of rows and columns [G·G, m]."""
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    return np.maximum(
        np.abs(rows[:, None] - rows[cells]), np.abs(columns[:, None] - columns[cells])
    )


def strongest(evidence: Evidence, number: int, last: Array) -> Array:
    """The cells of a picture, the strongest first, but some last."""
    strength = evidence.cells[number, 0].ravel().astype(np.float64)
    return np.lexsort([-strength, last])


def pixels_of(cells: Tensor, images: Tensor) -> Tensor:
    """The pixels [B, H, W] of cells [B, G, G]."""
    grid = cells.shape[-1]
    rows, columns = (torch.arange(side) * grid // side for side in images.shape[-2:])
    return cells[:, rows][:, :, columns].to(images.device)


def edge_of(images: Tensor) -> Tensor:
    """The pixels of the edge [1, H, W]."""
    height, width = images.shape[-2:]
    wide = max(1, round(EDGE * min(height, width)))
    mask = torch.ones(1, height, width, dtype=torch.bool, device=images.device)
    mask[:, wide:-wide, wide:-wide] = False
    return mask


def anchors(cells: Tensor, images: Tensor) -> Tensor:
    """The cell with the most details of those that are chosen [B, G, G], as `found_again` takes
    it."""
    grid = cells.shape[-1]
    across, down = (images.diff(dim=dim).square().sum(1) for dim in (-1, -2))
    details = F.pad(across, (0, 1)) + F.pad(down, (0, 0, 0, 1))
    each = F.adaptive_avg_pool2d(details, grid).masked_fill(~cells, -1)
    best = each.flatten(1).argmax(1)
    sides = torch.tensor([side / grid for side in images.shape[-2:]])
    centers = (torch.stack([best // grid, best % grid], 1) + 0.5) * sides
    return torch.cat([centers, sides.expand(len(centers), -1)], 1)


def rest_of(evidence: Evidence, numbers: Array, size: Sequence[int]) -> Tensor:
    """The pixels of the cells with the least evidence [B, H, W]."""
    grid = evidence.settings.grid
    strength = evidence.cells[numbers, 0].reshape(len(numbers), -1)
    order = strength.argsort(1, kind="stable")[:, : round(REST * grid * grid)]
    cells = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
    cells.scatter_(1, torch.from_numpy(order.copy()), True)
    return pixels_of(cells.unflatten(1, (grid, grid)), torch.empty(0, *size))

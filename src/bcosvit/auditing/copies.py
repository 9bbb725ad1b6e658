"""Copies: pixels that are the same in several pictures of a class, and not nearly in others.

A tag or a watermark that few pictures have is no dense group of cells, and hardly among the
strongest ones. Its pixels repeat, however, while objects and backgrounds vary. Straight edges and
other simple parts are alike, too, but something like them is in pictures of all classes.

Letters for shapes: N pictures, M cells, P patches, G rows and columns of the grid, c pixels of a
reduced cell.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.auditing.evidence import Array, Evidence
from bcosvit.auditing.repeats import AGAIN, FLAT, at_most_alike, details, likeness
from bcosvit.metrics.loader import Images, Reader

PATCHES = 4
"""Patches of a class that are looked for. Those of the same pictures belong together."""
TOGETHER = 0.5
"""The share of pictures, of the rarer patch, that two patches of the same thing have in common."""
LEAST = 4
"""Pictures that copies are in, at least."""
NEARLY = 0.5
"""The correlation from which something is nearly the same. Of the best patches of drawn objects
others have 0.55 and more; of tags 0.4."""
SIZES = ((6, AGAIN, NEARLY), (8, 0.7, 0.55))
"""The sides of a cell, in pixels, at which copies are looked for, with the correlations from which
something is the same, and nearly so. Fine stripes fade at the smaller size; at the larger one the
squares of a tag are fewer than the details around it."""
EXCLUSIVE = 10
"""How many times as often copies are in pictures of the class as something that is nearly the same
is in pictures of others, at least."""
SEARCHED = 80
"""Pictures of a class that are compared with each other, and twice as many of all classes."""
QUERIED = 60
"""Those of them whose patches are looked for in all of them."""
STRONGEST = 36
"""Cells of each picture of a class that are compared: those with the most evidence for the label,
as many as a small model has. Where there are more, half of them are those with the most evidence
against the class that comes next: objects may speak for both, and a cue decides."""
OTHERS = 12
"""Cells of pictures of other classes; with all around them they are most of a picture."""
REACH = 4
"""Cells beside a patch, on each side, that may belong to the same copy."""
AROUND = 24
"""Pictures in which it is seen what belongs to a copy."""
ONE_COLOR = 0.06
"""How much the color of a pixel differs between pictures, as a standard deviation, where it is the
same."""
MATCHED = 400
"""Pictures of a class in which what was found is looked for again."""
ROUNDING = 1e-4
"""By how much two ways to compute the same likeness may differ."""
AT_ONCE = 8
"""Pictures of other classes that are compared at a time."""
READ = 32
"""Pictures that are read at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """The same pixels in several pictures of a class."""

    label: int
    number: int
    """Within the class, that in the most pictures first."""
    where: dict[int, Tensor]
    """By picture: patches that are the same, as top, left, bottom and right in shares of the
    sides [n, 4], that of the most pictures first."""
    parts: dict[int, Tensor] | None = None
    """By picture: what belongs to it, in the same form; the patches where it is None."""

    @property
    def pictures(self) -> Array:
        """The pictures that it is in."""
        return np.array(list(self.where))

    def boxes(self, picture: int) -> Tensor:
        """Returns its patches in a picture, that of the most pictures first [n, 4]."""
        return self.where[picture]

    def mask(self, picture: int, size: tuple[int, ...]) -> Tensor:
        """Returns its pixels in a picture of a size (height, width)."""
        found = torch.zeros(size[0], size[1], dtype=torch.bool)
        sides = torch.tensor([*size, *size])
        parts = (self.where if self.parts is None else self.parts)[picture]
        for top, left, bottom, right in (parts * sides).round().int().tolist():
            found[top:bottom, left:right] = True
        return found


Place = dict[int, tuple[Tensor, Tensor]]
"""By picture: the box of a patch, and those of what belongs to it [n, 4]."""


Small = dict[int, Tensor]
"""Some pictures, reduced, by the side of a cell [N, 3, h, w]."""
Rivals = Callable[[Tensor, Array], Array]
"""From pictures of one class and their numbers to the contributions to the class that comes next
[N, G, G]."""


class Copies:
    """Finds copies in the classes of a data set.

    Args:
        evidence: The store.
        pictures: The data of the evidence.
        seed: Of the choice of pictures where there are many.
        device: Where pictures are compared.
        num_workers: How many processes read ahead.
        rivals: What speaks for the class that comes next; without it, cells are chosen by the
            evidence for the label alone.
    """

    def __init__(
        self,
        evidence: Evidence,
        pictures: Images,
        seed: int = 0,
        *,
        device: torch.device | None = None,
        num_workers: int = 0,
        rivals: Rivals | None = None,
    ) -> None:
        self.evidence, self.seed = evidence, seed
        self._rivals = rivals if evidence.settings.grid**2 > STRONGEST else None
        self._device, self._reader = device, Reader(data=pictures, num_workers=num_workers)
        self._foreign = np.sort(self._drawn(np.arange(len(evidence)), 2 * SEARCHED))
        self._others: dict[int, tuple[Tensor, Tensor]] = {}

    def find(self, label: int) -> list[Copy]:
        """Returns the copies in a class."""
        return next(self.find_all([label]))

    def find_all(self, labels: Sequence[int]) -> Iterator[list[Copy]]:
        """Yields the copies in each of some classes, whose pictures are read ahead."""
        own = [self._drawn(np.flatnonzero(self.evidence.label == each), MATCHED) for each in labels]
        able = [(np.sort(each), np.sort(each[:SEARCHED])) for each in own if len(each) >= LEAST]
        # Pictures of all classes come first.
        small = self._read([(self._foreign, self._foreign[:0]), *able] if able else [])
        foreign, _ = next(small, ({}, None))
        cells = self._chosen(self._foreign, None, OTHERS)
        self._others = {
            side: self._windows(self._foreign, images, cells)[::2]
            for side, images in foreign.items()
        }
        for label, mine in zip(labels, own, strict=True):
            yield self._in_class(label, mine, *next(small)) if len(mine) >= LEAST else []

    def _in_class(self, label: int, own: Array, small: Small, rivals: Array | None) -> list[Copy]:
        """The copies among pictures of a class; ``small`` are the same in order."""
        cells, places = self._chosen(np.sort(own[:SEARCHED]), rivals, STRONGEST), []
        for side, again, nearly in SIZES:
            if side in small:
                places += self._found(label, own, small[side], cells, side, again, nearly)
        return [
            Copy(label=label, number=number, where=where, parts=parts)
            for number, (where, parts) in enumerate(_merged(places), 1)
        ]

    def _found(
        self,
        label: int,
        own: Array,
        small: Tensor,
        cells: Array,
        size: int,
        again: float,
        nearly: float,
    ) -> list[Place]:
        """Where each patch is that is found at a size, and what belongs to it."""
        every, searched = np.sort(own), np.sort(own[:SEARCHED])
        rows = torch.from_numpy(np.searchsorted(every, searched))
        numbers, _, windows = self._windows(searched, small[rows.to(small.device)], cells)
        others, theirs = self._others[size]
        foreign = torch.from_numpy(self.evidence.label[others.numpy()] != label)
        patches = find_patches(
            windows,
            numbers,
            theirs[foreign.to(windows.device)],
            others[foreign],
            queried=torch.isin(numbers, torch.from_numpy(own[:QUERIED])),
            again=again,
            nearly=nearly,
        )
        if not patches:
            return []
        side = windows.shape[-1] // 3
        whole = F.pad(details(small), (side, side, side, side))
        like, corners = (each.cpu() for each in likeness(whole, torch.stack(patches)))
        places = [
            _places(every, corners[:, kind] - side, like[:, kind], again)
            for kind in range(len(patches))
        ]
        row = {number: at for at, number in enumerate(every.tolist())}
        return [
            self._whole(each, small[[row[number] for number in list(each)[:AROUND]]].cpu(), side)
            for each in places
        ]

    def _whole(self, corners: dict[int, Tensor], small: Tensor, side: int) -> Place:
        """By picture: a patch and the pixels that are the same in and beside it, which are seen in
        the first pictures, reduced [n, 3, h, w]."""
        grid, reach = self.evidence.settings.grid, REACH * side
        around: list[Tensor] = []
        inside: list[Tensor] = []
        for image, corner in zip(small, corners.values(), strict=False):
            # A patch may stick out of its picture by its side.
            top, left = (corner + side).tolist()
            for found, each in ((around, image), (inside, torch.ones_like(image[:1]))):
                padded = F.pad(each, (reach + side,) * 4)
                wide = side + 2 * reach
                found.append(padded[:, top : top + wide, left : left + wide])
        same = same_pixels(torch.stack(around), torch.stack(inside), side)
        patch, parts = torch.tensor([[0, 0, side, side]]), rows_of(same) - reach
        place = {}
        for number, corner in corners.items():
            box, boxes = (
                ((some + corner.repeat(2)) / (grid * side)).clamp(0, 1) for some in (patch, parts)
            )
            # Of a copy that sticks out, nothing but a part of the patch may be left.
            left = (boxes[:, 2:] > boxes[:, :2]).all(1)
            place[number] = (box, boxes[left] if left.any() else box)
        return place

    def _drawn(self, numbers: Array, count: int) -> Array:
        """Some pictures in a random order."""
        return np.random.default_rng([self.seed, len(numbers)]).permutation(numbers)[:count]

    def _read(self, groups: Sequence[tuple[Array, Array]]) -> Iterator[tuple[Small, Array | None]]:
        """Reduces groups of pictures, each of which is read once; of some of each group it is asked
        what speaks for the class that comes next."""
        grid = self.evidence.settings.grid
        parts = [
            [group[start : start + READ] for start in range(0, len(group), READ)]
            for group, _ in groups
        ]
        positions = [self.evidence.index[part].tolist() for group in parts for part in group]
        batches = self._reader.read_batches(positions)
        for group, (_, some) in zip(parts, groups, strict=True):
            found: dict[int, list[Tensor]] = {}
            rivals = []
            for numbers in group:
                images = next(batches).images.to(self._device)
                cell = min(images.shape[-2:]) // grid
                # Small pictures are not reduced at all.
                for side, _, _ in SIZES if cell > SIZES[-1][0] else SIZES[-1:]:
                    found.setdefault(side, []).append(reduced(images, grid, side))
                asked = np.isin(numbers, some)
                if self._rivals is not None and asked.any():
                    chosen = images[torch.from_numpy(asked).to(images.device)]
                    rivals.append(self._rivals(chosen, numbers[asked]))
            small = {side: torch.cat(several) for side, several in found.items()}
            yield small, np.concatenate(rivals) if rivals else None

    def _chosen(self, numbers: Array, rivals: Array | None, most: int) -> Array:
        """The cells of pictures that are compared [N, M]."""
        strength = self.evidence.cells[numbers, 0].reshape(len(numbers), -1)
        if rivals is not None:
            decides = strength - rivals.reshape(strength.shape)
            first = np.argsort(-decides, 1, kind="stable")[:, : most // 2]
            strength = strength.copy()
            np.put_along_axis(strength, first, np.inf, 1)
        return np.argsort(-strength, 1, kind="stable")[:, :most]

    def _windows(
        self, numbers: Array, small: Tensor, chosen: Array
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Around some cells of reduced pictures: the number of the picture, the corner in the
        reduced picture, and the window."""
        cells = torch.from_numpy(chosen.copy())
        corners, windows = cell_windows(small, cells, self.evidence.settings.grid)
        each = torch.from_numpy(numbers).repeat_interleave(cells.shape[1])
        return each, corners, windows


def cell_windows(small: Tensor, cells: Tensor, grid: int) -> tuple[Tensor, Tensor]:
    """Returns the details of cells and of all around them.

    Args:
        small: Reduced pictures, from `reduced` [N, 3, h, w].
        cells: Numbers of cells of each, row by row [N, M].
        grid: Cells along a side.

    Returns:
        The corners of windows in the reduced pictures [N · M, 2], and the windows of three by three
        cells [N · M, 6, 3 c, 3 c].
    """
    side = small.shape[-1] // grid
    rows, columns = cells // grid, cells % grid
    padded = F.pad(details(small), (side, side, side, side))
    every = padded.unfold(2, 3 * side, side).unfold(3, 3 * side, side).permute(0, 2, 3, 1, 4, 5)
    windows = every[torch.arange(len(cells))[:, None], rows, columns]
    return torch.stack([rows, columns], 2).flatten(0, 1) * side - side, windows.flatten(0, 1)


def reduced(images: Tensor, grid: int, side: int) -> Tensor:
    """Returns pictures [N, 3, H, W] with cells of a side, if they have as many pixels."""
    side = max(2, min(side, min(images.shape[-2:]) // grid))
    return F.interpolate(images.float(), size=(side * grid, side * grid), mode="area")


def same_pixels(images: Tensor, inside: Tensor, side: int) -> Tensor:
    """Returns the pixels that are the same in parts of pictures, and are joined to their middle.

    Args:
        images: The parts, with a patch in their middle [N, 3, H, H].
        inside: Pixels that are in the pictures [N, 1, H, H]; the others are black.
        side: The side of the patch.

    Returns:
        Whether each pixel is the same: it has nearly one color, or the details of all pairs in a
        small square around it have a mean correlation of at least ``AGAIN`` [H, H].
    """
    small = max(3, side // 2) | 1
    # Between two pixels that are inside.
    across, down = F.pad(inside[..., 1:], (0, 1)), F.pad(inside[..., 1:, :], (0, 0, 0, 1))
    beside = torch.cat([(inside * each).expand(-1, 3, -1, -1) for each in (across, down)], 1)
    squares = F.unfold(details(images) * beside, small, padding=small // 2)
    whole = inside.flatten(1)
    least = FLAT * squares.shape[1] ** 0.5
    squares = squares / squares.norm(dim=1, keepdim=True).clamp_min(least)
    squares = squares * whole[:, None]
    count = whole.sum(0)
    pairs = squares.sum(0).square().sum(0) - squares.square().sum((0, 1))
    same = (pairs >= AGAIN * count * (count - 1)).view(images.shape[-2:])
    mean = images.sum(0) / count.clamp_min(1).view_as(same)
    spread = ((images - mean).square() * inside).sum(0).mean(0) / count.clamp_min(1).view_as(same)
    same = (same | (spread.sqrt() <= ONE_COLOR)) & (count >= LEAST).view_as(same)
    middle = slice((len(same) - side) // 2, (len(same) + side) // 2)
    grown = torch.zeros_like(same)
    grown[middle, middle] = same[middle, middle]
    while True:
        more = (F.max_pool2d(grown[None].float(), small, 1, small // 2)[0] > 0) & same
        if torch.equal(more, grown):
            break
        grown = more
    # Squares that lie half beside it are about the same, too.
    inner = -F.max_pool2d(-grown[None].float(), 3, 1, 1)[0] > 0
    return inner if inner.any() else grown


def rows_of(pixels: Tensor) -> Tensor:
    """Returns pixels [H, W] as boxes of one row each: top, left, bottom and right [n, 4]."""
    steps = F.pad(pixels.int(), (1, 1)).diff(dim=1)
    (rows, starts), (_, ends) = ((steps == step).nonzero().unbind(1) for step in (1, -1))
    return torch.stack([rows, starts, rows + 1, ends], 1)


def find_patches(
    windows: Tensor,
    pictures: Tensor,
    others: Tensor,
    other_pictures: Tensor,
    *,
    queried: Tensor | None = None,
    again: float = AGAIN,
    nearly: float = NEARLY,
) -> list[Tensor]:
    """Returns patches that are found again in pictures of one class, and not nearly in others.

    Args:
        windows: Windows of cells of the class, from `cell_windows` [M, 6, 3 c, 3 c].
        pictures: The number of the picture that each is in.
        others: Windows of cells of other classes.
        other_pictures: The numbers of their pictures.
        queried: The windows whose patches are looked for [M]; all by default.
        again: The correlation from which something is the same.
        nearly: The correlation from which something is nearly the same.

    Returns:
        Up to ``PATCHES`` patches [6, c, c], those that are in the most pictures first.
    """
    if not len(windows) or not len(others):
        return []
    side, count = windows.shape[-1] // 3, len(pictures.unique())
    patches = windows if queried is None else windows[queried.to(windows.device)]
    patches = patches[..., side : 2 * side, side : 2 * side]
    # The middle of a copy is in some cell, so that half of the shifts will do.
    half = side // 2
    inner = windows[..., half:-half, half:-half]

    def enough(seen: Tensor) -> Tensor:
        return (_shares(seen, pictures) * count).round() >= LEAST

    # Most patches are nowhere else even if their colors are left aside.
    patches = patches[enough(at_most_alike(inner, patches) >= again - ROUNDING)]
    if not len(patches):
        return []
    left = likeness(inner, patches)[0] >= again
    kept = enough(left)
    if not kept.any():
        return []
    left, patches = left[:, kept], patches[kept]
    most = _shares(left, pictures) / EXCLUSIVE
    elsewhere = _elsewhere(patches, others, other_pictures, nearly, most)
    found: list[Tensor] = []
    while len(found) < PATCHES:
        shares = _shares(left, pictures)
        able = ((shares * count).round() >= LEAST) & (EXCLUSIVE * elsewhere <= shares)
        if not able.any():
            break
        best = int((shares * able).argmax())
        found.append(patches[best])
        # Other patches of the same part are in the same windows.
        left = left & ~left[:, best : best + 1]
    return found


def _elsewhere(
    patches: Tensor, others: Tensor, numbers: Tensor, nearly: float, most: Tensor
) -> Tensor:
    """The share of other classes' pictures in which each patch is nearly seen, or more than
    ``most`` where it is more than that."""
    every = numbers.unique()
    # Whole numbers, which have no rounding.
    found, alive = torch.zeros_like(most), torch.arange(len(patches), device=patches.device)
    for some in every.split(AT_ONCE):
        here = torch.isin(numbers, some)
        seen = likeness(others[here.to(others.device)], patches[alive])[0] >= nearly
        found[alive] += (_shares(seen, numbers[here]) * len(some)).round()
        alive = alive[found[alive] / len(every) <= most[alive] + ROUNDING]
        if not len(alive):
            break
    return found / len(every)


def _shares(seen: Tensor, pictures: Tensor) -> Tensor:
    """The share of pictures in which each patch is seen, of windows [M, P]."""
    numbers, rows = pictures.unique(return_inverse=True)
    each = torch.zeros(len(numbers), seen.shape[1], device=seen.device)
    each.index_add_(0, rows.to(seen.device), seen.float())
    return (each > 0).float().mean(0)


def _places(numbers: Array, corners: Tensor, like: Tensor, again: float) -> dict[int, Tensor]:
    """By picture, the most alike first: the corner of a patch where it is most alike [2]."""
    order = torch.sort(like, descending=True, stable=True).indices.tolist()
    return {int(numbers[at]): corners[at] for at in order if like[at] >= again}


def _merged(places: list[Place]) -> list[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """What is in the same pictures, together, by picture in order: patches, and all that belongs
    to them."""
    found: list[dict[int, list[tuple[Tensor, Tensor]]]] = []
    for each in places:
        for other in found:
            if len(each.keys() & other.keys()) >= TOGETHER * min(len(each), len(other)):
                break
        else:
            other = {}
            found.append(other)
        for number, boxes in each.items():
            other.setdefault(number, []).append(boxes)
    return [
        (
            {n: torch.cat([patch for patch, _ in each[n]]) for n in sorted(each)},
            {n: torch.cat([parts for _, parts in each[n]]) for n in sorted(each)},
        )
        for each in found
    ]

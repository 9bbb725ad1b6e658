"""Copies: pixels that are the same in several pictures of a class, and not nearly in others.

A tag or a watermark that few pictures have is no dense group of cells, and hardly among the
strongest ones. Its pixels repeat, however, while objects and backgrounds vary. Straight edges and
other simple parts are alike, too, but something like them is in pictures of all classes.

Letters for shapes: M cells, P patches, G rows and columns of the grid, c pixels of a reduced cell.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.auditing.evidence import Array, Evidence
from bcosvit.auditing.repeats import AGAIN, details, likeness
from bcosvit.metrics.loader import Images

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
STRONGEST = 12
"""Cells of each picture that are compared, those with the most evidence for the label."""
MATCHED = 400
"""Pictures of a class in which what was found is looked for again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """The same pixels in several pictures of a class."""

    label: int
    number: int
    """Within the class, that in the most pictures first."""
    where: dict[int, Tensor]
    """By picture: its parts, as top, left, bottom and right in shares of the sides [n, 4]."""

    @property
    def pictures(self) -> Array:
        """The pictures that it is in."""
        return np.array(list(self.where))

    def boxes(self, picture: int) -> Tensor:
        """Returns its parts in a picture, that of the most pictures first [n, 4]."""
        return self.where[picture]

    def mask(self, picture: int, size: tuple[int, ...]) -> Tensor:
        """Returns its pixels in a picture of a size (height, width)."""
        found = torch.zeros(size[0], size[1], dtype=torch.bool)
        sides = torch.tensor([*size, *size])
        for top, left, bottom, right in (self.where[picture] * sides).round().int().tolist():
            found[top:bottom, left:right] = True
        return found


class Copies:
    """Finds copies in the classes of a data set.

    Args:
        evidence: The store.
        pictures: The data of the evidence.
        seed: Of the choice of pictures where there are many.
    """

    def __init__(self, evidence: Evidence, pictures: Images, seed: int = 0) -> None:
        self.evidence, self.pictures, self.seed = evidence, pictures, seed
        self._others: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def find(self, label: int) -> list[Copy]:
        """Returns the copies in a class."""
        own = self._drawn(np.flatnonzero(self.evidence.label == label), MATCHED)
        if len(own) < LEAST:
            return []
        places = []
        for size in SIZES:
            places += self._found(label, own, *size)
        return [
            Copy(label=label, number=number, where=where)
            for number, where in enumerate(_merged(places), 1)
        ]

    def _found(
        self, label: int, own: Array, side: int, again: float, nearly: float
    ) -> list[dict[int, Tensor]]:
        """Where each patch is that is found at a size."""
        numbers, corners, windows = self._windows(own, side)
        if side not in self._others:
            some = self._drawn(np.arange(len(self.evidence)), 2 * SEARCHED)
            self._others[side] = self._windows(some, side)
        others, _, theirs = self._others[side]
        searched = torch.isin(numbers, torch.from_numpy(own[:SEARCHED]))
        foreign = torch.from_numpy(self.evidence.label[others.numpy()] != label)
        patches = find_patches(
            windows[searched],
            numbers[searched],
            theirs[foreign],
            others[foreign],
            again=again,
            nearly=nearly,
        )
        if not patches:
            return []
        side = windows.shape[-1] // 3
        size = self.evidence.settings.grid * side
        like, shifts = likeness(windows, torch.stack(patches))
        return [
            _places(numbers, corners + shifts[:, kind], like[:, kind], side, size, again)
            for kind in range(len(patches))
        ]

    def _drawn(self, numbers: Array, count: int) -> Array:
        """Some pictures in a random order."""
        return np.random.default_rng([self.seed, len(numbers)]).permutation(numbers)[:count]

    def _windows(self, numbers: Array, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Around strong cells: the number of the picture, the corner in the reduced picture, and
        the window."""
        evidence, grid = self.evidence, self.evidence.settings.grid
        found = []
        for number in np.sort(numbers).tolist():
            cells = np.argsort(-evidence.cells[number, 0].ravel(), kind="stable")[:STRONGEST]
            image = self.pictures[int(evidence.index[number])][0]
            corners, windows = cell_windows(image, torch.from_numpy(cells), grid, side)
            found.append((torch.full((len(cells),), number), corners, windows))
        first, second, third = (torch.cat(each) for each in zip(*found, strict=True))
        return first, second, third


def cell_windows(
    image: Tensor, cells: Tensor, grid: int, side: int = SIZES[0][0]
) -> tuple[Tensor, Tensor]:
    """Returns the details of cells and of all around them, at a reduced size.

    Args:
        image: A picture [3, H, W].
        cells: Numbers of its cells, row by row [M].
        grid: Cells along a side.
        side: The pixels of a cell along a side, if the picture has as many.

    Returns:
        The corners of windows in the reduced picture [M, 2], and the windows of three by three
        cells [M, 6, 3 c, 3 c].
    """
    side = max(2, min(side, min(image.shape[-2:]) // grid))
    small = F.interpolate(image[None].float(), size=(side * grid, side * grid), mode="area")
    padded = F.pad(details(small), (side, side, side, side))[0]
    corners = torch.stack([cells // grid, cells % grid], 1) * side - side
    windows = [
        padded[:, top + side : top + 4 * side, left + side : left + 4 * side]
        for top, left in corners.tolist()
    ]
    return corners, torch.stack(windows)


def find_patches(
    windows: Tensor,
    pictures: Tensor,
    others: Tensor,
    other_pictures: Tensor,
    *,
    again: float = AGAIN,
    nearly: float = NEARLY,
) -> list[Tensor]:
    """Returns patches that are found again in pictures of one class, and not nearly in others.

    Args:
        windows: Windows of cells of the class, from `cell_windows` [M, 6, 3 c, 3 c].
        pictures: The number of the picture that each is in.
        others: Windows of cells of other classes.
        other_pictures: The numbers of their pictures.
        again: The correlation from which something is the same.
        nearly: The correlation from which something is nearly the same.

    Returns:
        Up to ``PATCHES`` patches [6, c, c], those that are in the most pictures first.
    """
    if not len(windows) or not len(others):
        return []
    side, count = windows.shape[-1] // 3, len(pictures.unique())
    patches = windows[..., side : 2 * side, side : 2 * side]
    # The middle of a copy is in some cell, so that half of the shifts will do for a first look.
    half = side // 2
    left = likeness(windows[..., half:-half, half:-half], patches)[0] >= again
    enough = (_shares(left, pictures) * count).round() >= LEAST
    if not enough.any():
        return []
    left, patches = left[:, enough], patches[enough]
    elsewhere = _shares(likeness(others, patches)[0] >= nearly, other_pictures)
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


def _shares(seen: Tensor, pictures: Tensor) -> Tensor:
    """The share of pictures in which each patch is seen, of windows [M, P]."""
    numbers, rows = pictures.unique(return_inverse=True)
    each = torch.zeros(len(numbers), seen.shape[1])
    each.index_add_(0, rows, seen.float())
    return (each > 0).float().mean(0)


def _places(
    numbers: Tensor, corners: Tensor, like: Tensor, side: int, size: int, again: float
) -> dict[int, Tensor]:
    """By picture: where a patch is most alike, if it is there, in shares of the sides [4]."""
    found: dict[int, Tensor] = {}
    order = torch.sort(like, descending=True, stable=True)
    for value, at in zip(order.values.tolist(), order.indices.tolist(), strict=True):
        if value < again:
            break
        box = torch.cat([corners[at], corners[at] + side]) / size
        found.setdefault(int(numbers[at]), box.clamp(0, 1))
    return found


def _merged(places: list[dict[int, Tensor]]) -> list[dict[int, Tensor]]:
    """What is in the same pictures, together, by picture in order."""
    found: list[dict[int, list[Tensor]]] = []
    for each in places:
        for other in found:
            if len(each.keys() & other.keys()) >= TOGETHER * min(len(each), len(other)):
                break
        else:
            other = {}
            found.append(other)
        for number, box in each.items():
            other.setdefault(number, []).append(box)
    return [{n: torch.stack(each[n]) for n in sorted(each)} for each in found]

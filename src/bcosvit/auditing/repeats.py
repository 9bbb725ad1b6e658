"""Whether a cue is the same thing again: what was added to pictures repeats, parts of objects vary.

A tag, a watermark and a border are copies of one another, and a cast changes the colors of whole
pictures, beside the object as on it. A wheel or a wing is another one in each picture, turned,
scaled and lit differently, and the color of a lemon ends where the lemon does. Each kind of cue has
a measure of that between 0 (as between any pictures) and 1 (exact copies):

* cells: in how many pairs of pictures a patch of one is found again in the other (`found_again`);
* edge: how much less edges differ than those of other pictures (`edges_alike`);
* color and sharpness: how well pictures are told from others by the look of their rest
  (`bcosvit.auditing.looks.told_elsewhere`).

Letters for shapes: N pictures, G rows and columns of the grid.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EDGE = 1 / 16
"""The width of the edge, as a share of the side."""
AGAIN = 0.6
"""The correlation of details from which a patch counts as found again. That of parts of objects is
about 0.35 at the best of all shifts, that of copies on photographs above 0.7."""
AT_ONCE, AT_ONCE_ON_GPU = 650, 20_000
"""Parts of windows that are compared at a time: those that fit into the caches, or few enough for
memory."""
FLAT = 0.01
"""The root mean square of differences between neighboring pixels below which a patch has no
details that could be compared."""
REST = 0.5
"""The share of cells, those with the least evidence, that is the rest of a picture."""


def found_again(images: Tensor, anchors: Tensor) -> float:
    """Returns in which share of pairs the patch of one picture is found again in the other.

    A patch is as large as a cell, and is looked for within one cell around that of the other
    picture. Patches are compared by the correlation of their details (differences between
    neighboring pixels), which shading and smooth surfaces hardly have in common.

    Args:
        images: Pictures [N, 3, H, W].
        anchors: Where the patches are: rows and columns of their centers in pixels, and the height
            and width of a cell [N, 4].
    """
    if len(images) < 2:
        return 0.0
    height, width = (max(2, round(float(side))) for side in anchors[0, 2:])
    padded = F.pad(details(images), (2 * width, 2 * width, 2 * height, 2 * height))
    patches, windows = [], []
    for each, (row, column) in zip(padded, anchors[:, :2].tolist(), strict=True):
        top, left = round(row - height / 2) + height, round(column - width / 2) + width
        windows.append(each[:, top : top + 3 * height, left : left + 3 * width])
        patches.append(each[:, top + height : top + 2 * height, left + width : left + 2 * width])
    seen = likeness(torch.stack(windows), torch.stack(patches))[0] >= AGAIN
    pairs = ~torch.eye(len(images), dtype=torch.bool)
    return float(seen[pairs].float().mean())


def details(images: Tensor) -> Tensor:
    """Differences between neighboring pixels, to the right and down [N, 6, H, W]."""
    across, down = images.diff(dim=-1), images.diff(dim=-2)
    return torch.cat([F.pad(across, (0, 1)), F.pad(down, (0, 0, 0, 1))], 1)


def likeness(windows: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how well each patch is found anywhere in each window, and where.

    Args:
        windows: Details of parts of pictures [N, 6, H, W], from `details`.
        patches: Details of smaller parts [P, 6, h, w].

    Returns:
        The largest correlation of all shifts, 1 for exact copies [N, P], and the row and column in
        the window of the patch's corner there [N, P, 2].
    """
    least, side = FLAT * patches[0].numel() ** 0.5, patches.shape[-2:]
    units = _units(patches.flatten(1), least)
    best, places = [], []
    for some in _split(windows, side):
        values, place = (_units(_parts(some, side).flatten(2), least) @ units.T).max(1)
        best.append(values)
        places.append(place)
    width = windows.shape[-1] - patches.shape[-1] + 1
    place = torch.cat(places)
    return torch.cat(best), torch.stack([place // width, place % width], 2)


def at_most_alike(windows: Tensor, patches: Tensor) -> Tensor:
    """Returns what `likeness` is at most [N, P], by the brightness of details alone, which takes
    less than half of the time."""
    least, side = FLAT * patches[0].numel() ** 0.5, patches.shape[-2:]
    units = _brightness(patches[:, None], least)[:, 0]
    parts = [
        (_brightness(_parts(some, side), least) @ units.T).amax(1) for some in _split(windows, side)
    ]
    return torch.cat(parts)


def _split(windows: Tensor, side: Sequence[int]) -> Sequence[Tensor]:
    parts = (windows.shape[-2] - side[0] + 1) * (windows.shape[-1] - side[1] + 1)
    return windows.split(max(1, (AT_ONCE_ON_GPU if windows.is_cuda else AT_ONCE) // parts))


def _parts(windows: Tensor, side: Sequence[int]) -> Tensor:
    """All parts of windows [N, S, 6, h, w]."""
    several = windows.unfold(2, side[0], 1).unfold(3, side[1], 1)
    return several.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _units(vectors: Tensor, least: float) -> Tensor:
    """Vectors of length 1 [..., D]; those that are shorter than ``least`` stay shorter."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(least)


def _brightness(parts: Tensor, least: float) -> Tensor:
    """Details of the brightness, and how much of the colors there is beside them: products are at
    least those of all details [N, S, D / 3 + 1]."""
    bright = parts.unflatten(2, (2, 3)).sum(3).flatten(2) / 3**0.5
    whole = parts.flatten(2).square().sum(2, keepdim=True)
    rest = (whole - bright.square().sum(2, keepdim=True)).clamp_min(0).sqrt()
    return torch.cat([bright, rest], 2) / whole.sqrt().clamp_min(least)


def edges_alike(own: Tensor, other: Tensor) -> float:
    """Returns how much less edges of pictures differ than those of others, on the line where it is
    most."""
    return max(
        1 - _variance(own, line) / max(_variance(other, line), 1e-6)
        for line in range(max(1, round(EDGE * min(own.shape[-2:]))))
    )


def _variance(images: Tensor, line: int) -> float:
    """How much pixels at a distance from the edge differ between images."""
    ends = (line, -1 - line)
    sides = [images[..., at, :] for at in ends] + [images[..., at] for at in ends]
    return float(torch.cat(sides, -1).var(0).mean())

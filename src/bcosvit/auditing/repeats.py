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

import torch
import torch.nn.functional as F
from torch import Tensor

EDGE = 1 / 16
"""The width of the edge, as a share of the side."""
AGAIN = 0.6
"""The correlation of details from which a patch counts as found again. That of parts of objects is
about 0.35 at the best of all shifts, that of copies on photographs above 0.7."""
AT_ONCE = 64
"""Windows that are compared at a time, which bounds the memory."""
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
    least = FLAT * patches[0].numel() ** 0.5
    size = patches.flatten(1).norm(dim=1).clamp_min(least)
    ones = patches.new_ones(1, 1, *patches.shape[-2:])
    best, places = [], []
    for some in windows.split(AT_ONCE):
        there = _moved((some**2).sum(1, keepdim=True), ones).clamp_min(0).sqrt().clamp_min(least)
        values, place = (_moved(some, patches) / there).flatten(2).max(2)
        best.append(values)
        places.append(place)
    width = windows.shape[-1] - patches.shape[-1] + 1
    place = torch.cat(places)
    return torch.cat(best) / size, torch.stack([place // width, place % width], 2)


def _moved(windows: Tensor, patches: Tensor) -> Tensor:
    """The product of each patch with all parts of each window [N, P, …]."""
    if not windows.is_cuda:
        return F.conv2d(windows, patches)
    # Convolutions of a GPU are in TF32 unless that is switched off, and such products are not.
    height, width = patches.shape[-2:]
    parts = windows.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    found = parts.flatten(3) @ patches.flatten(1).T
    return found.permute(0, 3, 1, 2)


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

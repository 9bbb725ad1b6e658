"""Looks: properties of all pixels of a picture, such as its colors, that no place shows.

A look is measured in pictures or in parts of them, and pictures can be given that of others.

Letters for shapes: N pictures, K numbers that describe a look.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TAIL = 0.02
"""The share of a picture's darkest and brightest pixels that are black and white."""
OCTAVES = 4
"""Sizes of details, each twice as large as the one before; the last is what others are compared
with."""
NO_DETAIL = 1e-3
"""The root mean square below which there are no details of a size."""


def colors(images: Tensor, where: Tensor | None = None) -> Tensor:
    """Black and white point of each channel [N, 2, 3].

    A cast of color moves them in any picture, while a blue sky does not.

    Args:
        images: Pictures [N, 3, H, W].
        where: The pixels that count [N, H, W]; all by default.
    """
    if where is not None:
        parts = zip(images, where, strict=True)
        return torch.cat([colors(image[:, inside][None, :, None]) for image, inside in parts])
    values = images.flatten(2).sort(2).values
    few = max(1, round(TAIL * values.shape[2]))
    return torch.stack([values[..., :few].mean(2), values[..., -few:].mean(2)], 1)


def recolored(images: Tensor, new: Tensor) -> Tensor:
    """Images with other black and white points of their channels [N, 2, 3]."""
    (black, white), (new_black, new_white) = (
        each[..., None, None].unbind(1) for each in (colors(images), new)
    )
    inside = (images - black) / (white - black).clamp_min(1e-3)
    return (inside * (new_white - new_black) + new_black).clamp(0, 1)


def sharpness(images: Tensor, where: Tensor | None = None) -> Tensor:
    """How much finer details there are than those of the last of ``OCTAVES`` sizes, as logarithms
    [N, OCTAVES - 1].

    Blur takes the finest details of a picture most, while a smooth sky has few of any size.

    Args:
        images: Pictures [N, 3, H, W].
        where: The pixels that count [N, H, W]; all by default.
    """
    power = _octaves(images)[:OCTAVES].square().mean(2)
    inside = torch.ones_like(power[0]) if where is None else where.to(power)
    amounts = ((power * inside).sum((2, 3)) / inside.sum((1, 2))).sqrt().add(NO_DETAIL).log()
    return (amounts[:-1] - amounts[-1]).T


def sharpened(images: Tensor, new: Tensor) -> Tensor:
    """Images with another sharpness [N, OCTAVES - 1]."""
    finer, rest = _octaves(images).split([OCTAVES - 1, 2])
    gains = (new - sharpness(images)).exp().T
    return ((finer * gains[..., None, None, None]).sum(0) + rest.sum(0)).clamp(0, 1)


def _octaves(images: Tensor) -> Tensor:
    """Details of images by their size, the finest first, and what is left; they add up to the
    images [OCTAVES + 1, N, 3, H, W]."""
    found, left = [], images
    line = images.new_tensor([1, 4, 6, 4, 1]) / 16
    for octave in range(OCTAVES):
        step, channels = 2**octave, left.shape[1]
        smooth = F.pad(left, (2 * step,) * 4, mode="replicate")
        for kernel, dilation in ((line[:, None], (step, 1)), (line[None], (1, step))):
            weight = kernel.expand(channels, 1, *kernel.shape)
            smooth = F.conv2d(smooth, weight, groups=channels, dilation=dilation)
        found.append(left - smooth)
        left = smooth
    return torch.stack([*found, left])


def told_elsewhere(
    look: Callable[[Tensor, Tensor], Tensor],
    own: Tensor,
    other: Tensor,
    own_rest: Tensor,
    other_rest: Tensor,
) -> float:
    """Returns how well pictures are told from others by the look of their rest.

    The direction in which looks differ (a linear discriminant) is that of whole pictures; along
    it, the rest of the pictures is compared. 1 is always, 0 is not at all.

    Args:
        look: Measures the pixels of pictures that count.
        own: Pictures [N, 3, H, W].
        other: Other pictures.
        own_rest: The pixels of the pictures in which the class has the least evidence [N, H, W].
        other_rest: Those of the others.
    """

    def measured(images: Tensor, where: Tensor) -> Tensor:
        return look(images, where).flatten(1)

    everywhere = own_rest.new_ones(1, *own.shape[-2:])
    whole = measured(other, everywhere.expand(len(other), -1, -1)).mean(0)
    moved = measured(own, everywhere.expand(len(own), -1, -1)).mean(0) - whole
    mine, others = measured(own, own_rest), measured(other, other_rest)
    spread = torch.cov(others.T) + 1e-4 * torch.eye(others.shape[1])
    direction = torch.linalg.solve(spread, moved)
    further = (mine @ direction)[:, None] > (others @ direction)[None]
    return max(0.0, 2 * float(further.float().mean()) - 1)

"""How pixels are removed, and the options that several metrics share."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.messages import unknown
from bcosvit.metrics.accuracy import most_confident
from bcosvit.metrics.base import Item, Prediction
from bcosvit.models.base import AnyModel

REMOVALS = ("zero", "black", "mean", "blur")
"""What takes a pixel's place: a zero vector in the model's own encoding, which no color has; black;
the mean color of its image; or the pixel of the blurred image."""
BLUR = 1 / 16
"""The standard deviation of the blur, as a share of the image's shorter side."""


def check_removal(removal: str) -> None:
    """Raises a ValueError if there is no such way to remove pixels."""
    if removal not in REMOVALS:
        raise ValueError(unknown("removal", removal, REMOVALS))


def check_smooth(smooth: int) -> None:
    """Raises a ValueError unless maps can be averaged over so many pixels."""
    if smooth < 1 or smooth % 2 == 0:
        raise ValueError(f"smooth = {smooth} is not allowed: give an odd integer >= 1.")


def check_min_confidence(min_confidence: float) -> None:
    """Raises a ValueError unless the value is a probability."""
    if not 0 <= min_confidence < 1:
        raise ValueError(
            f"min_confidence = {min_confidence} is not allowed: give a number from 0 up to 1."
        )


def confident(predictions: Sequence[Prediction], min_confidence: float) -> list[Prediction]:
    """Returns the predictions whose confidence in the labeled class is at least so high."""
    return [each for each in predictions if each.confidence >= min_confidence]


def most_confident_items(
    predictions: Sequence[Prediction], count: int, min_confidence: float = 0.0
) -> list[Item]:
    """Selects the most confident correctly classified images, the most confident first, as single
    items; fewer than ``count`` where there are fewer of at least ``min_confidence``."""
    able = most_confident(confident(predictions, min_confidence))
    return [(prediction,) for prediction in able[:count]]


@torch.no_grad()
def replacement(model: AnyModel, images: Tensor, removal: str) -> Tensor | None:
    """Computes what takes the place of removed pixels, one of ``REMOVALS``, as encoded images
    [B, C, H, W]; None where they are zero."""
    check_removal(removal)
    if removal == "zero":
        return None
    if removal == "black":
        pictures = torch.zeros_like(images)
    elif removal == "mean":
        pictures = images.mean((2, 3), keepdim=True).expand_as(images)
    else:
        pictures = blurred(images)
    return model.encoding(pictures)


def blurred(images: Tensor) -> Tensor:
    """Blurs images [B, C, H, W] in [0, 1] with a Gaussian; pixels at the border are reflected."""
    side = min(images.shape[-2:])
    sigma = BLUR * side
    radius = min(int(3 * sigma) + 1, side - 1)
    at = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = (-(at**2) / (2 * sigma**2)).exp()
    kernel = (kernel / kernel.sum()).view(1, 1, -1, 1)
    flat = images.flatten(0, 1).unsqueeze(1)
    padded = F.pad(flat, (radius, radius, radius, radius), mode="reflect")
    both = F.conv2d(F.conv2d(padded, kernel), kernel.transpose(2, 3))
    # A GPU may round the kernel, so that its sum is not exactly 1 and white would exceed it.
    return both.view_as(images).clamp(0, 1)


def smoothed(maps: Tensor, smooth: int) -> Tensor:
    """Averages maps [B, H, W] over squares of ``smooth`` pixels; outside them there is zero."""
    if smooth == 1:
        return maps
    return F.avg_pool2d(maps.unsqueeze(1), smooth, 1, smooth // 2).squeeze(1)


def region_sums(maps: Tensor, region: int) -> Tensor:
    """Sums maps [B, H, W] over squares of ``region`` pixels [B, h, w].

    Squares at the right and lower border are smaller where the side does not divide the image's.
    """
    if region == 1:
        return maps
    height, width = maps.shape[-2:]
    padded = F.pad(maps, (0, -width % region, 0, -height % region))
    return padded.unflatten(2, (-1, region)).unflatten(1, (-1, region)).sum((2, 4))


def region_pixels(regions: Tensor, region: int, height: int, width: int) -> Tensor:
    """Gives every pixel [..., H, W] the value of its region [..., h, w]."""
    if region == 1:
        return regions
    rows = regions.repeat_interleave(region, -2)[..., :height, :]
    return rows.repeat_interleave(region, -1)[..., :width]

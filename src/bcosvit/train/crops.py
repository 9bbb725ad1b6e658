"""Random crops of a whole batch at once, on any device: where they lie, and how they are resized.

A crop is resized by torch's antialiased bilinear filter, as workers do it (`data.transforms`): each
pixel that comes out is a weighted mean of those within reach in the crop, along either axis on its
own. For a batch of crops that is two products with matrices that are made from the crops' edges,
whatever their sizes, and to mirror one is to read its edges from right to left.
"""

import math

import torch
from torch import Tensor

from bcosvit.data.transforms import SLIMMEST

TRIES = 10
TIE = 1e-3
"""What a level is rounded up by, beyond a half: means that lie between two levels are common, and
which way they go must not hang on the order of a sum, that is on how large the batch is."""


def draw_boxes(sizes: Tensor, *, scale: tuple[float, float], flip: float, seed: int) -> Tensor:
    """Left, right, top and bottom [n, 4] of a crop of each picture, float64 as are ``sizes`` [n, 2]
    (width and height); left and right are swapped where it is to be mirrored.

    Drawn as by torchvision's ``RandomResizedCrop``: a share of the area and an aspect ratio until
    they fit, or else the largest crop in the middle that is neither too slim nor too wide.
    """
    width, height = sizes.T
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(sizes), 2 * TRIES + 3, generator=generator, dtype=torch.float64)
    areas, ratios, (x, y, mirror) = draws[:, :TRIES], draws[:, TRIES:-3], draws[:, -3:].T
    areas = (scale[0] + (scale[1] - scale[0]) * areas) * (width * height)[:, None]
    ratios = torch.exp((1 - 2 * ratios) * math.log(SLIMMEST))
    wide, tall = (areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()
    fits = (wide > 0) & (wide <= width[:, None]) & (tall > 0) & (tall <= height[:, None])
    # argmax answers with the first of many.
    first, found = fits.byte().argmax(1, keepdim=True), fits.any(1)
    wide = torch.where(found, wide.gather(1, first)[:, 0], (height / SLIMMEST).round().min(width))
    tall = torch.where(found, tall.gather(1, first)[:, 0], (width / SLIMMEST).round().min(height))
    left = torch.where(found, x * (width - wide + 1), (width - wide) / 2).floor()
    top = torch.where(found, y * (height - tall + 1), (height - tall) / 2).floor()
    right, mirrored = left + wide, mirror < flip
    edges = (torch.where(mirrored, right, left), torch.where(mirrored, left, right))
    return torch.stack((*edges, top, top + tall), 1)


def resampled(pictures: Tensor, boxes: Tensor, size: int) -> Tensor:
    """The boxes [n, 4] of pictures [n, H, 3, W], resized to whole levels [n, size, 3, size]."""
    left, right, top, bottom = boxes.T
    n, height, channels, width = pictures.shape
    rows = _weights(top, bottom, size, height) @ pictures.reshape(n, height, channels * width)
    columns = _weights(left, right, size, width).transpose(1, 2)
    found = rows.view(n, size * channels, width) @ columns
    return found.add_(0.5 + TIE).floor_().view(n, size, channels, size)


def _weights(begin: Tensor, end: Tensor, size: int, length: int) -> Tensor:
    """Of each of ``length`` pixels in each of ``size`` that come out, [n, size, length]."""
    step = (end - begin)[:, None] / size
    steps = torch.arange(size, device=begin.device) + 0.5
    pixels = torch.arange(length, device=begin.device)
    distances = (pixels + 0.5 - (begin[:, None] + steps * step)[..., None]).abs_()
    weights = (1 - distances / step.abs().clamp(min=1)[..., None]).clamp_(min=0)
    # Nothing outside shines in: the crop is cut before it is resized.
    first, last = begin.minimum(end).floor(), begin.maximum(end).ceil()
    weights *= ((pixels >= first[:, None]) & (pixels < last[:, None]))[:, None]
    return weights / weights.sum(-1, keepdim=True)

"""Color images of W(x), which show the row of each pixel as a color.

A B-cos model reads a pixel as [r, g, b, 1−r, 1−g, 1−b], so the *direction* of such a vector is a
color. Rows of W(x) align with what they respond to, hence their directions are colors as well;
their norm becomes opacity, where the pixel speaks for the class.

Pictures are worked on one at a time and channel by channel, and the percentile is found by
partial sorting: torch's own quantile refuses more than 16 million values.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTH = 15
PERCENTILE = 99.5


def color_image(
    weights: Tensor,
    contributions: Tensor,
    *,
    smooth: int = SMOOTH,
    percentile: float = PERCENTILE,
) -> Tensor:
    """RGBA in [0, 1], [..., 4, H, W], from weights [..., 6, H, W] and contributions [..., H, W].

    They are an ``Attribution``'s ``weights`` and ``map``. Opacity is the norm of a pixel's weights,
    zero where its contribution is negative, averaged over ``smooth`` × ``smooth`` pixels (an even
    window reaches one pixel further to the right and down; beyond the edge there are zeros), and
    full from the ``percentile``-th percentile on. Nothing is opaque where all weights are zero.
    """
    _check(weights, contributions, smooth, percentile)
    weights, contributions = weights.detach(), contributions.detach()
    dtype = torch.promote_types(weights.dtype, torch.float32)
    shape = weights.shape
    picture = torch.empty((*shape[:-3], 4, *shape[-2:]), dtype=dtype, device=weights.device)
    each = zip(
        picture.flatten(0, -4) if weights.ndim > 3 else picture[None],
        weights.reshape(-1, *shape[-3:]),
        contributions.reshape(-1, *shape[-2:]),
        strict=True,
    )
    for rgba, rows, against in each:
        _paint(rgba, rows.to(dtype), against < 0, smooth, percentile)
    return picture


def _paint(rgba: Tensor, rows: Tensor, against: Tensor, smooth: int, percentile: float) -> None:
    """Fills ``rgba`` [4, H, W] from one picture's ``rows`` [6, H, W] of W(x)."""
    # Relative to its largest entry a vector neither overflows nor vanishes when it is squared.
    largest = rows.abs().amax(0)
    unit = largest.where(largest > 0, torch.ones_like(largest))
    squares = torch.zeros_like(largest)
    for channel in range(3):
        color, inverse = rows[channel] / unit, rows[channel + 3] / unit
        squares += color.square() + inverse.square()
        color, inverse = color.clamp_(min=0), inverse.clamp_(min=0)
        both = color + inverse
        rgba[channel] = color / both.where(both > 0, torch.ones_like(both))
    strength = (largest * squares.sqrt()).masked_fill(against, 0)
    strength = _average(strength, smooth)
    full = float(np.percentile(strength.cpu().numpy(), percentile))
    # With fewer visible pixels than the percentile leaves above it, all of them are beyond it.
    rgba[3] = (strength / full).clamp_(max=1) if full > 0 else (strength > 0).to(rgba)


def _average(strength: Tensor, smooth: int) -> Tensor:
    """The mean over a window around each pixel, zeros outside; as rows then columns of windows."""
    before, after = (smooth - 1) // 2, smooth // 2
    padded = F.pad(strength[None], (before, after, before, after))
    return F.avg_pool2d(F.avg_pool2d(padded, (1, smooth), 1), (smooth, 1), 1)[0]


def _check(weights: Tensor, contributions: Tensor, smooth: int, percentile: float) -> None:
    if weights.ndim < 3 or weights.shape[-3] != 6:
        raise ValueError(
            f"Weights have shape {list(weights.shape)}, expected [..., 6, H, W]: only inherent "
            f"explanations of B-cos models have colors."
        )
    expected = [*weights.shape[:-3], *weights.shape[-2:]]
    if list(contributions.shape) != expected:
        raise ValueError(
            f"Contributions have shape {list(contributions.shape)}, expected {expected} to go with "
            f"the weights; give an attribution's weights and map."
        )
    if smooth < 1:
        raise ValueError(f"smooth = {smooth} is not allowed: give an integer >= 1.")
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile = {percentile} is not allowed: give 0 to 100.")
    for name, tensor in {"Weights": weights, "Contributions": contributions}.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} contain NaN or infinity, which have no color.")

"""What the B-cos ops share: freezing, unit rows, MaxOut and the cosine scaling.

``constant_if`` is the only place in the package that cuts a tensor out of the gradient for an
explanation (SPEC 1.5): to read what a frozen view freezes, look for its callers.
"""

import torch
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16)


def constant_if(frozen: bool, tensor: Tensor) -> Tensor:
    """In a frozen view ``tensor`` is part of the dynamic matrix W(x), so no gradient enters it."""
    return tensor.detach() if frozen else tensor


def wide(tensor: Tensor) -> Tensor:
    """At least float32: squares of half-precision numbers overflow at 256 and vanish below 2e-4."""
    return tensor.float() if tensor.dtype in NARROW else tensor


def unit_rows(weight: Tensor) -> Tensor:
    """ŵ: every output unit's weight scaled to norm one; an all-zero row stays zero."""
    flat = wide(weight).flatten(1)
    norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    unit = flat / norm.clamp_min(torch.finfo(flat.dtype).tiny)
    return unit.view_as(weight).to(weight.dtype)


def maxout(units: Tensor, m: int, dim: int) -> Tensor:
    """The largest of each ``m`` neighbouring units along ``dim``; the winner takes the gradient."""
    if m == 1:
        return units
    # max(dim) rather than amax: with ties amax splits the gradient between units.
    return units.unflatten(dim, (-1, m)).max(dim=dim + 1 if dim >= 0 else dim).values


def cosine_scaled(linear: Tensor, norm: Tensor, b: float, scale: float, frozen: bool) -> Tensor:
    """γ · |cos|^(B−1) · (ŵ·a), the paper's Eq. (8), from ŵ·a and ‖a‖ (both wide)."""
    if b == 1:
        return scale * linear
    # Rounding alone can push |cos| above 1.
    cos = (constant_if(frozen, linear).abs() / constant_if(frozen, norm)).clamp(max=1)
    if b == 2:
        power = cos
    elif b > 2:
        power = cos.pow(b - 1)
    else:
        # The slope of |cos|^(B−1) at 0 is infinite, and infinity times ŵ·a = 0 is NaN; the
        # product's true slope is 0.
        zero = cos == 0
        power = cos.masked_fill(zero, 1).pow(b - 1).masked_fill(zero, 0)
    return scale * power * linear

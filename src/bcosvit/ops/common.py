"""What the B-cos ops share: freezing, unit rows, MaxOut and the cosine scaling.

``constant_if`` is the only place in the package that cuts a tensor out of the gradient for an
explanation (SPEC 1.5): to read what a frozen view freezes, look for its callers.
"""

from typing import Any

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
    """The largest of each ``m`` neighboring units along ``dim``; the winner takes the gradient.

    Of equal units the first wins.
    """
    if m == 1:
        return units
    axis = dim + 1 if dim >= 0 else dim
    groups = units.unflatten(dim, (-1, m))
    # A compiler needs no help, and captures max(dim) everywhere.
    if m == 2 and not torch.compiler.is_compiling():
        first, second = groups.unbind(axis)
        return _Larger.apply(first, second)  # type: ignore[no-untyped-call]
    # Not amax: with ties it splits the gradient between units.
    return groups.max(axis).values


class _Larger(torch.autograd.Function):
    """``torch.maximum``, a twentieth of ``max(dim)``'s time on a CPU, but ties are the first's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        return torch.maximum(first, second)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        first, second = inputs
        ctx.save_for_backward(second > first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (second_won,) = ctx.saved_tensors
        return grad.masked_fill(second_won, 0), grad.masked_fill(~second_won, 0)


def cosine_scaled(linear: Tensor, norm: Tensor, b: float, scale: float, frozen: bool) -> Tensor:
    """γ · |cos|^(B−1) · (ŵ·a), the paper's Eq. (8), from ŵ·a and ‖a‖ (both wide)."""
    if b == 1:
        return scale * linear
    if frozen or not torch.is_grad_enabled():
        # The factor is a constant: one tensor, changed in place, and no graph.
        factor = constant_if(True, linear).abs().div_(constant_if(True, norm)).clamp_(max=1)
        factor = factor if b == 2 else factor.pow_(b - 1)
        return factor.mul_(scale) * linear
    # Rounding alone can push |cos| above 1.
    cos = (linear.abs() / norm).clamp(max=1)
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

"""MaxOut and the cosine scaling in plain PyTorch, which the reference and CPUs share.

Letters: a input, ŵ weight of norm one, γ scale, m units per output.
"""

from typing import Any

import torch
from torch import Tensor

from bcosvit.ops.dispatch import constant_if

Pair = tuple[int, int]


def cosine_scaled(linear: Tensor, norm: Tensor, b: float, scale: float, frozen: bool) -> Tensor:
    """γ·|cos|^(B−1)·(ŵ·a) from ŵ·a and ‖a‖, both in at least float32."""
    if frozen or not torch.is_grad_enabled():
        # The factor is a constant: one tensor, changed in place, and no graph.
        factor = factor_of(constant_if(True, linear), constant_if(True, norm), b, scale)
        return factor * linear if linear.requires_grad else factor.mul_(linear)
    # Rounding alone can push |cos| above 1.
    if b == 2:
        return (linear.abs() * (scale / norm)).clamp(max=scale) * linear
    cos = (linear.abs() / norm).clamp(max=1)
    if b > 2:
        power = cos.pow(b - 1)
    else:
        # The slope of |cos|^(B−1) at 0 is infinite, and infinity times ŵ·a = 0 is NaN; the
        # product's true slope is 0.
        zero = cos == 0
        power = cos.masked_fill(zero, 1).pow(b - 1).masked_fill(zero, 0)
    return scale * power * linear


def factor_of(linear: Tensor, norm: Tensor, b: float, scale: float) -> Tensor:
    """γ·|cos|^(B−1) as one tensor that is changed in place."""
    if b == 2:
        return linear.abs().mul_(scale / norm).clamp_(max=scale)
    return linear.abs().div_(norm).clamp_(max=1).pow_(b - 1).mul_(scale)


def largest_units(units: Tensor, m: int, dim: int) -> Tensor:
    """MaxOut: the largest of each ``m`` neighboring units along ``dim``; it takes the gradient.

    Of equal units the first one wins.
    """
    if m == 1:
        return units
    axis = dim + 1 if dim >= 0 else dim
    groups = units.unflatten(dim, (-1, m))
    # A compiler needs no help, and captures max(dim) everywhere.
    if m == 2 and not torch.compiler.is_compiling():
        first, second = groups.unbind(axis)
        return larger(first, second)
    # Not amax: with ties it splits the gradient between units.
    return groups.max(axis).values


def larger(first: Tensor, second: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.maximum(first, second)
    return _Larger.apply(first, second)  # type: ignore[no-untyped-call]


class _Larger(torch.autograd.Function):
    """``torch.maximum``, a twentieth of the time of ``max(dim)`` on a CPU; ties are the first's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(first: Tensor, second: Tensor) -> Tensor:
        return torch.maximum(first, second)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        first, second = inputs
        ctx.save_for_backward(second > first)
        ctx.save_for_forward(second > first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (second_won,) = ctx.saved_tensors
        return grad.masked_fill(second_won, 0), grad.masked_fill(~second_won, 0)

    @staticmethod
    def jvp(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (second_won,) = ctx.saved_tensors
        return torch.where(second_won, second, first)

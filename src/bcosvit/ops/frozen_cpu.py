"""The forward pass of a frozen B-cos layer with MaxOut 2 on a CPU, and its adjoint.

One tensor per layer is kept for the adjoint: γ·|cos|^(B−1), with a sign that says which of the two
units won. Where the kernels of ``compiled`` are available, the adjoint multiplies a gradient by the
weights of the winning units only.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bcosvit.ops.compiled import kernels, scaled, winners_adjoint
from bcosvit.ops.dispatch import is_looped_over, is_plain
from bcosvit.ops.products import convolution, linear, transposed
from bcosvit.ops.scaling import Pair, factor_of

BLOCK = 2**18
"""Numbers that are scaled at once: so few that all passes over them find them in the cache."""


def scaled_along(
    units: Tensor, norm: Tensor, b: float, m: int, scale: float, dim: int, **how: bool
) -> Any:
    """`scaled` along any axis, where it applies: a tuple, or None."""
    if b != 2 or m > 2:
        return None
    how_many: dict[str, Any] = {"maxout": m, "scale": scale}
    found = scaled(units.movedim(dim, -1), norm.movedim(dim, -1), **how_many, **how)
    return None if found is None else tuple(t if t is None else t.movedim(-1, dim) for t in found)


def blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Parts of all tensors along their first axis, of `BLOCK` numbers of the first tensor each."""
    first = tensors[0]
    if first.ndim == 1:
        return [tensors]
    rows = max(1, BLOCK * len(first) // max(1, first.numel()))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _with_factor(
    units: Tensor, norm: Tensor, b: float, scale: float, dim: int
) -> tuple[Tensor, Tensor]:
    """MaxOut of two, scaled, and γ·|cos|^(B−1) with a sign that says which unit won."""
    in_one_pass = scaled_along(units, norm, b, 2, scale, dim, with_factor=True)
    if in_one_pass is not None:
        return in_one_pass
    first, second = units.chunk(2, dim)
    largest = torch.maximum(first, second)
    factor = torch.empty_like(largest)
    for f, y, size, one, two in blocks(factor, largest, norm, first, second):
        f.copy_(factor_of(y, size, b, scale))
        y.mul_(f)
        # Plus for the first, also where both are the same.
        f.copysign_(one - two)
    return largest, factor


def of_two(units: Tensor, norm: Tensor, b: float, scale: float, dim: int) -> Tensor:
    """MaxOut of two and scaling where γ·|cos|^(B−1) is a constant."""
    both: tuple[Tensor, Tensor] = _Frozen.apply(units, norm, b, scale, dim)  # type: ignore[no-untyped-call]
    return both[0]


class _Frozen(torch.autograd.Function):
    """See `of_two`."""

    @staticmethod
    def forward(
        units: Tensor, norm: Tensor, b: float, scale: float, dim: int
    ) -> tuple[Tensor, Tensor]:
        return _with_factor(units, norm, b, scale, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dim = inputs[-1]
        ctx.mark_non_differentiable(output[1])
        # No zeros for the gradient of the factor, which has none.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return _spread(grad, factor, ctx.dim), None, None, None, None


def _spread(grad: Tensor, factor: Tensor, dim: int) -> Tensor:
    """What each of the two units gets of a gradient."""
    if is_looped_over(grad):
        return torch.cat([grad * factor.clamp(min=0), -grad * factor.clamp(max=0)], dim)
    d_units: Tensor = _Spread.apply(grad, factor, dim)  # type: ignore[no-untyped-call]
    return d_units


class _Spread(torch.autograd.Function):
    """The adjoint of `_Frozen`, see `_spread`."""

    @staticmethod
    def forward(grad: Tensor, factor: Tensor, dim: int) -> Tensor:
        shape = list(grad.shape)
        shape[dim] *= 2
        out = _empty_like(grad, shape)
        first, second = out.chunk(2, dim)
        for g, f, one, two in blocks(grad, factor, first, second):
            scaled = g * f
            torch.ops.aten.threshold_backward.grad_input(scaled, f, 0, grad_input=one)
            torch.sub(one, scaled, out=two)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, factor, ctx.dim = inputs
        ctx.save_for_backward(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        first, second = grad.chunk(2, ctx.dim)
        return torch.where(factor > 0, first, second) * factor.abs(), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad: Tensor, factor: Tensor, dim: int
    ) -> tuple[Tensor, int]:
        # Several classes of one explanation, which share the constants.
        assert in_dims[0] is not None and in_dims[1:] == (None, None)
        grad, dim = grad.movedim(in_dims[0], 0), dim if dim < 0 else dim + 1
        return _Spread.apply(grad, factor.expand_as(grad), dim), 0  # type: ignore[no-untyped-call]


def _empty_like(tensor: Tensor, shape: list[int]) -> Tensor:
    """Room for a tensor of another width with the same order of axes in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
    room = tensor.new_empty([shape[axis] for axis in order])
    return room.permute([order.index(axis) for axis in range(tensor.ndim)])


def has_winners(x: Tensor, weight: Tensor, m: int, frozen: bool) -> bool:
    """Whether an explanation will ask for the adjoint of MaxOut 2, which has a kernel."""
    return (
        m == 2
        and frozen
        and torch.is_grad_enabled()
        and x.requires_grad
        and not weight.requires_grad
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and is_plain(x)
        and is_plain(weight)
        and not torch.is_autocast_enabled("cpu")
        and kernels().winners is not None
    )


def winners(x: Tensor, *rest: Any, stride: Pair, padding: Pair) -> Tensor:
    """The B-cos transform of images [n, h, w, channels] with MaxOut 2, if `has_winners`."""
    both: tuple[Tensor, Tensor] = _Winners.apply(x, *rest, stride, padding)  # type: ignore[no-untyped-call]
    return both[0]


class _Winners(torch.autograd.Function):
    """See `winners`. The adjoint reads the winners' weights alone."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, norm: Tensor, b: float, scale: float, stride: Pair, padding: Pair
    ) -> tuple[Tensor, Tensor]:
        return _with_factor(_units(x, weight, stride, padding), norm, b, scale, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, _, _, *window = inputs
        ctx.window = (x.shape[1:3], *window)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        factor, weight = ctx.saved_tensors
        if is_looped_over(grad):
            images = _spread(grad, factor, -1).permute(0, 3, 1, 2)
            size, stride, padding = map(list, ctx.window)
            d_x = transposed(images, weight, stride, padding, [1, 1], 1, size).permute(0, 2, 3, 1)
        else:
            d_x = _WinnersAdjoint.apply(grad, factor, weight, *ctx.window)  # type: ignore[no-untyped-call]
        return d_x, None, None, None, None, None, None


class _WinnersAdjoint(torch.autograd.Function):
    """Its adjoint; several classes of one explanation are further images."""

    @staticmethod
    def forward(
        grad: Tensor, factor: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair
    ) -> Tensor:
        window = {"size": size, "stride": stride, "padding": padding}
        return winners_adjoint(grad, factor, weight, **window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, factor, weight, _, *ctx.window = inputs
        ctx.save_for_backward(factor, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, weight = ctx.saved_tensors
        first, second = _units(grad, weight, *ctx.window).chunk(2, -1)
        factor = factor.repeat(len(first) // len(factor), 1, 1, 1)
        d_grad = torch.where(factor > 0, first, second) * factor.abs()
        return d_grad, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], grad: Tensor, *rest: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        images = grad.movedim(in_dims[0], 0).flatten(0, 1)
        d_x: Tensor = _WinnersAdjoint.apply(images, *rest)  # type: ignore[no-untyped-call]
        return d_x.unflatten(0, (info.batch_size, -1)), 0


def _units(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """A convolution of images [n, h, w, channels]."""
    if (weight.shape[2:], stride, padding) == ((1, 1), (1, 1), (0, 0)):
        return linear(x, weight.flatten(1), frozen=True)
    images = x.permute(0, 3, 1, 2)
    return convolution(images, weight, None, stride, padding, frozen=True).permute(0, 2, 3, 1)

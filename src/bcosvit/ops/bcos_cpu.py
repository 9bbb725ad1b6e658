"""The B-cos transform on a CPU: the equation of ``bcos`` with fewer passes over memory.

Products are bound by arithmetic, all else by memory. Results are therefore scaled in place, by a
kernel or in blocks that stay in the cache; MaxOut compares halves of a tensor; images have their
channels last, where a 1×1 convolution is a product; and an explanation keeps one tensor per layer,
γ·|cos|^(B−1) with the MaxOut winner as its sign.

Letters: n batch, d inputs, c outputs, m units per output, h, w pixels.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bcosvit.ops.compiled import depthwise, kernels, scaled, winners_adjoint
from bcosvit.ops.dispatch import constant_if, is_direct, is_plain, narrowed, wide
from bcosvit.ops.products import convolution, linear, patch_sums
from bcosvit.ops.scaling import Pair, cosine_scaled, factor_of, larger, largest_units

BLOCK = 2**18
"""Numbers that are scaled at once: so few that all passes over them find them in the cache."""


def bcos_linear(
    x: Tensor, weight: Tensor, *, b: float, maxout: int, scale: float, eps: float, frozen: bool
) -> Tensor:
    norm = None if b == 1 else (row_squares(constant_if(frozen, x), dim=-1) + eps).sqrt()
    weight = unit_major(weight, maxout)
    if norm is not None and _has_winners(x, weight, maxout, frozen):
        # Rows are images of one row of pixels.
        shape = (-1, 1, x.shape[-2] if x.ndim > 1 else 1)
        images, norm = x.reshape(*shape, x.shape[-1]), norm.reshape(*shape, 1)
        pixels: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0)}
        y = _winners(images, weight[..., None, None], norm, b, scale, **pixels)
        return y.view(*x.shape[:-1], -1)
    units = linear(x, weight, frozen=frozen)
    return _scaled_parts(units, norm, b, maxout, scale, frozen, dim=-1)


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    b: float,
    maxout: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    window: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if _is_rows(x, weight, stride, padding, groups):
        how: dict[str, Any] = {"b": b, "maxout": maxout, "scale": scale, "eps": eps}
        rows = bcos_linear(x.permute(0, 2, 3, 1), weight.flatten(1), **how, frozen=frozen)
        return rows.permute(0, 3, 1, 2)
    if groups == 1:
        norm = None if b == 1 else patch_norms(x, weight, 1, eps, frozen, **window)
        weight = unit_major(weight, maxout)
        if norm is not None and dilation == (1, 1) and _has_winners(x, weight, maxout, frozen):
            images, norm = x.permute(0, 2, 3, 1), norm.permute(0, 2, 3, 1)
            y = _winners(images, weight, norm, b, scale, stride=stride, padding=padding)
            return y.permute(0, 3, 1, 2)
        units = convolution(x, weight, **window, frozen=frozen)
        return _scaled_parts(units, norm, b, maxout, scale, frozen, dim=1)
    x = x.contiguous(memory_format=torch.channels_last)
    if b == 2 and maxout == 1 and groups == x.shape[1]:
        in_one_pass = depthwise(x, weight, **window, scale=scale, eps=eps)
        if in_one_pass is not None:
            return in_one_pass
    units = convolution(x, weight, **window, groups=groups, frozen=frozen)
    largest = largest_units(units, maxout, dim=1)
    if b == 1:
        return scale * largest
    if _is_final(largest) and not (torch.is_grad_enabled() and x.requires_grad):
        # Norms are as large as the result: of a few images they stay in the cache.
        few = max(1, 4 * BLOCK * len(x) // max(1, x.numel()))
        for images, result in zip(x.split(few), largest.split(few), strict=True):
            norm = patch_norms(images, weight, groups, eps, frozen, **window)
            _scale_in_place(result.unflatten(1, (groups, -1)), norm.unsqueeze(2), b, scale)
        return largest
    norm = patch_norms(x, weight, groups, eps, frozen, **window)
    per_group = wide(largest).unflatten(1, (groups, -1))
    scaled = cosine_scaled(per_group, norm.unsqueeze(2), b, scale, frozen)
    return narrowed(scaled.flatten(1, 2), largest, frozen=frozen)


def _is_rows(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, groups: int) -> bool:
    """Whether a convolution is a product with the rows that pixels are in memory."""
    return (
        weight.shape[2:] == (1, 1)
        and (stride, padding, groups) == ((1, 1), (0, 0), 1)
        and x.is_contiguous(memory_format=torch.channels_last)
        and not x.is_contiguous()
    )


def patch_norms(
    x: Tensor, weight: Tensor, groups: int, eps: float, frozen: bool, **window: Any
) -> Tensor:
    """√(Σa² + ε) of every patch a, [n, groups, output height, output width]."""
    x = constant_if(frozen, x)
    if groups == 1:
        squares = row_squares(x, dim=1)
    else:
        squares = wide(x).square()
        if groups < x.shape[1]:
            squares = squares.unflatten(1, (groups, -1)).sum(2)
    sums = patch_sums(squares, (weight.shape[2], weight.shape[3]), **window)
    return (sums + eps).sqrt() if sums.requires_grad else sums.add_(eps).sqrt_()


def row_squares(x: Tensor, dim: int) -> Tensor:
    """Σx² along ``dim``, which stays as an axis, in at least float32."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if differentiated or x.stride(dim) != 1:
        return wide(x).square().sum(dim, keepdim=True)
    # One pass, without a tensor of squares.
    return torch.linalg.vector_norm(wide(x), dim=dim, keepdim=True).square_()


def unit_major(weight: Tensor, m: int) -> Tensor:
    """The rows of all first units, then those of all second ones, instead of neighbors.

    MaxOut then compares halves of a tensor rather than every other number: a quarter of the time.
    """
    return weight if m == 1 else weight.unflatten(0, (-1, m)).transpose(0, 1).flatten(0, 1)


def _scaled_parts(
    units: Tensor, norm: Tensor | None, b: float, m: int, scale: float, frozen: bool, dim: int
) -> Tensor:
    """MaxOut and scaling of units in the order of :func:`unit_major`."""
    if m == 2 and norm is not None and frozen and _is_read_back(units):
        # One pass back, which takes both at once.
        both: tuple[Tensor, Tensor] = _Frozen.apply(units, norm, b, scale, dim)  # type: ignore[no-untyped-call]
        return both[0]
    if norm is not None and _is_final(units):
        in_one_pass = _scaled(units, norm, b, m, scale, dim)
        if in_one_pass is not None:
            return in_one_pass[0]
    largest = functools.reduce(larger, units.chunk(m, dim))
    if norm is None:
        return scale * largest
    if _is_final(largest):
        _scale_in_place(largest, norm, b, scale)
        return largest
    scaled = cosine_scaled(wide(largest), norm, b, scale, frozen)
    return narrowed(scaled, largest, frozen=frozen)


def _scaled(
    units: Tensor, norm: Tensor, b: float, m: int, scale: float, dim: int, **how: bool
) -> Any:
    """`scaled` along any axis, where it applies: a tuple, or None."""
    if b != 2 or m > 2:
        return None
    how_many: dict[str, Any] = {"maxout": m, "scale": scale}
    found = scaled(units.movedim(dim, -1), norm.movedim(dim, -1), **how_many, **how)
    return None if found is None else tuple(t if t is None else t.movedim(-1, dim) for t in found)


def _is_final(largest: Tensor) -> bool:
    """Whether nothing is differentiated or traced, so that the result may replace ``largest``."""
    return (
        largest.dtype in (torch.float32, torch.float64)
        and not (torch.is_grad_enabled() and largest.requires_grad)
        and is_direct(largest)
    )


def _scale_in_place(linear: Tensor, norm: Tensor, b: float, scale: float) -> None:
    for part, size in _blocks(linear, norm):
        part.mul_(factor_of(part, size, b, scale))


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Parts of all tensors along their first axis, of `BLOCK` numbers of the first tensor each."""
    first = tensors[0]
    if first.ndim == 1:
        return [tensors]
    rows = max(1, BLOCK * len(first) // max(1, first.numel()))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _is_read_back(units: Tensor) -> bool:
    """Whether an explanation will ask for the adjoint, in a dtype that is wide enough."""
    wide_enough = units.dtype in (torch.float32, torch.float64)
    return wide_enough and torch.is_grad_enabled() and units.requires_grad


def _with_factor(
    units: Tensor, norm: Tensor, b: float, scale: float, dim: int
) -> tuple[Tensor, Tensor]:
    """MaxOut of two, scaled, and γ·|cos|^(B−1) with a sign that says which unit won."""
    in_one_pass = _scaled(units, norm, b, 2, scale, dim, with_factor=True)
    if in_one_pass is not None:
        return in_one_pass
    first, second = units.chunk(2, dim)
    largest = torch.maximum(first, second)
    factor = torch.empty_like(largest)
    for f, y, size, one, two in _blocks(factor, largest, norm, first, second):
        f.copy_(factor_of(y, size, b, scale))
        y.mul_(f)
        # Plus for the first, also where both are the same.
        f.copysign_(one - two)
    return largest, factor


class _Frozen(torch.autograd.Function):
    """MaxOut of two and scaling where γ·|cos|^(B−1) is a constant."""

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
        d_units = _Spread.apply(grad, *ctx.saved_tensors, ctx.dim)  # type: ignore[no-untyped-call]
        return d_units, None, None, None, None


class _Spread(torch.autograd.Function):
    """The adjoint of `_Frozen`: what each of the two units gets."""

    @staticmethod
    def forward(grad: Tensor, factor: Tensor, dim: int) -> Tensor:
        shape = list(grad.shape)
        shape[dim] *= 2
        out = _empty_like(grad, shape)
        first, second = out.chunk(2, dim)
        for g, f, one, two in _blocks(grad, factor, first, second):
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


def _has_winners(x: Tensor, weight: Tensor, m: int, frozen: bool) -> bool:
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


def _winners(x: Tensor, *rest: Any, stride: Pair, padding: Pair) -> Tensor:
    """The B-cos transform of a frozen view; see `_Winners`."""
    both: tuple[Tensor, Tensor] = _Winners.apply(x, *rest, stride, padding)  # type: ignore[no-untyped-call]
    return both[0]


class _Winners(torch.autograd.Function):
    """A convolution whose weight and factors are constants, with MaxOut of two.

    Its tensors are images [n, h, w, channels]. The adjoint reads the winners' weights alone.
    """

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
        d_x = _WinnersAdjoint.apply(grad, *ctx.saved_tensors, *ctx.window)  # type: ignore[no-untyped-call]
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

"""The B-cos transform on a GPU.

Vectors are transformed in two ways. One kernel multiplies, takes the MaxOut winner and scales while
the tile is still in registers, so that the units never reach memory. Otherwise cuBLAS multiplies
and ``bcos_scale`` does the rest in one pass over memory. Which is faster depends on the shape:
``fuses`` decides, and docs/performance.md has the numbers. Both hand on Σy² of their rows, so that
a second transform need not read them again, and take its gradient back. Images are convolved by
cuDNN, with channels last in memory, so that the units of each position are one row.

Let u be the winning unit, n = ‖a‖ and y = γ·u·|u/n|^(B−1). The backward pass needs |u/n|^(B−1)
alone, which y and n give back: |u| = (|y|·n^(B−1)/γ)^(1/B). So it keeps y, which the next layer
keeps anyway, one byte per unit for the winner, and n; the units themselves are gone.

    dy/du = B·γ·|u/n|^(B−1)      frozen: γ·|u/n|^(B−1)
    dy/dn = (1−B)·y/n            frozen: 0

Rows are independent and no atomics are used, so results are the same on every run.
Letters: R rows, D inputs, C outputs per row, M units per output, U = M·C units.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bcosvit.ops import sparse_triton
from bcosvit.ops.dispatch import (
    HALF_DTYPES,
    computed_in,
    constant_if,
    launches_directly,
    traceable,
    untraced,
    window_sums,
)
from bcosvit.ops.products import convolution, linear

# Elements that one program holds; wider rows are walked through in pieces.
_TILE = 4096
_WIDEST = 1024


def bcos_scale(
    units: Tensor, norm: Tensor | None, *, b: float, maxout: int, scale: float, frozen: bool = False
) -> Tensor:
    return bcos_scale_and_squares(
        units, norm, b=b, maxout=maxout, scale=scale, frozen=frozen, with_squares=False
    )[0]


def bcos_scale_and_squares(
    units: Tensor,
    norm: Tensor | None,
    *,
    b: float,
    maxout: int,
    scale: float,
    frozen: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor]:
    """Also Σy² of each row [..., 1] where asked for: what the next B-cos transform divides by."""
    rows = units.reshape(-1, units.shape[-1])
    norms = flat_norms(norm, rows, b, frozen)
    keep = torch.is_grad_enabled() and units.requires_grad
    run = _Scale.apply if launches_directly(rows) else _scale
    out, _, squares = run(rows, norms, maxout, b, scale, frozen, keep, with_squares)
    lead = units.shape[:-1]
    return out.view(*lead, -1), squares.view(*lead, 1) if with_squares else squares


def flat_norms(norm: Tensor | None, rows: Tensor, b: float, frozen: bool) -> Tensor:
    """[R] in float32; B = 1 does not look at it."""
    if norm is None or b == 1:
        return rows.new_ones(1, dtype=torch.float32)
    return constant_if(frozen, norm).float().reshape(-1)


def _launch_scale(
    units: Tensor,
    norm: Tensor,
    m: int,
    b: float,
    scale: float,
    frozen: bool,
    keep: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R, M·C] -> y [R, C], the winners [R, C] where they are to be kept, and Σy² [R]."""
    if units.stride(-1) != 1:
        units = units.contiguous()
    norm = norm.contiguous()
    rows, outputs = units.shape[0], units.shape[1] // m
    out, winner, squares = room(units, norm, outputs, m, keep, with_squares)
    block_r, block_c = _blocks(rows, outputs)
    # A sum over a row belongs to one program; otherwise pieces of rows are spread out.
    across = 1 if with_squares else triton.cdiv(outputs, block_c)
    _scale_kernel[(triton.cdiv(rows, block_r), across)](
        units,
        norm,
        out,
        winner,
        squares,
        rows,
        outputs,
        units.stride(0),
        scale,
        b - 1,
        M=m,
        LINEAR=b == 1,
        SQUARE=b == 2,
        KEEP=keep and m > 1,
        WITH_SQUARES=with_squares,
        BR=block_r,
        BC=block_c,
    )
    return out, winner, squares


_scale = traceable("bcos_scale", _launch_scale)


@_scale.register_fake
def _(units, norm, m, b, scale, frozen, keep, with_squares):
    return room(units, norm, units.shape[1] // m, m, keep, with_squares)


def room(
    rows: Tensor, norm: Tensor, outputs: int, m: int, keep: bool, with_squares: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten y, winners and Σy² of a B-cos transform, empty where they are not asked for."""
    count = rows.shape[0]
    return (
        rows.new_empty(count, outputs),
        rows.new_empty(count if keep and m > 1 else 0, outputs, dtype=torch.uint8),
        norm.new_empty(count if with_squares else 0),
    )


def remember_options(ctx, options, output) -> None:
    """What ``units_backward`` needs besides tensors; ``options`` are an op's inputs from m on."""
    ctx.m, ctx.b, ctx.scale, ctx.frozen, _, ctx.with_squares = options
    _, winner, squares = output
    ctx.mark_non_differentiable(*((winner,) if ctx.with_squares else (winner, squares)))


def units_backward(ctx, grad, d_squares, kept, with_norm: bool):
    """d units, and d norm or None; ``kept`` are y, the winners and the norms."""
    out, winner, norm = kept
    backward = _launch_scale_backward if launches_directly(grad) else _scale_backward
    how = ctx.m, ctx.b, ctx.scale, ctx.frozen, with_norm
    d_units, d_norm = backward(grad, _used(ctx, d_squares), out, winner, norm, *how)
    return d_units, d_norm if with_norm else None


def _used(ctx, d_squares):
    """The gradient of Σy² where it counts: a frozen view holds norms constant."""
    return d_squares if ctx.with_squares and not ctx.frozen else None


def _save_scale(ctx, inputs, output) -> None:
    _, norm, *options = inputs
    remember_options(ctx, options, output)
    ctx.save_for_backward(*output[:2], norm)


def _differentiate_scale(ctx, grad, _, d_squares):
    with_norm = ctx.needs_input_grad[1]
    return *units_backward(ctx, grad, d_squares, ctx.saved_tensors, with_norm), *[None] * 6


_scale.register_autograd(_differentiate_scale, setup_context=_save_scale)


_Scale = untraced("_Scale", _launch_scale, _save_scale, _differentiate_scale)


def _launch_scale_backward(
    grad: Tensor,
    d_squares: Tensor | None,
    out: Tensor,
    winner: Tensor,
    norm: Tensor,
    m: int,
    b: float,
    scale: float,
    frozen: bool,
    with_norm: bool,
) -> tuple[Tensor, Tensor]:
    """d units [k·R, M·C] and d norm [k·R]; ``grad`` may stack k gradients of the same rows."""
    d_units = grad.new_empty(grad.shape[0], grad.shape[1] * m)
    run = _write_units_gradient
    d_norm = run(d_units, grad, d_squares, out, winner, norm, b, scale, frozen, with_norm)
    return d_units, d_norm


def _write_units_gradient(
    d_units: Tensor,
    grad: Tensor,
    d_squares: Tensor | None,
    out: Tensor,
    winner: Tensor,
    norm: Tensor,
    b: float,
    scale: float,
    frozen: bool,
    with_norm: bool,
) -> Tensor:
    """Writes d units, of the winners alone where there is one per output; returns d norm."""
    grad, norm = grad.contiguous(), norm.contiguous()
    rows, outputs = grad.shape
    d_norm = norm.new_empty(rows if with_norm else 0)
    shared = out.shape[0]
    copies = rows // max(1, shared)
    block_r, block_c = _blocks(shared, outputs)
    # A sum over a row belongs to one program.
    _scale_backward_kernel[(triton.cdiv(shared, block_r), copies if with_norm else 1)](
        grad,
        norm if d_squares is None else d_squares.contiguous(),
        out,
        winner,
        norm,
        d_units,
        d_norm,
        shared,
        copies,
        outputs,
        scale,
        1.0 if frozen else b,
        b,
        M=d_units.shape[1] // outputs,
        LINEAR=b == 1,
        SQUARE=b == 2,
        WITH_NORM=with_norm,
        WITH_SQUARES=d_squares is not None,
        BR=block_r,
        BC=block_c,
    )
    return d_norm


_scale_backward = traceable("bcos_scale_backward", _launch_scale_backward)


@_scale_backward.register_fake
def _(grad, d_squares, out, winner, norm, m, b, scale, frozen, with_norm):
    rows, outputs = grad.shape
    return grad.new_empty(rows, outputs * m), norm.new_empty(rows if with_norm else 0)


@_scale_backward.register_vmap
def _(info, in_dims, grad: Tensor, *rest):
    return _for_several_classes(_scale_backward, info, in_dims, grad, rest)


def _launch_input_gradient(
    grad: Tensor,
    d_squares: Tensor | None,
    weight: Tensor,
    out: Tensor,
    winner: Tensor,
    norm: Tensor,
    b: float,
    scale: float,
    frozen: bool,
    with_norm: bool,
) -> tuple[Tensor, Tensor]:
    """d x [k·R, D] and d norm [k·R] of a transform with MaxOut 2, by sparse tensor cores."""
    how = b, scale, frozen, with_norm
    if not sparse_triton.is_usable(grad.device, grad.dtype):
        d_units, d_norm = _launch_scale_backward(grad, d_squares, out, winner, norm, 2, *how)
        return d_units @ weight, d_norm
    whole, numbers, places = sparse_triton.room(grad.shape[0], grad.shape[1], grad)
    sparse_triton.write_places(winner, places)
    d_norm = _write_units_gradient(numbers, grad, d_squares, out, winner, norm, *how)
    return sparse_triton.multiply(whole, weight), d_norm


_input_gradient = traceable("bcos_linear_input_gradient", _launch_input_gradient)


@_input_gradient.register_fake
def _(grad, d_squares, weight, out, winner, norm, b, scale, frozen, with_norm):
    rows = grad.shape[0]
    return grad.new_empty(rows, weight.shape[1]), norm.new_empty(rows if with_norm else 0)


@_input_gradient.register_vmap
def _(info, in_dims, grad: Tensor, *rest):
    return _for_several_classes(_input_gradient, info, in_dims, grad, rest)


def _for_several_classes(op, info, in_dims, grad: Tensor, rest):
    """``op`` for several classes of one explanation: their gradients are stacked, the rest is
    shared."""
    assert in_dims[0] is not None and all(dim is None for dim in in_dims[1:])
    first, d_norm = op(grad.movedim(in_dims[0], 0).flatten(0, 1), *rest)
    k = info.batch_size
    return (first.unflatten(0, (k, -1)), d_norm.view(k, -1)), (0, 0)


def _blocks(rows: int, outputs: int) -> tuple[int, int]:
    # The widest power of two that divides a row wastes no lanes, unless it is a narrow one.
    dividing = outputs & -outputs
    block_c = min(dividing if dividing >= 128 else triton.next_power_of_2(outputs), _WIDEST)
    return max(1, min(_TILE // block_c, triton.next_power_of_2(rows))), block_c


class Tiles(NamedTuple):
    """How the fused kernel cuts up its work."""

    rows: int
    units: int
    inputs: int
    warps: int
    stages: int


TILES = Tiles(128, 256, 64, 8, 3)


def bcos_linear(
    x: Tensor,
    weight: Tensor,
    *,
    b: float,
    maxout: int,
    scale: float,
    eps: float,
    frozen: bool,
    squares: Tensor | None = None,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor]:
    """The transform, and Σy² [..., 1] where asked for; ``squares`` are those of ``x``, if known."""
    norm = None
    if b != 1:
        if squares is None:
            # In one pass, without a wide copy of x.
            length = torch.linalg.vector_norm(
                constant_if(frozen, x), dim=-1, keepdim=True, dtype=torch.float32
            )
            squares = length.square()
        norm = (constant_if(frozen, squares) + eps).sqrt()
    if torch.is_autocast_enabled(x.device.type):
        narrow = computed_in(x)
        x, weight = x.to(narrow), weight.to(narrow)
    options: dict[str, Any] = {"b": b, "maxout": maxout, "scale": scale, "frozen": frozen}
    if fuses(x, weight, maxout):
        return product(x, weight, norm, **options, with_squares=with_squares)
    units = linear(x, weight, frozen=frozen)
    return bcos_scale_and_squares(units, norm, **options, with_squares=with_squares)


def fuses(x: Tensor, weight: Tensor, m: int) -> bool:
    """Whether the fused kernel can run: rows it can address, and enough of them to fill a GPU."""
    units, inputs = weight.shape
    aligned = inputs % 8 == 0 and units // m % 16 == 0 and m in (1, 2)
    enough = x.numel() // inputs >= 1024
    return aligned and enough and x.dtype in HALF_DTYPES and x.dtype == weight.dtype


def product(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    *,
    b: float,
    maxout: int,
    scale: float,
    frozen: bool,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor]:
    """The transform by the fused kernel."""
    rows = x.reshape(-1, x.shape[-1])
    norms = flat_norms(norm, rows, b, frozen)
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    run = _Product.apply if launches_directly(rows) else _product
    out, _, squares = run(rows, weight, norms, maxout, b, scale, frozen, keep, with_squares)
    lead = x.shape[:-1]
    return out.view(*lead, -1), squares.view(*lead, 1) if with_squares else squares


def _launch_product(
    x: Tensor,
    weight: Tensor,
    norm: Tensor,
    m: int,
    b: float,
    scale: float,
    frozen: bool,
    keep: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [R, C], the winners [R, C] where they are to be kept, and Σy² [R]."""
    x, weight, norm = x.contiguous(), weight.contiguous(), norm.contiguous()
    (rows, inputs), units = x.shape, weight.shape[0]
    keep = keep and m > 1
    outputs, tiles = units // m, TILES
    out = x.new_empty(rows, outputs)
    winner = x.new_empty((rows, outputs) if keep else (0, outputs), dtype=torch.uint8)
    across = triton.cdiv(units, tiles.units)
    parts = norm.new_empty(rows if with_squares else 0, across)
    block = [tiles.rows, tiles.units // m]
    grid = (min(triton.cdiv(rows, tiles.rows) * across, _processors(x.device)),)
    _product_kernel[grid](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.inputs]),
        # A tile has the first units of its outputs, then the second ones: a thread then holds
        # outputs that are neighbors, and stores them together.
        TensorDescriptor(
            weight, [m, outputs, inputs], [inputs, m * inputs, 1], [m, *block[1:], tiles.inputs]
        ),
        norm,
        TensorDescriptor.from_tensor(out, block),
        TensorDescriptor.from_tensor(winner, block) if keep else winner,
        parts,
        rows,
        units,
        inputs,
        scale,
        b - 1,
        M=m,
        LINEAR=b == 1,
        SQUARE=b == 2,
        KEEP=keep,
        WITH_SQUARES=with_squares,
        BR=tiles.rows,
        BU=tiles.units,
        BK=tiles.inputs,
        GROUP=8,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out, winner, parts.sum(1)


_product = traceable("bcos_linear", _launch_product)


@_product.register_fake
def _(x, weight, norm, m, b, scale, frozen, keep, with_squares):
    return room(x, norm, weight.shape[0] // m, m, keep, with_squares)


def _save_product(ctx, inputs, output) -> None:
    x, weight, norm, *options = inputs
    remember_options(ctx, options, output)
    with_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if with_weight else x.new_empty(0), weight, *output[:2], norm)


def _differentiate_product(ctx, grad, _, d_squares):
    x, weight, *kept = ctx.saved_tensors
    with_x, with_weight, with_norm = ctx.needs_input_grad[:3]
    d_weight = None
    if ctx.m == 2 and with_x and not with_weight and sparse_triton.suits(grad, weight):
        run = _launch_input_gradient if launches_directly(grad) else _input_gradient
        out, winner, norm = kept
        how = ctx.b, ctx.scale, ctx.frozen, with_norm
        d_x, d_norm = run(grad, _used(ctx, d_squares), weight, out, winner, norm, *how)
        d_norm = d_norm if with_norm else None
    else:
        d_units, d_norm = units_backward(ctx, grad, d_squares, kept, with_norm)
        d_x = d_units @ weight if with_x else None
        d_weight = d_units.transpose(-2, -1) @ x if with_weight else None
    return d_x, d_weight, d_norm, *[None] * 6


_product.register_autograd(_differentiate_product, setup_context=_save_product)


_Product = untraced("_Product", _launch_product, _save_product, _differentiate_product)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    b: float,
    maxout: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    kernel = (weight.shape[2], weight.shape[3])
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1:
        rows = x.permute(0, 2, 3, 1)
        options: dict[str, Any] = {"b": b, "maxout": maxout, "scale": scale, "eps": eps}
        out, _ = bcos_linear(rows, weight.flatten(1), **options, frozen=frozen)
        return out.permute(0, 3, 1, 2)
    x = x.contiguous(memory_format=torch.channels_last)
    window: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    units = convolution(x, weight, **window, groups=groups, frozen=frozen)
    norm = None
    if b != 1:
        # In one pass, without a wide copy of x.
        length = torch.linalg.vector_norm(
            constant_if(frozen, x).unflatten(1, (groups, -1)), dim=2, dtype=torch.float32
        )
        sums = window_sums(length.square(), kernel, **window)
        norm = (sums + eps).sqrt().permute(0, 2, 3, 1).unsqueeze(-1)
    out = bcos_scale(
        units.permute(0, 2, 3, 1).unflatten(-1, (groups, -1)),
        norm,
        b=b,
        maxout=maxout,
        scale=scale,
        frozen=frozen,
    )
    return out.flatten(-2).permute(0, 3, 1, 2)


@triton.jit
def _power(x, power):
    """x^power for x >= 0 and power > 0."""
    return tl.where(x > 0, tl.exp2(power * tl.log2(tl.where(x > 0, x, 1.0))), 0.0)


@triton.jit
def _scale_kernel(
    units,
    norm,
    out,
    winner,
    squares,
    rows,
    outputs,
    row_stride,
    scale,
    power,
    M: tl.constexpr,
    LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    KEEP: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    n = tl.full((BR, 1), 1.0, tl.float32)
    if not LINEAR:
        n = tl.load(norm + r, mask=r < rows, other=1.0)[:, None]
    total = tl.zeros((BR,), tl.float32)
    for piece in range(tl.program_id(1), tl.cdiv(outputs, BC), tl.num_programs(1)):
        c = piece * BC + tl.arange(0, BC)
        mask = (r < rows)[:, None] & (c < outputs)[None, :]
        if M == 2:
            pair = piece * 2 * BC + tl.arange(0, 2 * BC)
            pairs = tl.load(
                units + r[:, None] * row_stride + pair[None, :],
                mask=(r < rows)[:, None] & (pair < 2 * outputs)[None, :],
                other=0.0,
            ).to(tl.float32)
            first, second = tl.split(tl.reshape(pairs, (BR, BC, 2)))
            best = tl.maximum(first, second)
            index = (second > first).to(tl.uint8)
        else:
            start = units + r[:, None] * row_stride + c[None, :] * M
            best = tl.load(start, mask=mask, other=0.0).to(tl.float32)
            index = tl.zeros((BR, BC), tl.uint8)
            for k in tl.static_range(1, M):
                other = tl.load(start + k, mask=mask, other=0.0).to(tl.float32)
                index = tl.where(other > best, k, index).to(tl.uint8)
                best = tl.maximum(best, other)
        if LINEAR:
            y = scale * best
        else:
            # Rounding alone can push |cos| above 1.
            cos = tl.minimum(tl.abs(best) / n, 1.0)
            if not SQUARE:
                cos = _power(cos, power)
            y = scale * cos * best
        at = r[:, None] * outputs + c[None, :]
        narrow = y.to(out.dtype.element_ty)
        tl.store(out + at, narrow, mask=mask)
        if KEEP:
            tl.store(winner + at, index, mask=mask)
        if WITH_SQUARES:
            # Of what the next layer will read, rounding included.
            seen = narrow.to(tl.float32)
            total += tl.sum(tl.where(mask, seen * seen, 0.0), 1)
    if WITH_SQUARES:
        tl.store(squares + r, total, mask=r < rows)


@triton.jit
def _scale_backward_kernel(
    grad,
    d_squares,
    out,
    winner,
    norm,
    d_units,
    d_norm,
    rows,
    copies,
    outputs,
    scale,
    slope,
    b,
    M: tl.constexpr,
    LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    WITH_NORM: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """``copies`` gradients of the same rows: what they share is read once by a program."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    known = r < rows
    # A sum over a row belongs to one program, which then has one copy alone.
    own = tl.program_id(1).to(tl.int64) * rows + r
    n = tl.full((BR, 1), 1.0, tl.float32)
    if not LINEAR:
        n = tl.load(norm + r, mask=known, other=1.0)[:, None]
    total = tl.zeros((BR,), tl.float32)
    for first in range(0, outputs, BC):
        c = first + tl.arange(0, BC)
        mask = known[:, None] & (c < outputs)[None, :]
        at = r[:, None] * outputs + c[None, :]
        y = tl.zeros((BR, BC), tl.float32)
        if WITH_SQUARES or not LINEAR:
            y = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        if LINEAR:
            factor = tl.full((BR, BC), 1.0, tl.float32) * scale
        else:
            ratio = tl.abs(y) / (scale * n)  # |cos|^B
            if not SQUARE:
                factor = _power(ratio, (b - 1) / b)
            elif grad.dtype.element_ty == tl.float32:
                # The fast root may be off in its last bit, in every layer.
                factor = tl.sqrt_rn(ratio)
            else:
                factor = tl.sqrt(ratio)
            factor = slope * scale * factor
        won = tl.zeros((BR, BC), tl.uint8)
        if M > 1:
            won = tl.load(winner + at, mask=mask, other=0)
        if WITH_NORM:
            g = _write_gradient(
                grad, d_squares, d_units, own, known, y, factor, won, first, outputs,
                M, WITH_SQUARES, BR, BC,
            )  # fmt: skip
            total += tl.sum(g * y, 1)
        else:
            for copy in range(copies):
                each = (tl.full((), 0, tl.int64) + copy) * rows + r
                _write_gradient(
                    grad, d_squares, d_units, each, known, y, factor, won, first, outputs,
                    M, WITH_SQUARES, BR, BC,
                )  # fmt: skip
    if WITH_NORM:
        tl.store(d_norm + own, (1 - b) * total / tl.reshape(n, (BR,)), mask=known)


@triton.jit
def _write_gradient(
    grad, d_squares, d_units, row, known, y, factor, won, first, outputs,
    M: tl.constexpr, WITH_SQUARES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes d units of some rows and outputs; returns dL/dy, with what comes by way of Σy²."""
    c = first + tl.arange(0, BC)
    mask = known[:, None] & (c < outputs)[None, :]
    at = row[:, None] * outputs + c[None, :]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    if WITH_SQUARES:
        g += 2 * tl.load(d_squares + row, mask=known, other=0.0)[:, None] * y
    d = factor * g
    if M == 1:
        tl.store(d_units + at, d.to(d_units.dtype.element_ty), mask=mask)
    elif M == 2:
        pair = 2 * first + tl.arange(0, 2 * BC)
        both = tl.join(tl.where(won == 0, d, 0.0), tl.where(won == 1, d, 0.0))
        tl.store(
            d_units + row[:, None] * (2 * outputs) + pair[None, :],
            tl.reshape(both, (BR, 2 * BC)).to(d_units.dtype.element_ty),
            mask=known[:, None] & (pair < 2 * outputs)[None, :],
        )
    else:
        start = d_units + row[:, None] * (outputs * M) + c[None, :] * M
        for k in tl.static_range(0, M):
            mine = tl.where(won == k, d, 0.0).to(d_units.dtype.element_ty)
            tl.store(start + k, mine, mask=mask)
    return g


@triton.jit
def _product_kernel(
    x,
    weight,
    norm,
    out,
    winner,
    parts,
    rows,
    units,
    inputs,
    scale,
    power,
    M: tl.constexpr,
    LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    KEEP: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    BR: tl.constexpr,
    BU: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A persistent grid over tiles; neighboring programs share rows of x and of the weights."""
    down = tl.cdiv(rows, BR)
    across = tl.cdiv(units, BU)
    steps = tl.cdiv(inputs, BK)
    BC: tl.constexpr = BU // M
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        first_r = (group * GROUP + tile % (GROUP * across) % height) * BR
        column = tile % (GROUP * across) // height
        dot = tl.zeros((BR, BU), tl.float32)
        for step in range(steps):
            a = x.load([first_r, step * BK])
            w = weight.load([0, column * BC, step * BK])
            dot = tl.dot(a, tl.reshape(w, (BU, BK)).T, dot)
        r = first_r + tl.arange(0, BR)
        if M == 2:
            first, second = tl.split(tl.permute(tl.reshape(dot, (BR, 2, BC)), (0, 2, 1)))
            best = tl.maximum(first, second)
            if KEEP:
                winner.store([first_r, column * BC], (second > first).to(tl.uint8))
        else:
            best = dot
        if LINEAR:
            y = scale * best
        else:
            inverse = 1.0 / tl.load(norm + r, mask=r < rows, other=1.0)
            # Rounding alone can push |cos| above 1.
            cos = tl.minimum(tl.abs(best) * inverse[:, None], 1.0)
            if not SQUARE:
                cos = _power(cos, power)
            y = scale * cos * best
        narrow = y.to(out.dtype)
        out.store([first_r, column * BC], narrow)
        if WITH_SQUARES:
            # Of what the next layer will read, rounding included; units beyond the last are zero.
            seen = narrow.to(tl.float32)
            tl.store(parts + r * across + column, tl.sum(seen * seen, 1), mask=r < rows)

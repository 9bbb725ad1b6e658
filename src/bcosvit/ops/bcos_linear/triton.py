"""The B-cos transform of vectors on a GPU, in two ways.

One kernel multiplies, takes the MaxOut winner and scales while the tile is still in registers, so
that the units never reach memory. Otherwise cuBLAS multiplies and ``bcos_scale`` does the rest in
one pass. Which is faster is a matter of the shape: ``fuses`` says, docs/performance.md has the
numbers. Both hand on Σy² of their rows, so that a second transform need not read them again, and
take its gradient back.
Letters: R rows, D inputs, C outputs, M units an output, U = M·C units.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bcosvit.ops.backend import launches_directly
from bcosvit.ops.bcos_scale.triton import (
    _power,
    bcos_scale_and_squares,
    flat_norms,
    remember_options,
    room,
    units_backward,
)
from bcosvit.ops.common import NARROW, constant_if


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
    m: int,
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
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(narrow), weight.to(narrow)
    options = {"b": b, "m": m, "scale": scale, "frozen": frozen, "with_squares": with_squares}
    if fuses(x, weight, m):
        return product(x, weight, norm, **options)  # type: ignore[arg-type]
    return bcos_scale_and_squares(F.linear(x, weight), norm, **options)  # type: ignore[arg-type]


def fuses(x: Tensor, weight: Tensor, m: int) -> bool:
    """Whether the fused kernel can run: rows it can address, and enough of them to fill a GPU."""
    units, inputs = weight.shape
    aligned = inputs % 8 == 0 and units // m % 16 == 0 and m in (1, 2)
    enough = x.numel() // inputs >= 1024
    return aligned and enough and x.dtype in NARROW and x.dtype == weight.dtype


def product(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    *,
    b: float,
    m: int,
    scale: float,
    frozen: bool,
    with_squares: bool = False,
) -> tuple[Tensor, Tensor]:
    """The transform by the fused kernel."""
    rows = x.reshape(-1, x.shape[-1])
    norms = flat_norms(norm, rows, b, frozen)
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    run = _Product.apply if launches_directly(rows) else _product
    out, _, squares = run(rows, weight, norms, m, b, scale, frozen, keep, with_squares)
    lead = x.shape[:-1]
    return out.view(*lead, -1), squares.view(*lead, 1) if with_squares else squares


def _launch(
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
    x, weight = x.contiguous(), weight.contiguous()
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
        TensorDescriptor.from_tensor(weight, [tiles.units, tiles.inputs]),
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


_product = torch.library.custom_op("bcosvit::bcos_linear", _launch, mutates_args=())


@_product.register_fake
def _(x, weight, norm, m, b, scale, frozen, keep, with_squares):
    return room(x, norm, weight.shape[0] // m, m, keep, with_squares)


def _remember(ctx, inputs, output) -> None:
    x, weight, norm, *options = inputs
    remember_options(ctx, options, output)
    with_weight = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if with_weight else x.new_empty(0), weight, *output[:2], norm)


def _differentiate(ctx, grad, _, d_squares):
    x, weight, *kept = ctx.saved_tensors
    with_x, with_weight, with_norm = ctx.needs_input_grad[:3]
    d_units, d_norm = units_backward(ctx, grad, d_squares, kept, with_norm)
    d_x = d_units @ weight if with_x else None
    d_weight = d_units.transpose(-2, -1) @ x if with_weight else None
    return d_x, d_weight, d_norm, *[None] * 6


_product.register_autograd(_differentiate, setup_context=_remember)


class _Product(torch.autograd.Function):
    """The same where nothing is traced."""

    forward = staticmethod(_launch)
    setup_context = staticmethod(_remember)
    backward = staticmethod(_differentiate)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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
            w = weight.load([column * BU, step * BK])
            dot = tl.dot(a, w.T, dot)
        r = first_r + tl.arange(0, BR)
        if M == 2:
            first, second = tl.split(tl.reshape(dot, (BR, BC, 2)))
            best = tl.maximum(first, second)
            if KEEP:
                winner.store([first_r, column * BC], (second > first).to(tl.uint8))
        else:
            best = dot
        if LINEAR:
            y = scale * best
        else:
            n = tl.load(norm + r, mask=r < rows, other=1.0)[:, None]
            # Rounding alone can push |cos| above 1.
            cos = tl.minimum(tl.abs(best) / n, 1.0)
            if not SQUARE:
                cos = _power(cos, power)
            y = scale * cos * best
        narrow = y.to(out.dtype)
        out.store([first_r, column * BC], narrow)
        if WITH_SQUARES:
            # Of what the next layer will read, rounding included; units beyond the last are zero.
            seen = narrow.to(tl.float32)
            tl.store(parts + r * across + column, tl.sum(seen * seen, 1), mask=r < rows)

"""Depthwise convolution of channels-last maps [n, h, w, c] with kernels [k·k, c], for training.

Output positions are those of TensorFlow's "same" padding. On a GPU with Triton, three kernels
compute the convolution and its two gradients; elsewhere `F.conv2d` does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from efficientnet import same_padding
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

POSITIONS, CHANNELS, WARPS = 32, 32, 4
"""The tile of one program, and its warps; the best of four settings on an H200."""


def depthwise(x: Tensor, weight: Tensor, kernel: int, stride: int) -> Tensor:
    """Filters every channel by itself.

    Args:
        x: The maps [n, h, w, c].
        weight: The kernels [kernel · kernel, c].
        kernel: The side of the kernels: 3, 5 or 7.
        stride: The distance of output positions.

    Returns:
        Maps [n, ceil(h / stride), ceil(w / stride), c] of the dtype of ``x``.
    """
    if triton is not None and x.is_cuda:
        return depthwise_forward(x.contiguous(), weight.contiguous(), kernel, stride)
    channels = x.shape[3]
    y, z = (same_padding(size, kernel, stride) for size in x.shape[1:3])
    x = F.pad(x.permute(0, 3, 1, 2), (*z, *y))
    weight = weight.t().reshape(channels, 1, kernel, kernel).to(x.dtype)
    return F.conv2d(x, weight, stride=stride, groups=channels).permute(0, 2, 3, 1)


@torch.library.custom_op("bcosvit_imagenet::depthwise", mutates_args=())
def depthwise_forward(x: Tensor, weight: Tensor, kernel: int, stride: int) -> Tensor:
    """`depthwise` by Triton; both tensors are contiguous."""
    n, h, w, c = x.shape
    out_h, out_w = -(-h // stride), -(-w // stride)
    y = x.new_empty(n, out_h, out_w, c)
    positions = n * out_h * out_w
    grid = (triton.cdiv(c, CHANNELS) * triton.cdiv(positions, POSITIONS),)
    sizes = (positions, h, w, out_h, out_w, c)
    _forward[grid](x, weight, y, *sizes, **_constants(h, w, kernel, stride))
    return y


@depthwise_forward.register_fake
def _(x: Tensor, weight: Tensor, kernel: int, stride: int) -> Tensor:
    n, h, w, c = x.shape
    return x.new_empty(n, -(-h // stride), -(-w // stride), c)


@torch.library.custom_op("bcosvit_imagenet::depthwise_backward", mutates_args=())
def depthwise_backward(
    x: Tensor, weight: Tensor, grad: Tensor, kernel: int, stride: int, weight_too: bool
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the maps and, where wanted, to the kernels (else zeros)."""
    n, h, w, c = x.shape
    out_h, out_w = grad.shape[1:3]
    constants = _constants(h, w, kernel, stride)
    dx = torch.empty_like(x)
    dw = torch.zeros(kernel * kernel, c, device=x.device, dtype=torch.float32)
    blocks, positions = triton.cdiv(c, CHANNELS), n * h * w
    grid = (blocks * triton.cdiv(positions, POSITIONS),)
    _backward_input[grid](grad, weight, dx, positions, h, w, out_h, out_w, c, **constants)
    if weight_too:
        positions = n * out_h * out_w
        # Some 24 programs for each of the 132 multiprocessors of an H200.
        chunks = max(1, min(triton.cdiv(positions, POSITIONS), 132 * 24 // (blocks * kernel)))
        chunk = triton.cdiv(triton.cdiv(positions, chunks), POSITIONS) * POSITIONS
        grid = (blocks, kernel, triton.cdiv(positions, chunk))
        sizes = (positions, h, w, out_h, out_w, c, chunk)
        _backward_weight[grid](x, grad, dw, *sizes, **constants)
    return dx, dw


@depthwise_backward.register_fake
def _(
    x: Tensor, weight: Tensor, grad: Tensor, kernel: int, stride: int, weight_too: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(kernel * kernel, x.shape[3], dtype=torch.float32)


def _constants(h: int, w: int, kernel: int, stride: int) -> dict[str, int]:
    pad, across = (same_padding(size, kernel, stride)[0] for size in (h, w))
    assert pad == across, "The kernels pad both axes alike."
    return {
        "PAD": pad,
        "K": kernel,
        "S": stride,
        "BP": POSITIONS,
        "BC": CHANNELS,
        "num_warps": WARPS,
    }


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.kernel, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    dx, dw = depthwise_backward(
        x, weight, grad.contiguous(), ctx.kernel, ctx.stride, ctx.needs_input_grad[1]
    )
    return dx, dw.to(weight.dtype), None, None


depthwise_forward.register_autograd(_backward, setup_context=_setup_context)


def _setup_second_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, grad, ctx.kernel, ctx.stride, _ = inputs
    ctx.save_for_backward(x, weight, grad)
    ctx.set_materialize_grads(False)


def _second_backward(
    ctx: Any, to_dx: Tensor | None, to_dw: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
    """Both gradients are linear in ``grad``, the first also in the kernels, the second in x."""
    x, weight, grad = ctx.saved_tensors
    sizes = ctx.kernel, ctx.stride
    to_x = to_weight = to_grad = None
    if to_dx is not None:
        to_dx = to_dx.contiguous()
        to_grad = depthwise_forward(to_dx, weight, *sizes)
        to_weight = depthwise_backward(to_dx, weight, grad, *sizes, True)[1].to(weight.dtype)
    if to_dw is not None:
        to_dw = to_dw.contiguous()
        to_x = depthwise_backward(x, to_dw, grad, *sizes, False)[0]
        more = depthwise_forward(x, to_dw, *sizes)
        to_grad = more if to_grad is None else to_grad + more
    return to_x, to_weight, to_grad, None, None, None


depthwise_backward.register_autograd(_second_backward, setup_context=_setup_second_context)


if triton is not None:
    # In all kernels: P positions of the result, H × W positions of the input, OH × OW of the
    # output, C channels; PAD zeros before each side, K × K kernels, stride S; a program computes
    # BP positions of BC channels.

    @triton.jit
    def _forward(
        x,
        w,
        y,
        P,
        H,
        W,
        OH,
        OW,
        C,
        PAD: tl.constexpr,
        K: tl.constexpr,
        S: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        blocks = tl.cdiv(C, BC)
        c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
        p = tl.program_id(0) // blocks * BP + tl.arange(0, BP)
        cm = c < C
        pm = p < P
        n = p // (OH * OW)
        h0 = (p // OW) % OH * S - PAD
        w0 = p % OW * S - PAD
        base = (n * H * W).to(tl.int64) * C
        total = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                h = h0 + i
                v = w0 + j
                inside = pm & (h >= 0) & (h < H) & (v >= 0) & (v < W)
                at = (base + (h * W + v) * C)[:, None] + c[None, :]
                a = tl.load(x + at, mask=inside[:, None] & cm[None, :], other=0.0)
                b = tl.load(w + (i * K + j) * C + c, mask=cm, other=0.0)
                total += a.to(tl.float32) * b.to(tl.float32)[None, :]
        at = (p.to(tl.int64) * C)[:, None] + c[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=pm[:, None] & cm[None, :])

    @triton.jit
    def _backward_input(
        g,
        w,
        d,
        P,
        H,
        W,
        OH,
        OW,
        C,
        PAD: tl.constexpr,
        K: tl.constexpr,
        S: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        blocks = tl.cdiv(C, BC)
        c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
        p = tl.program_id(0) // blocks * BP + tl.arange(0, BP)
        cm = c < C
        pm = p < P
        n = p // (H * W)
        h0 = (p // W) % H + PAD
        w0 = p % W + PAD
        base = (n * OH * OW).to(tl.int64) * C
        total = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                h = h0 - i
                v = w0 - j
                inside = pm & (h >= 0) & (v >= 0)
                if S > 1:
                    inside = inside & (h % S == 0) & (v % S == 0)
                    h = h // S
                    v = v // S
                inside = inside & (h < OH) & (v < OW)
                at = (base + (h * OW + v) * C)[:, None] + c[None, :]
                a = tl.load(g + at, mask=inside[:, None] & cm[None, :], other=0.0)
                b = tl.load(w + (i * K + j) * C + c, mask=cm, other=0.0)
                total += a.to(tl.float32) * b.to(tl.float32)[None, :]
        at = (p.to(tl.int64) * C)[:, None] + c[None, :]
        tl.store(d + at, total.to(d.dtype.element_ty), mask=pm[:, None] & cm[None, :])

    @triton.jit
    def _product(x, base, h, v, hm, c, cm, g, W, C):
        inside = hm & (v >= 0) & (v < W)
        at = (base + (h * W + v) * C)[:, None] + c[None, :]
        a = tl.load(x + at, mask=inside[:, None] & cm[None, :], other=0.0)
        return a.to(tl.float32) * g

    @triton.jit
    def _backward_weight(
        x,
        g,
        d,
        P,
        H,
        W,
        OH,
        OW,
        C,
        CHUNK,
        PAD: tl.constexpr,
        K: tl.constexpr,
        S: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        # One row of the kernels per program; Triton has no arrays of accumulators.
        c = tl.program_id(0) * BC + tl.arange(0, BC)
        i = tl.program_id(1)
        start = tl.program_id(2) * CHUNK
        cm = c < C
        a0 = tl.zeros((BP, BC), tl.float32)
        a1 = tl.zeros((BP, BC), tl.float32)
        a2 = tl.zeros((BP, BC), tl.float32)
        a3 = tl.zeros((BP, BC), tl.float32)
        a4 = tl.zeros((BP, BC), tl.float32)
        a5 = tl.zeros((BP, BC), tl.float32)
        a6 = tl.zeros((BP, BC), tl.float32)
        for q in range(start, start + CHUNK, BP):
            p = q + tl.arange(0, BP)
            pm = p < P
            n = p // (OH * OW)
            h = (p // OW) % OH * S - PAD + i
            v = p % OW * S - PAD
            hm = pm & (h >= 0) & (h < H)
            base = (n * H * W).to(tl.int64) * C
            at = (p.to(tl.int64) * C)[:, None] + c[None, :]
            gg = tl.load(g + at, mask=pm[:, None] & cm[None, :], other=0.0).to(tl.float32)
            a0 += _product(x, base, h, v, hm, c, cm, gg, W, C)
            a1 += _product(x, base, h, v + 1, hm, c, cm, gg, W, C)
            a2 += _product(x, base, h, v + 2, hm, c, cm, gg, W, C)
            if K > 3:
                a3 += _product(x, base, h, v + 3, hm, c, cm, gg, W, C)
                a4 += _product(x, base, h, v + 4, hm, c, cm, gg, W, C)
            if K > 5:
                a5 += _product(x, base, h, v + 5, hm, c, cm, gg, W, C)
                a6 += _product(x, base, h, v + 6, hm, c, cm, gg, W, C)
        to = d + i * K * C + c
        tl.atomic_add(to, tl.sum(a0, 0), mask=cm)
        tl.atomic_add(to + C, tl.sum(a1, 0), mask=cm)
        tl.atomic_add(to + 2 * C, tl.sum(a2, 0), mask=cm)
        if K > 3:
            tl.atomic_add(to + 3 * C, tl.sum(a3, 0), mask=cm)
            tl.atomic_add(to + 4 * C, tl.sum(a4, 0), mask=cm)
        if K > 5:
            tl.atomic_add(to + 5 * C, tl.sum(a5, 0), mask=cm)
            tl.atomic_add(to + 6 * C, tl.sum(a6, 0), mask=cm)

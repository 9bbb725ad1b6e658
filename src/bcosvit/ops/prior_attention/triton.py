"""Attention with a prior, without the matrix of all token pairs ever lying in memory.

Under ``mul``, A = softmax(R) ⊙ P: rows are normalised by Σ exp(R) *before* P comes in, so the
usual running softmax serves, with P as one more factor on the way to V. With L = log Σ exp(R) kept
from the forward pass, the backward ones recompute what they need tile by tile:

    E = softmax(R)         G = dO·Vᵀ         δ = Σ_d dO ⊙ O
    dR = E ⊙ (P ⊙ G − δ)   dP = Σ_n E ⊙ G    dV = (E ⊙ P)ᵀ·dO       (none, add: P = 1, dB = Σ_n dR)

Frozen, A is part of W(x) and dV is all there is. Each tile of a result belongs to one program and
sums over the batch run in a fixed order: no atomics, the same result on every run.
Letters: n batch, h heads, t tokens, i query, j key, d width of a head.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bcosvit.ops.backend import launches_directly

_KINDS = {"none": 0, "add": 1, "mul": 2}
_LOG2E = 1.4426950408889634
# Chunks of the batch whose share of the prior's gradient is summed by one program.
_CHUNKS = 8


def attend(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, kind: str, frozen: bool
) -> Tensor:
    """A·V for [n, h, t, d]; ``weight`` [h, t, t] is B itself under add, softmax(B) under mul."""
    dtype = value.dtype
    # Rows of a multiple of 64 numbers begin where wide loads may.
    prior = value.new_empty(0) if weight is None else F.pad(weight, (0, -weight.shape[-1] % 64))
    run = _Attend.apply if launches_directly(value) else _forward
    out, _ = run(query.to(dtype), key.to(dtype), value, prior, _KINDS[kind], frozen)
    return out


def _like_rows(x: Tensor) -> Tensor:
    """Memory for [n, h, t, d] in the order n, t, h, d, so that joining the heads is free."""
    n, h, t, d = x.shape
    return x.new_empty(n, t, h, d).transpose(1, 2)


def _launch(
    query: Tensor, key: Tensor, value: Tensor, prior: Tensor, kind: int, frozen: bool
) -> tuple[Tensor, Tensor]:
    """A·V and L [n, h, t], in units of log 2."""
    query, key, value = map(_unit_stride, (query, key, value))
    n, h, t, d = query.shape
    out = _like_rows(query)
    lse = query.new_empty(n, h, t, dtype=torch.float32)
    sizes = _sizes("forward", t, d, query.dtype)
    grid = (triton.cdiv(t, sizes["BI"]), n * h)
    _forward_kernel[grid](
        query, key, value, prior.contiguous(), out, lse,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        h, t, prior.shape[-1], d, _LOG2E / d**0.5,
        KIND=kind, **sizes,
    )  # fmt: skip
    return out, lse


_forward = torch.library.custom_op("bcosvit::prior_attention", _launch, mutates_args=())


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, prior: Tensor, kind: int, frozen: bool
) -> tuple[Tensor, Tensor]:
    return _like_rows(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _remember(ctx, inputs, output) -> None:
    query, key, value, prior, ctx.kind, ctx.frozen = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    # Frozen, δ is not needed, so the output need not be kept.
    kept = value.new_empty(0) if ctx.frozen else out
    ctx.save_for_backward(query, key, value, prior, kept, lse)


def _differentiate(ctx, grad: Tensor, _: None):
    query, key, value, prior, out, lse = ctx.saved_tensors
    direct = launches_directly(grad)
    if ctx.frozen:
        run = _launch_value if direct else _backward_value
        return None, None, run(grad, query, key, prior, lse, ctx.kind), None, None, None
    delta = (grad.float() * out.float()).sum(-1)
    state = (grad, query, key, value, prior, lse, delta, ctx.kind)
    if _fits_one_program(query):
        d_query, d_key, d_value = (_launch_tokens if direct else _backward_tokens)(*state)
    else:
        d_query = (_launch_query if direct else _backward_query)(*state)
        d_key, d_value = (_launch_key if direct else _backward_key)(*state)
    d_prior = None
    if ctx.kind and ctx.needs_input_grad[3]:
        parts = (_launch_prior if direct else _backward_prior)(*state)
        d_prior = parts.sum(0).to(prior.dtype)
    return d_query, d_key, d_value, d_prior, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


class _Attend(torch.autograd.Function):
    """The same where nothing is traced."""

    forward = staticmethod(_launch)
    setup_context = staticmethod(_remember)
    backward = staticmethod(_differentiate)


def _launch_tokens(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, prior: Tensor, lse: Tensor,
    delta: Tensor, kind: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d query, d key and d value in one go, where one program can hold all queries of a head."""
    grad, query, key, value = map(_unit_stride, (grad, query, key, value))
    n, h, t, d = query.shape
    outs = _like_rows(query), _like_rows(key), _like_rows(value)
    _tokens_kernel[(n * h,)](
        grad, query, key, value, prior.contiguous(), lse, delta.contiguous(), *outs,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *outs[0].stride()[:3], h, t, prior.shape[-1], d, _LOG2E / d**0.5, 1 / d**0.5,
        KIND=kind, BT=max(64, triton.next_power_of_2(t)), BJ=64,
        BD=max(16, triton.next_power_of_2(d)), num_warps=8, num_stages=2,
    )  # fmt: skip
    return outs


_backward_tokens = torch.library.custom_op(
    "bcosvit::prior_attention_tokens", _launch_tokens, mutates_args=()
)


@_backward_tokens.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return _like_rows(query), _like_rows(key), _like_rows(value)


def _launch_query(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, prior: Tensor, lse: Tensor,
    delta: Tensor, kind: int,
) -> Tensor:  # fmt: skip
    grad, query, key, value = map(_unit_stride, (grad, query, key, value))
    n, h, t, d = query.shape
    out = _like_rows(query)
    sizes = _sizes("query", t, d, query.dtype)
    _query_kernel[(triton.cdiv(t, sizes["BI"]), n * h)](
        grad, query, key, value, prior.contiguous(), lse, delta.contiguous(), out,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *out.stride()[:3], h, t, prior.shape[-1], d, _LOG2E / d**0.5, 1 / d**0.5,
        KIND=kind, **sizes,
    )  # fmt: skip
    return out


_backward_query = torch.library.custom_op(
    "bcosvit::prior_attention_query", _launch_query, mutates_args=()
)


@_backward_query.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return _like_rows(query)


def _launch_key(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, prior: Tensor, lse: Tensor,
    delta: Tensor, kind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """d key and d value."""
    grad, query, key, value = map(_unit_stride, (grad, query, key, value))
    n, h, t, d = query.shape
    d_key, d_value = _like_rows(key), _like_rows(value)
    sizes = _sizes("key", t, d, query.dtype)
    _key_kernel[(triton.cdiv(t, sizes["BJ"]), n * h)](
        grad, query, key, value, prior.contiguous(), lse, delta.contiguous(), d_key, d_value,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *d_key.stride()[:3], n, h, t, prior.shape[-1], d, _LOG2E / d**0.5, 1 / d**0.5,
        KIND=kind, FROZEN=False, **sizes,
    )  # fmt: skip
    return d_key, d_value


_backward_key = torch.library.custom_op(
    "bcosvit::prior_attention_key", _launch_key, mutates_args=()
)


@_backward_key.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return _like_rows(key), _like_rows(value)


def _launch_value(
    grad: Tensor, query: Tensor, key: Tensor, prior: Tensor, lse: Tensor, kind: int
) -> Tensor:
    """Aᵀ·dO; ``grad`` [k·n, ...] may stack k gradients of the same batch."""
    grad, query, key = map(_unit_stride, (grad, query, key))
    n, h, t, d = grad.shape
    out = _like_rows(grad)
    sizes = _sizes("key", t, d, query.dtype)
    _key_kernel[(triton.cdiv(t, sizes["BJ"]), n * h)](
        grad, query, key, key, prior.contiguous(), lse, lse, out, out,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *key.stride()[:3],
        *out.stride()[:3], query.shape[0], h, t, prior.shape[-1], d, _LOG2E / d**0.5, 1 / d**0.5,
        KIND=kind, FROZEN=True, **sizes,
    )  # fmt: skip
    return out


_backward_value = torch.library.custom_op(
    "bcosvit::prior_attention_value", _launch_value, mutates_args=()
)


@_backward_value.register_fake
def _(grad, query, key, prior, lse, kind):
    return _like_rows(grad)


@_backward_value.register_vmap
def _(info, in_dims, grad, *rest):
    # Several classes of one explanation: their gradients are stacked, the rest is shared.
    assert in_dims[0] is not None and all(dim is None for dim in in_dims[1:])
    out = _backward_value(grad.movedim(in_dims[0], 0).flatten(0, 1), *rest)
    return out.unflatten(0, (info.batch_size, -1)), 0


def _launch_prior(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, prior: Tensor, lse: Tensor,
    delta: Tensor, kind: int,
) -> Tensor:  # fmt: skip
    """The prior's gradient, a part [h, t, t] for each chunk of the batch."""
    grad, query, key, value = map(_unit_stride, (grad, query, key, value))
    n, h, t, d = query.shape
    chunks = min(_CHUNKS, n)
    out = query.new_empty(chunks, *prior.shape, dtype=torch.float32)
    sizes = _sizes("prior", t, d, query.dtype)
    tiles = triton.cdiv(t, sizes["BI"]), triton.cdiv(t, sizes["BJ"])
    _prior_kernel[(tiles[0] * tiles[1], h, chunks)](
        grad, query, key, value, prior.contiguous(), lse, delta.contiguous(), out,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        n, triton.cdiv(n, chunks), h, t, prior.shape[-1], d, _LOG2E / d**0.5,
        KIND=kind, **sizes,
    )  # fmt: skip
    return out


_backward_prior = torch.library.custom_op(
    "bcosvit::prior_attention_prior", _launch_prior, mutates_args=()
)


@_backward_prior.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return query.new_empty(min(_CHUNKS, query.shape[0]), *prior.shape, dtype=torch.float32)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Queries and keys a tile, warps, stages of loads ahead: the fastest of a dozen on an H200.
_TILES = {
    "forward": (128, 32, 4, 3),
    "query": (64, 64, 4, 1),
    "key": (64, 64, 4, 1),
    "prior": (128, 64, 4, 2),
}


def _sizes(kernel: str, t: int, d: int, dtype: torch.dtype) -> dict[str, int]:
    # float32 tiles take twice the shared memory.
    rows, columns, warps, stages = (32, 32, 4, 1) if dtype == torch.float32 else _TILES[kernel]
    most = max(16, triton.next_power_of_2(t))
    return {
        "BI": min(rows, most),
        "BJ": min(columns, most),
        "BD": max(16, triton.next_power_of_2(d)),
        "num_warps": warps,
        "num_stages": stages,
    }


def _fits_one_program(query: Tensor) -> bool:
    return query.dtype != torch.float32 and query.shape[2] <= 256 and query.shape[3] <= 64


@triton.jit
def _tile(base, stride, first, count, d, ROWS: tl.constexpr, BD: tl.constexpr):
    """[ROWS, BD] of a matrix with ``count`` rows and ``d`` columns; zeros outside."""
    row = first + tl.arange(0, ROWS)
    col = tl.arange(0, BD)
    mask = (row < count)[:, None] & (col < d)[None, :]
    return tl.load(base + row[:, None] * stride + col[None, :], mask=mask, other=0.0)


@triton.jit
def _put(base, stride, first, count, d, x, ROWS: tl.constexpr, BD: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    col = tl.arange(0, BD)
    mask = (row < count)[:, None] & (col < d)[None, :]
    at = base + row[:, None] * stride + col[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _pairs(base, h, i, j, t, width):
    """The prior at queries × keys; i and j are broadcast against each other."""
    at = base + h.to(tl.int64) * t * width + i * width + j
    return tl.load(at, mask=(i < t) & (j < width), other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    query, key, value, prior, out, lse,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    heads, t, width, d, scale,
    KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    first = tl.program_id(0) * BI
    i = first + tl.arange(0, BI)
    q = _tile(query + n * q_n + h * q_h, q_t, first, t, d, BI, BD)
    best = tl.full((BI,), float("-inf"), tl.float32)
    total = tl.zeros((BI,), tl.float32)
    mixed = tl.zeros((BI, BD), tl.float32)
    for start in range(0, t, BJ):
        j = start + tl.arange(0, BJ)
        k = _tile(key + n * k_n + h * k_h, k_t, start, t, d, BJ, BD)
        v = _tile(value + n * v_n + h * v_h, v_t, start, t, d, BJ, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if KIND == 1:
            s += _pairs(prior, h, i[:, None], j[None, :], t, width) * 1.4426950408889634
        s = tl.where((j < t)[None, :], s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        shrink = tl.exp2(best - higher)
        e = tl.exp2(s - higher[:, None])
        total = total * shrink + tl.sum(e, 1)
        if KIND == 2:
            e *= _pairs(prior, h, i[:, None], j[None, :], t, width)
        mixed = mixed * shrink[:, None] + tl.dot(e.to(v.dtype), v, input_precision="ieee")
        best = higher
    _put(out + n * o_n + h * o_h, o_t, first, t, d, mixed / total[:, None], BI, BD)
    tl.store(lse + (n * heads + h) * t + i, best + tl.log2(total), mask=i < t)


@triton.jit
def _tokens_kernel(
    grad, query, key, value, prior, lse, delta, d_query, d_key, d_value,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    heads, t, width, d, scale, slope,
    KIND: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) // heads).to(tl.int64)
    h = tl.program_id(0) % heads
    i = tl.arange(0, BT)
    q = _tile(query + n * q_n + h * q_h, q_t, 0, t, d, BT, BD)
    g = _tile(grad + n * g_n + h * g_h, g_t, 0, t, d, BT, BD)
    row = (n * heads + h) * t + i
    log_sum = tl.load(lse + row, mask=i < t, other=float("inf"))
    dot = tl.load(delta + row, mask=i < t, other=0.0)
    at = n * o_n + h * o_h
    d_q = tl.zeros((BT, BD), tl.float32)
    for start in range(0, t, BJ):
        j = start + tl.arange(0, BJ)
        k = _tile(key + n * k_n + h * k_h, k_t, start, t, d, BJ, BD)
        v = _tile(value + n * v_n + h * v_h, v_t, start, t, d, BJ, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        gv = tl.dot(g, tl.trans(v), input_precision="ieee")
        if KIND == 1:
            s += _pairs(prior, h, i[:, None], j[None, :], t, width) * 1.4426950408889634
        e = tl.where((j < t)[None, :], tl.exp2(s - log_sum[:, None]), 0.0)
        a = e
        if KIND == 2:
            p = _pairs(prior, h, i[:, None], j[None, :], t, width)
            a = e * p
            gv *= p
        d_s = (e * (gv - dot[:, None])).to(q.dtype)
        # Transposed, so that the long axis is the one that is summed over.
        d_v = tl.dot(tl.trans(g), a.to(q.dtype), input_precision="ieee")
        d_k = tl.dot(tl.trans(q), d_s, input_precision="ieee")
        _put(d_value + at, o_t, start, t, d, tl.trans(d_v), BJ, BD)
        _put(d_key + at, o_t, start, t, d, tl.trans(d_k) * slope, BJ, BD)
        d_q += tl.dot(d_s, k, input_precision="ieee")
    _put(d_query + at, o_t, 0, t, d, d_q * slope, BT, BD)


@triton.jit
def _query_kernel(
    grad, query, key, value, prior, lse, delta, d_query,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    heads, t, width, d, scale, slope,
    KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    first = tl.program_id(0) * BI
    i = first + tl.arange(0, BI)
    q = _tile(query + n * q_n + h * q_h, q_t, first, t, d, BI, BD)
    g = _tile(grad + n * g_n + h * g_h, g_t, first, t, d, BI, BD)
    row = (n * heads + h) * t + i
    log_sum = tl.load(lse + row, mask=i < t, other=float("inf"))
    dot = tl.load(delta + row, mask=i < t, other=0.0)
    d_q = tl.zeros((BI, BD), tl.float32)
    for start in range(0, t, BJ):
        j = start + tl.arange(0, BJ)
        k = _tile(key + n * k_n + h * k_h, k_t, start, t, d, BJ, BD)
        v = _tile(value + n * v_n + h * v_h, v_t, start, t, d, BJ, BD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        gv = tl.dot(g, tl.trans(v), input_precision="ieee")
        if KIND == 1:
            s += _pairs(prior, h, i[:, None], j[None, :], t, width) * 1.4426950408889634
        e = tl.where((j < t)[None, :], tl.exp2(s - log_sum[:, None]), 0.0)
        if KIND == 2:
            gv *= _pairs(prior, h, i[:, None], j[None, :], t, width)
        d_s = e * (gv - dot[:, None])
        d_q += tl.dot(d_s.to(k.dtype), k, input_precision="ieee")
    _put(d_query + n * o_n + h * o_h, o_t, first, t, d, d_q * slope, BI, BD)


@triton.jit
def _key_kernel(
    grad, query, key, value, prior, lse, delta, d_key, d_value,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    batch, heads, t, width, d, scale, slope,
    KIND: tl.constexpr, FROZEN: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    stacked = (tl.program_id(1) // heads).to(tl.int64)
    n = stacked % batch
    h = tl.program_id(1) % heads
    first = tl.program_id(0) * BJ
    j = first + tl.arange(0, BJ)
    k = _tile(key + n * k_n + h * k_h, k_t, first, t, d, BJ, BD)
    if not FROZEN:
        v = _tile(value + n * v_n + h * v_h, v_t, first, t, d, BJ, BD)
        d_k = tl.zeros((BJ, BD), tl.float32)
    d_v = tl.zeros((BJ, BD), tl.float32)
    for start in range(0, t, BI):
        i = start + tl.arange(0, BI)
        q = _tile(query + n * q_n + h * q_h, q_t, start, t, d, BI, BD)
        g = _tile(grad + stacked * g_n + h * g_h, g_t, start, t, d, BI, BD)
        row = (n * heads + h) * t + i
        log_sum = tl.load(lse + row, mask=i < t, other=float("inf"))
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        if KIND == 1:
            s += _pairs(prior, h, i[None, :], j[:, None], t, width) * 1.4426950408889634
        e = tl.exp2(s - log_sum[None, :])
        if KIND == 2:
            p = _pairs(prior, h, i[None, :], j[:, None], t, width)
            d_v += tl.dot((e * p).to(g.dtype), g, input_precision="ieee")
        else:
            d_v += tl.dot(e.to(g.dtype), g, input_precision="ieee")
        if not FROZEN:
            gv = tl.dot(v, tl.trans(g), input_precision="ieee")
            if KIND == 2:
                gv *= p
            dot = tl.load(delta + row, mask=i < t, other=0.0)
            d_s = e * (gv - dot[None, :])
            d_k += tl.dot(d_s.to(q.dtype), q, input_precision="ieee")
    at = stacked * o_n + h * o_h
    _put(d_value + at, o_t, first, t, d, d_v, BJ, BD)
    if not FROZEN:
        _put(d_key + at, o_t, first, t, d, d_k * slope, BJ, BD)


@triton.jit
def _prior_kernel(
    grad, query, key, value, prior, lse, delta, d_prior,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t,
    batch, chunk, heads, t, width, d, scale,
    KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(t, BJ)
    first_i = tl.program_id(0) // columns * BI
    first_j = tl.program_id(0) % columns * BJ
    h = tl.program_id(1)
    part = tl.program_id(2)
    i = first_i + tl.arange(0, BI)
    j = first_j + tl.arange(0, BJ)
    if KIND == 1:
        bias = _pairs(prior, h, i[:, None], j[None, :], t, width) * 1.4426950408889634
    total = tl.zeros((BI, BJ), tl.float32)
    for index in range(part * chunk, tl.minimum((part + 1) * chunk, batch)):
        n = tl.full((), 0, tl.int64) + index
        q = _tile(query + n * q_n + h * q_h, q_t, first_i, t, d, BI, BD)
        k = _tile(key + n * k_n + h * k_h, k_t, first_j, t, d, BJ, BD)
        g = _tile(grad + n * g_n + h * g_h, g_t, first_i, t, d, BI, BD)
        v = _tile(value + n * v_n + h * v_h, v_t, first_j, t, d, BJ, BD)
        row = (n * heads + h) * t + i
        log_sum = tl.load(lse + row, mask=i < t, other=float("inf"))
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        gv = tl.dot(g, tl.trans(v), input_precision="ieee")
        if KIND == 1:
            dot = tl.load(delta + row, mask=i < t, other=0.0)
            total += tl.exp2(s + bias - log_sum[:, None]) * (gv - dot[:, None])
        else:
            total += tl.exp2(s - log_sum[:, None]) * gv
    mask = (i < t)[:, None] & (j < width)[None, :]
    at = d_prior + (part * heads + h).to(tl.int64) * t * width + i[:, None] * width + j[None, :]
    tl.store(at, tl.where((j < t)[None, :], total, 0.0), mask=mask)

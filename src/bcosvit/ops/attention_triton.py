"""Attention with a prior, without the matrix of all token pairs ever lying in memory.

Under ``mul``, A = softmax(R) ⊙ P: rows are normalized by Σ exp(R) *before* P comes in, so the
usual running softmax serves, with P as one more factor on the way to V. With L = log Σ exp(R) kept
from the forward pass, the backward ones recompute what they need tile by tile:

    E = softmax(R)         G = dO·Vᵀ         δ = Σ_d dO ⊙ O
    dR = E ⊙ (P ⊙ G − δ)   dP = Σ_n E ⊙ G    dV = (E ⊙ P)ᵀ·dO       (none, add: P = 1, dB = Σ_n dR)

Frozen, A is part of W(x) and dV is all there is. Each tile of a result belongs to one program and
sums over the batch run in a fixed order: no atomics, the same result on every run.
Letters: n batch, h heads, t tokens, i query, j key, d width per head.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bcosvit.ops.attention_kernels import (
    forward_kernel,
    key_kernel,
    prior_kernel,
    query_kernel,
    tokens_kernel,
    value_kernel,
)
from bcosvit.ops.dispatch import launches_directly, traceable, untraced

_KINDS = {"none": 0, "add": 1, "mul": 2}
_LOG2E = 1.4426950408889634
# Of a thread: with more of them two programs instead of three would share a processor.
_REGISTERS = 168
# Chunks of the batch whose share of the prior's gradient is summed by one program.
_CHUNKS = 8


def attend(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, kind: str, frozen: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A·V for [n, h, t, d], and Σ(A·V)² of each token's heads [n, t, 1] where asked for; ``weight``
    [h, t, t] is B itself under add, softmax(B) under mul."""
    dtype = value.dtype
    # Rows of a multiple of 64 numbers begin where wide loads may.
    prior = value.new_empty(0) if weight is None else F.pad(weight, (0, -weight.shape[-1] % 64))
    run = _Attend.apply if launches_directly(value) else _forward
    heads = query.to(dtype), key.to(dtype), value
    out, _, squares = run(*heads, prior, _KINDS[kind], frozen, with_squares)
    return out, squares.sum(-1, keepdim=True) if with_squares else None


def _like_rows(x: Tensor) -> Tensor:
    """Memory for [n, h, t, d] in the order n, t, h, d, so that joining the heads is free."""
    n, h, t, d = x.shape
    return x.new_empty(n, t, h, d).transpose(1, 2)


def _launch(
    query: Tensor, key: Tensor, value: Tensor, prior: Tensor, kind: int, frozen: bool,
    with_squares: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A·V, L [n, h, t] in units of log 2, and Σ(A·V)² of each head [n, t, h]."""
    query, key, value = map(_unit_stride, (query, key, value))
    n, h, t, d = query.shape
    out, lse, squares = _room(query, with_squares)
    sizes = _sizes("forward", t, d, query.dtype)
    grid = (triton.cdiv(t, sizes["BI"]), n * h)
    # Wide heads need more, and would store some of them in memory.
    registers = _REGISTERS if query.dtype != torch.float32 and sizes["BD"] <= 64 else None
    forward_kernel[grid](
        query, key, value, prior.contiguous(), out, lse, squares,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        h, t, prior.shape[-1], d, _LOG2E / d**0.5,
        KIND=kind, WITH_SQUARES=with_squares, maxnreg=registers, **sizes,
    )  # fmt: skip
    return out, lse, squares


def _room(query: Tensor, with_squares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten A·V, L, and squares, which are empty where they are not asked for."""
    n, h, t, _ = query.shape
    lse = query.new_empty(n, h, t, dtype=torch.float32)
    return _like_rows(query), lse, lse.new_empty(n, t, h if with_squares else 0)


_forward = traceable("prior_attention", _launch)


@_forward.register_fake
def _(query, key, value, prior, kind, frozen, with_squares):
    return _room(query, with_squares)


def _remember(ctx, inputs, output) -> None:
    query, key, value, prior, ctx.kind, ctx.frozen, ctx.with_squares = inputs
    out, lse, squares = output
    ctx.mark_non_differentiable(*((lse,) if ctx.with_squares else (lse, squares)))
    # Frozen, δ is not needed, so the output need not be kept.
    kept = value.new_empty(0) if ctx.frozen else out
    ctx.save_for_backward(query, key, value, prior, kept, lse)


def _differentiate(ctx, grad: Tensor, _: None, d_squares: Tensor | None):
    query, key, value, prior, out, lse = ctx.saved_tensors
    direct = launches_directly(grad)
    if ctx.frozen:
        run = _launch_value if direct else _backward_value
        return None, None, run(grad, query, key, prior, lse, ctx.kind), *[None] * 4
    if ctx.with_squares and d_squares is not None:
        grad = grad + 2 * d_squares.transpose(1, 2).unsqueeze(-1).to(grad.dtype) * out
    delta = (grad.float() * out.float()).sum(-1)
    state = (grad, query, key, value, prior, lse, delta, ctx.kind)
    d_query, d_key, d_value = (_launch_tokens if direct else _backward_tokens)(*state)
    d_prior = None
    if ctx.kind and ctx.needs_input_grad[3]:
        parts = (_launch_prior if direct else _backward_prior)(*state)
        d_prior = parts.sum(0).to(prior.dtype)
    return d_query, d_key, d_value, d_prior, *[None] * 3


_forward.register_autograd(_differentiate, setup_context=_remember)


_Attend = untraced("_Attend", _launch, _remember, _differentiate)


def _launch_tokens(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, prior: Tensor, lse: Tensor,
    delta: Tensor, kind: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d query, d key and d value: in one go where one program can hold all queries of a head."""
    grad, query, key, value = map(_unit_stride, (grad, query, key, value))
    n, h, t, d = query.shape
    d_query, d_key, d_value = _like_rows(query), _like_rows(key), _like_rows(value)
    given = grad, query, key, value, prior.contiguous(), lse, delta.contiguous()
    strides = [s for x in (grad, query, key, value, d_query) for s in x.stride()[:3]]
    about = h, t, prior.shape[-1], d, _LOG2E / d**0.5, 1 / d**0.5
    if query.dtype != torch.float32 and t <= _TILES["tokens"][0] and d <= 64:
        sizes = _sizes("tokens", t, d, query.dtype)
        # One program holds all queries of a head, padded.
        sizes["BT"] = max(64, triton.next_power_of_2(t))
        del sizes["BI"]
        tokens_kernel[(n * h,)](
            *given, d_query, d_key, d_value, *strides, *about, KIND=kind, **sizes
        )  # fmt: skip
        return d_query, d_key, d_value
    sizes = _sizes("query", t, d, query.dtype)
    grid = (triton.cdiv(t, sizes["BI"]), n * h)
    query_kernel[grid](*given, d_query, *strides, *about, KIND=kind, **sizes)
    sizes = _sizes("key", t, d, query.dtype)
    grid = (triton.cdiv(t, sizes["BJ"]), n * h)
    key_kernel[grid](*given, d_key, d_value, *strides, *about, KIND=kind, **sizes)
    return d_query, d_key, d_value


_backward_tokens = traceable("prior_attention_tokens", _launch_tokens)


@_backward_tokens.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return _like_rows(query), _like_rows(key), _like_rows(value)


def _launch_value(
    grad: Tensor, query: Tensor, key: Tensor, prior: Tensor, lse: Tensor, kind: int
) -> Tensor:
    """Aᵀ·dO; ``grad`` [k·n, ...] may stack k gradients of the same batch."""
    grad, query, key = map(_unit_stride, (grad, query, key))
    n, h, t, d = grad.shape
    out = _like_rows(grad)
    sizes = _sizes("value", t, d, query.dtype)
    value_kernel[(triton.cdiv(t, sizes["BJ"]), n * h)](
        grad, query, key, prior.contiguous(), lse, out,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *out.stride()[:3],
        query.shape[0], h, t, prior.shape[-1], d, _LOG2E / d**0.5,
        KIND=kind, **sizes,
    )  # fmt: skip
    return out


_backward_value = traceable("prior_attention_value", _launch_value)


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
    prior_kernel[(tiles[0] * tiles[1], h, chunks)](
        grad, query, key, value, prior.contiguous(), lse, delta.contiguous(), out,
        *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        n, triton.cdiv(n, chunks), h, t, prior.shape[-1], d, _LOG2E / d**0.5,
        KIND=kind, **sizes,
    )  # fmt: skip
    return out


_backward_prior = traceable("prior_attention_prior", _launch_prior)


@_backward_prior.register_fake
def _(grad, query, key, value, prior, lse, delta, kind):
    return query.new_empty(min(_CHUNKS, query.shape[0]), *prior.shape, dtype=torch.float32)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Queries and keys a tile, warps, stages of loads ahead: the fastest of a dozen on an H200.
_TILES = {
    "forward": (128, 32, 4, 3),
    "tokens": (256, 64, 8, 2),
    "query": (64, 64, 4, 1),
    "key": (64, 64, 4, 1),
    "value": (64, 64, 4, 1),
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

"""The kernels of attention with a prior; ``attention_triton`` says what they compute and when.

Letters: n batch, h heads, t tokens, i query, j key, d width per head.
"""

import triton
import triton.language as tl


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
def forward_kernel(
    query, key, value, prior, out, lse, squares,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    heads, t, width, d, scale,
    KIND: tl.constexpr, WITH_SQUARES: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
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
    narrow = (mixed / total[:, None]).to(out.dtype.element_ty)
    _put(out + n * o_n + h * o_h, o_t, first, t, d, narrow, BI, BD)
    if WITH_SQUARES:
        # Of what the next layer will read, rounding included; columns beyond d are zero.
        seen = narrow.to(tl.float32)
        tl.store(squares + (n * t + i) * heads + h, tl.sum(seen * seen, 1), mask=i < t)
    tl.store(lse + (n * heads + h) * t + i, best + tl.log2(total), mask=i < t)


@triton.jit
def tokens_kernel(
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
def query_kernel(
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
def key_kernel(
    grad, query, key, value, prior, lse, delta, d_key, d_value,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t, o_n, o_h, o_t,
    heads, t, width, d, scale, slope,
    KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    first = tl.program_id(0) * BJ
    j = first + tl.arange(0, BJ)
    k = _tile(key + n * k_n + h * k_h, k_t, first, t, d, BJ, BD)
    v = _tile(value + n * v_n + h * v_h, v_t, first, t, d, BJ, BD)
    d_k = tl.zeros((BJ, BD), tl.float32)
    d_v = tl.zeros((BJ, BD), tl.float32)
    for start in range(0, t, BI):
        i = start + tl.arange(0, BI)
        q = _tile(query + n * q_n + h * q_h, q_t, start, t, d, BI, BD)
        g = _tile(grad + n * g_n + h * g_h, g_t, start, t, d, BI, BD)
        row = (n * heads + h) * t + i
        log_sum = tl.load(lse + row, mask=i < t, other=float("inf"))
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        gv = tl.dot(v, tl.trans(g), input_precision="ieee")
        if KIND == 1:
            s += _pairs(prior, h, i[None, :], j[:, None], t, width) * 1.4426950408889634
        e = tl.exp2(s - log_sum[None, :])
        if KIND == 2:
            p = _pairs(prior, h, i[None, :], j[:, None], t, width)
            d_v += tl.dot((e * p).to(g.dtype), g, input_precision="ieee")
            gv *= p
        else:
            d_v += tl.dot(e.to(g.dtype), g, input_precision="ieee")
        dot = tl.load(delta + row, mask=i < t, other=0.0)
        d_s = e * (gv - dot[None, :])
        d_k += tl.dot(d_s.to(q.dtype), q, input_precision="ieee")
    at = n * o_n + h * o_h
    _put(d_value + at, o_t, first, t, d, d_v, BJ, BD)
    _put(d_key + at, o_t, first, t, d, d_k * slope, BJ, BD)


@triton.jit
def value_kernel(
    grad, query, key, prior, lse, d_value,
    g_n, g_h, g_t, q_n, q_h, q_t, k_n, k_h, k_t, o_n, o_h, o_t,
    batch, heads, t, width, d, scale,
    KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Aᵀ·dO for gradients of one or several classes, which are stacked along the batch."""
    stacked = (tl.program_id(1) // heads).to(tl.int64)
    n = stacked % batch
    h = tl.program_id(1) % heads
    first = tl.program_id(0) * BJ
    j = first + tl.arange(0, BJ)
    k = _tile(key + n * k_n + h * k_h, k_t, first, t, d, BJ, BD)
    d_v = tl.zeros((BJ, BD), tl.float32)
    for start in range(0, t, BI):
        i = start + tl.arange(0, BI)
        q = _tile(query + n * q_n + h * q_h, q_t, start, t, d, BI, BD)
        g = _tile(grad + stacked * g_n + h * g_h, g_t, start, t, d, BI, BD)
        log_sum = tl.load(lse + (n * heads + h) * t + i, mask=i < t, other=float("inf"))
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        if KIND == 1:
            s += _pairs(prior, h, i[None, :], j[:, None], t, width) * 1.4426950408889634
        a = tl.exp2(s - log_sum[None, :])
        if KIND == 2:
            a *= _pairs(prior, h, i[None, :], j[:, None], t, width)
        d_v += tl.dot(a.to(g.dtype), g, input_precision="ieee")
    _put(d_value + stacked * o_n + h * o_h, o_t, first, t, d, d_v, BJ, BD)


@triton.jit
def prior_kernel(
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

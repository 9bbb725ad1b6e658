"""Attention on a CPU, computed for a few heads of one image at a time.

Between its two products, A is scaled, normalized and multiplied by the prior. The matrices of a few
heads fit into the processor's cache during these steps; those of a whole batch would be read from
and written to memory in each of them.

Letters: n batch, h heads, t tokens, d width per head.
"""

from itertools import product

import torch
from torch import Tensor

from bcosvit.ops.dispatch import constant_if, is_plain
from bcosvit.ops.products import matmul, rounds

BLOCK = 2**18
"""Pairs of tokens that are computed at once."""

LEAST = 2**14
"""The fewest pairs of tokens of an image, in all heads, for which the loop is faster."""


def suits(query: Tensor, key: Tensor, value: Tensor, prior: Tensor | None, frozen: bool) -> bool:
    """Whether it is faster, A needs no gradient, and all tensors are plain and of one dtype."""
    inputs = [t for t in (query, key, value, prior) if t is not None]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return (
        (frozen or not differentiated)
        and all(is_plain(t) for t in inputs)
        and all(t.dtype == value.dtype for t in inputs)
        and value.dtype in (torch.float32, torch.float64)
        and value.numel() > 0
        and query.shape[1] * query.shape[2] ** 2 >= LEAST
        and not torch.is_autocast_enabled("cpu")
        and not (frozen and rounds("cpu", "matmul"))
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, prior: Tensor | None, kind: str, frozen: bool
) -> Tensor:
    """A·V as `prior_attention` computes it, for tensors that `suits` accepts."""
    (n, heads, t), scale = query.shape[:3], query.shape[-1] ** -0.5
    assert kind == "none" or prior is not None, f"prior attention of kind {kind!r} needs a prior"
    prior = value.new_zeros(heads, 1, 1) if prior is None else constant_if(frozen, prior)
    factor = prior.softmax(-1) if kind == "mul" else None
    kept = value.requires_grad and torch.is_grad_enabled()
    if kept:
        matrix = value.new_empty(n, heads, t, t)
    else:
        out = value.new_empty(n, t, heads, value.shape[-1]).transpose(1, 2)
    few = max(1, BLOCK // t**2)
    with torch.no_grad():
        for i, first in product(range(n), range(0, heads, few)):
            some = slice(first, first + few)
            q, k = query[i, some], key[i, some].mT
            beta = int(kind == "add")
            a = torch.baddbmm(prior[some], q, k, beta=beta, alpha=scale).softmax(-1)
            if factor is not None:
                a *= factor[some]
            if kept:
                matrix[i, some] = a
            else:
                out[i, some] = a @ value[i, some]
    return matmul(matrix, value, frozen=frozen) if kept else out

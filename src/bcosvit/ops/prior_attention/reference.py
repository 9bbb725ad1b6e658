"""Attention with a learned prior over pairs of tokens (the paper's Eq. 17 and 18).

Shapes: query, key, value [n, heads, t, d], prior [heads, t, t], out [n, heads, t, d].
"""

from typing import Literal

from torch import Tensor

from bcosvit.ops.common import constant_if

PriorKind = Literal["none", "add", "mul"]


def attention_matrix(query: Tensor, key: Tensor, prior: Tensor | None, kind: PriorKind) -> Tensor:
    """A [n, heads, t, t]: each row weighs the tokens that one query reads.

    Under ``mul`` two distributions are multiplied element by element, so rows sum to less than 1.
    """
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if kind == "none":
        return scores.softmax(-1)
    assert prior is not None, f"prior attention of kind {kind!r} needs a prior"
    if kind == "add":
        return (scores + prior).softmax(-1)
    return scores.softmax(-1) * prior.softmax(-1)


def prior_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None = None,
    *,
    kind: PriorKind = "none",
    frozen: bool = False,
) -> Tensor:
    """A·V; with ``frozen`` the whole of A, prior included, counts as part of W(x)."""
    matrix = constant_if(frozen, attention_matrix(query, key, prior, kind))
    return matrix.to(value.dtype) @ value

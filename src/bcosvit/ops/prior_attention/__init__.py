"""Attention with a learned prior over pairs of tokens."""

from torch import Tensor

from bcosvit.ops.backend import Backend, use_triton
from bcosvit.ops.prior_attention import reference
from bcosvit.ops.prior_attention.reference import PriorKind, attention_matrix


def prior_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None = None,
    *,
    kind: PriorKind = "none",
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """A·V; with ``frozen`` the whole of A, prior included, counts as part of W(x).

    Query, key, value and the result are [n, heads, t, d], the prior is [heads, t, t].
    """
    if not use_triton(backend, value):
        return reference.prior_attention(query, key, value, prior, kind=kind, frozen=frozen)
    from bcosvit.ops.prior_attention import triton

    weight = None
    if kind != "none":
        assert prior is not None, f"prior attention of kind {kind!r} needs a prior"
        weight = prior.float() if kind == "add" else prior.float().softmax(-1).to(value.dtype)
    return triton.attend(query, key, value, weight, kind, frozen)


__all__ = ["PriorKind", "attention_matrix", "prior_attention"]

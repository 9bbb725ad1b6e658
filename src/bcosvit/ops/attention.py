"""Attention with a learned prior over pairs of tokens (the paper's Eq. 18 and 19).

What ends ``prior_attention_and_squares`` is the reference in plain PyTorch, which the kernels of
``attention_triton`` and the loop of ``attention_cpu`` are tested against.

Letters: n batch, t tokens, d width per head.
"""

from typing import Any, Literal

from torch import Tensor

from bcosvit.ops.dispatch import Backend, constant_if, use_cpu, use_triton
from bcosvit.ops.products import matmul

PriorKind = Literal["none", "add", "mul"]


def attention_matrix(
    query: Tensor, key: Tensor, prior: Tensor | None, kind: PriorKind, frozen: bool = False
) -> Tensor:
    """Computes A, whose rows weigh the tokens that one query reads.

    Args:
        query: [n, heads, t, d].
        key: [n, heads, t, d].
        prior: B, [heads, t, t]; None where ``kind`` is ``"none"``.
        kind: ``"add"`` is softmax(R + B), Eq. (18); ``"mul"`` is softmax(R) × softmax(B), Eq. (19),
            whose rows sum to less than 1; ``"none"`` is softmax(R).
        frozen: Whether it belongs to a frozen view, which uses all of float32.

    Returns:
        [n, heads, t, t].

    Examples:
        >>> import torch
        >>> query = key = torch.zeros(1, 1, 2, 4)
        >>> attention_matrix(query, key, torch.zeros(1, 2, 2), "mul")[0, 0]
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])
    """
    scores = matmul(query, key.transpose(-2, -1), frozen=frozen) / query.shape[-1] ** 0.5
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
    backend: Backend = "auto",
) -> Tensor:
    """Computes A·V; the kernels never hold the whole of A in memory.

    Args:
        query: [n, heads, t, d].
        key: [n, heads, t, d].
        value: [n, heads, t, d].
        prior: B, [heads, t, t]; None where ``kind`` is ``"none"``.
        kind: As for :func:`attention_matrix`.
        frozen: Whether all of A, the prior included, counts as part of W(x).
        backend: Which implementation runs; see :func:`~bcosvit.ops.dispatch.use_triton`.

    Returns:
        [n, heads, t, d].

    Examples:
        >>> import torch
        >>> query = key = value = torch.rand(1, 3, 16, 8)
        >>> prior_attention(query, key, value).shape
        torch.Size([1, 3, 16, 8])
    """
    how: dict[str, Any] = {"kind": kind, "frozen": frozen, "backend": backend}
    return prior_attention_and_squares(query, key, value, prior, **how, with_squares=False)[0]


def prior_attention_and_squares(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None = None,
    *,
    kind: PriorKind = "none",
    frozen: bool = False,
    backend: Backend = "auto",
    with_squares: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`prior_attention`, and Σ(A·V)² of each token [n, t, 1] where kernels compute it.

    A B-cos transform of the joined heads divides by its root.
    """
    if use_triton(backend, value):
        from bcosvit.ops import attention_triton

        weight = None
        if kind != "none":
            assert prior is not None, f"prior attention of kind {kind!r} needs a prior"
            weight = prior.float() if kind == "add" else prior.float().softmax(-1).to(value.dtype)
        return attention_triton.attend(query, key, value, weight, kind, frozen, with_squares)
    if use_cpu(backend, query, key, value):
        from bcosvit.ops import attention_cpu

        if attention_cpu.suits(query, key, value, prior, frozen):
            return attention_cpu.attend(query, key, value, prior, kind, frozen), None
    matrix = constant_if(frozen, attention_matrix(query, key, prior, kind, frozen))
    return matmul(matrix.to(value.dtype), value, frozen=frozen), None

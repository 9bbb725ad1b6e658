"""Attention with a learnt prior over pairs of tokens."""

from bcosvit.ops.prior_attention.reference import PriorKind, attention_matrix, prior_attention

__all__ = ["PriorKind", "attention_matrix", "prior_attention"]

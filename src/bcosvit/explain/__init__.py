"""Explanations: what speaks for a class, pixel by pixel."""

from bcosvit.explain.attribution import Attribution
from bcosvit.explain.compiled import CompiledInherent
from bcosvit.explain.registry import EXPLAINERS, Explainer, explain, explain_with, explainers

__all__ = [
    "EXPLAINERS",
    "Attribution",
    "CompiledInherent",
    "Explainer",
    "explain",
    "explain_with",
    "explainers",
]

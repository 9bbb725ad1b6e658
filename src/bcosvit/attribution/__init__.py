"""Explanations: what speaks for a class, pixel by pixel."""

from bcosvit.attribution.attribution import Attribution
from bcosvit.attribution.compiled import CompiledInherent
from bcosvit.attribution.registry import EXPLAINERS, Explainer, explain, explain_with, explainers

__all__ = [
    "EXPLAINERS",
    "Attribution",
    "CompiledInherent",
    "Explainer",
    "explain",
    "explain_with",
    "explainers",
]

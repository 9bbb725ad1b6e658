"""Explanations: what speaks for a class, pixel by pixel."""

from bcosvit.explain.attribution import Attribution
from bcosvit.explain.registry import EXPLAINERS, Explainer, explain, explain_with, explainers

__all__ = ["EXPLAINERS", "Attribution", "Explainer", "explain", "explain_with", "explainers"]

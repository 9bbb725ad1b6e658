"""Explanations: what speaks for a class, pixel by pixel."""

from bcosvit.explain.attribution import Attribution
from bcosvit.explain.inherent import explain

__all__ = ["Attribution", "explain"]

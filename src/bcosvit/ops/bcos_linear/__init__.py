"""The B-cos transform of vectors."""

from bcosvit.ops.bcos_linear.reference import bcos_linear

__all__ = ["bcos_linear"]

"""The B-cos transform of image patches."""

from bcosvit.ops.bcos_conv.reference import bcos_conv2d

__all__ = ["bcos_conv2d"]

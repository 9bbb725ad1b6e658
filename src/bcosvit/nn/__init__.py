"""The dynamic-linear layers, and the frozen views that read their matrices off."""

from bcosvit.nn.attention import Attention
from bcosvit.nn.conv import BcosConv2d
from bcosvit.nn.cuda_graphs import CUDAGraphRunner
from bcosvit.nn.encoding import BcosEncoding, Encoding, ImageNetEncoding
from bcosvit.nn.linear import BcosLinear, Linear
from bcosvit.nn.norm import AvgPool2d, BatchNormUncentered2d, LayerNorm
from bcosvit.nn.prior import AttentionPrior, PositionalEmbedding
from bcosvit.nn.views import DynamicModule, explaining, frozen_view, prepared_view

__all__ = [
    "Attention",
    "AttentionPrior",
    "AvgPool2d",
    "BatchNormUncentered2d",
    "BcosConv2d",
    "BcosEncoding",
    "BcosLinear",
    "CUDAGraphRunner",
    "DynamicModule",
    "Encoding",
    "ImageNetEncoding",
    "LayerNorm",
    "Linear",
    "PositionalEmbedding",
    "explaining",
    "frozen_view",
    "prepared_view",
]

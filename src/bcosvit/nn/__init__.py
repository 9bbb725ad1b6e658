"""The dynamic-linear layers, and the frozen views that read their matrices off."""

from bcosvit.nn.attention import Attention
from bcosvit.nn.conv import BcosConv2d
from bcosvit.nn.dynamic import DynamicModule, explaining, frozen_view
from bcosvit.nn.encoding import BcosEncoding, Encoding, ImageNetEncoding
from bcosvit.nn.linear import BcosLinear, Linear
from bcosvit.nn.norm import BatchNormUncentered2d, LayerNorm
from bcosvit.nn.pool import AvgPool2d
from bcosvit.nn.prepared import prepared
from bcosvit.nn.prior import AttentionPrior, PositionalEmbedding
from bcosvit.nn.replay import Replay

__all__ = [
    "Attention",
    "AttentionPrior",
    "AvgPool2d",
    "BatchNormUncentered2d",
    "BcosConv2d",
    "BcosEncoding",
    "BcosLinear",
    "DynamicModule",
    "Encoding",
    "ImageNetEncoding",
    "LayerNorm",
    "Linear",
    "PositionalEmbedding",
    "Replay",
    "explaining",
    "frozen_view",
    "prepared",
]

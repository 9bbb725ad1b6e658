"""Maps of a model at each of its stages, for detectors, segmenters and the curious.

The interface is the one that timm's ``features_only`` models have, so that what is written for
those takes these: a list of maps, and ``feature_info`` with their channels and reductions.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from bcosvit.models.base import AnyModel
from bcosvit.models.config import DenseNetConfig, StemConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.views import unwrapped


@dataclass(frozen=True)
class FeatureInfo:
    """What the maps of each stage are like."""

    modules: tuple[str, ...]
    """Where in the model a stage ends."""
    widths: tuple[int, ...]
    reductions: tuple[int, ...]
    """Pixels of the image that one position stands for, along a side."""

    def channels(self) -> list[int]:
        return list(self.widths)

    def reduction(self) -> list[int]:
        return list(self.reductions)

    def module_name(self) -> list[str]:
        return list(self.modules)


class Features(nn.Module):
    """Images [n, 3, H, W] -> the map [n, d, h, w] behind each transformer or dense block."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = unwrapped(model)
        self.feature_info = _info(self.model)

    def forward(self, images: Tensor) -> list[Tensor]:
        if isinstance(self.model, VisionTransformer):
            return self._of_blocks(self.model, images)
        assert isinstance(self.model, DenseNet)
        maps, x = [], self.model.encoding(images)
        for name, part in self.model.features.named_children():
            x = part(x)
            if f"features.{name}" in self.feature_info.modules:
                maps.append(x)
        return maps

    def _of_blocks(self, model: VisionTransformer, images: Tensor) -> list[Tensor]:
        grid = model.config.grid_of(images.shape[-2], images.shape[-1])
        maps, tokens = [], model.position(model.tokens(images))
        for block in model.blocks:
            tokens = block(tokens)
            maps.append(tokens.transpose(1, 2).unflatten(2, grid))
        return maps


def features(model: AnyModel) -> Features:
    """``features(model)(images)``: a map [n, d, h, w] a block, with ``feature_info`` beside it."""
    return Features(model)


def _info(model: nn.Module) -> FeatureInfo:
    if isinstance(model, VisionTransformer):
        config, depth = model.config, model.config.depth
        stem = config.backbone
        halvings = len(stem.widths) if isinstance(stem, StemConfig) else 1 + config.tap
        return FeatureInfo(
            modules=tuple(f"blocks.{block}" for block in range(depth)),
            widths=(config.width,) * depth,
            reductions=(2**halvings * config.patch,) * depth,
        )
    if isinstance(model, DenseNet):
        dense: DenseNetConfig = model.config
        blocks = range(1, len(dense.blocks) + 1)
        return FeatureInfo(
            modules=tuple(f"features.denseblock{block}" for block in blocks),
            widths=tuple(dense.width_at(block) for block in blocks),
            reductions=tuple(2 ** (1 + block) for block in blocks),
        )
    raise ValueError(
        f"{type(model).__name__} is no model of bcosvit, so its stages are not known; "
        f"give what bcosvit.create_model or bcosvit.load returns."
    )

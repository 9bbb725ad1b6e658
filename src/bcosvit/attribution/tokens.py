"""From scores of tokens to a map of pixels."""

import torch.nn.functional as F
from torch import Tensor

from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer


def as_transformer(model: AnyModel, method: str) -> VisionTransformer:
    """``model``, or the reason why a method that reads attention does not apply to it."""
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"{method} reads attention, and {type(model).__name__} has none; "
            f"use a vision transformer, or a method for any model, e.g. 'ixg'."
        )
    return model


def upsample(scores: Tensor, model: VisionTransformer, size: tuple[int, int]) -> Tensor:
    """Scores [B, t] of tokens, bilinearly interpolated to a map [B, H, W]."""
    image = scores.unflatten(1, model.config.grid_of(*size)).unsqueeze(1)
    return F.interpolate(image, size, mode="bilinear", align_corners=False).squeeze(1)

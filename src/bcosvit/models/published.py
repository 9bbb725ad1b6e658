"""Published DenseNets as the backbones of our models, and a check that they compute the same.

A backbone that loads without an error may still compute something else. So its features are
compared with those that the equations below give in float64, which share no layer with the model.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.messages import and_more
from bcosvit.models.base import create_model
from bcosvit.models.config import DenseNetConfig, Flavor, ModelConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.registry import model_config
from bcosvit.models.vit import VisionTransformer
from bcosvit.models.weights import load_state, published_state


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Our backbone's features beside the published network's."""

    flavor: Flavor
    block: int
    """The dense block behind which they were compared."""
    error: float
    """The norm of the difference, relative to the features' norm, in float64."""
    unused: int
    """Tensors of the checkpoint behind the tap, which a tokenizer has no place for."""


def load_backbone(model: VisionTransformer | DenseNet, path: str | Path) -> list[str]:
    """Fills the DenseNet of a model with a published state dict of the same flavor.

    Args:
        model: A DenseNet, or a vision transformer with a DenseNet as its backbone.
        path: The authors' v1 or v2 B-cos DenseNet, torchvision's, or a DenseNet that
            ``bcosvit.save`` wrote, by path or by any address that ``bcosvit.load`` takes.

    Returns:
        The keys that the model has no place for: a tokenizer ends at its tap, so the layers behind
        it and the classifier are left out.

    Raises:
        ValueError: The file holds no DenseNet, or one of another flavor or size.
    """
    state = published_state(path)
    backbone = model.tokenizer.backbone if isinstance(model, VisionTransformer) else model.features
    features, head = _below(state, "features."), _below(state, "classifier.")
    if not features:
        raise ValueError(
            f"{path} holds no DenseNet: no key begins with 'features.'; it has {and_more(state)}."
        )
    parts = {name for name, _ in backbone.named_children()}
    fitting = {key: tensor for key, tensor in features.items() if key.split(".")[0] in parts}
    load_state(backbone, fitting, source=str(path))
    unused = [f"features.{key}" for key in features.keys() - fitting.keys()]
    if isinstance(model, DenseNet):
        load_state(model.classifier, head, source=f"{path}, classifier")
    else:
        unused += [f"classifier.{key}" for key in head]
    return sorted(unused)


def from_published(
    checkpoint: str | Path, name: str, images: Tensor, **options: Any
) -> tuple[VisionTransformer, Agreement]:
    """Creates a vision transformer on a published DenseNet, and compares the two's features.

    Args:
        checkpoint: The DenseNet, which also determines the flavor.
        name: A name of :func:`~bcosvit.list_models`.
        images: RGB in [0, 1], [n, 3, h, w], on which the features are compared.
        options: Fields of the config that are to have other values.

    Returns:
        The model, whose layers behind the tokenizer are untrained, and the comparison.

    Raises:
        ValueError: The checkpoint is no B-cos DenseNet, or the model is no B-cos ViT.
    """
    state = published_state(checkpoint)
    flavor = flavor_of(state, str(checkpoint))
    config = model_config(name, **{"backbone": flavor, **options})
    if not isinstance(config, ModelConfig) or config.family != "bcos":
        raise ValueError(f"{name} is no B-cos ViT; choose one of the names bcos_vit_*.")
    if not isinstance(config.backbone, DenseNetConfig) or config.backbone.flavor != flavor:
        raise ValueError(
            f"{checkpoint} is of flavor {flavor}, which the given backbone is not; leave it out."
        )
    model = create_model(config)
    assert isinstance(model, VisionTransformer)
    unused = load_backbone(model, checkpoint)
    ours = copy.deepcopy(model).double().eval()
    state = {k: t.double() if t.is_floating_point() else t for k, t in state.items()}
    encoded = ours.encoding(images.double())
    theirs = published_features(state, encoded, config.block, flavor)
    with torch.no_grad():
        found = ours.tokenizer.backbone(encoded)
    return model.eval(), Agreement(
        flavor=flavor,
        block=config.block,
        error=((found - theirs).norm() / theirs.norm()).item(),
        unused=len(unused),
    )


def flavor_of(state: Mapping[str, Tensor], source: str = "state") -> Flavor:
    """v1 has no norms; v2 has, and takes six channels like v1."""
    first = state.get("features.conv0.weight")
    if first is None:
        raise ValueError(f"{source} holds no DenseNet: it has no features.conv0.")
    if first.shape[1] != 6:
        raise ValueError(
            f"{source} takes {first.shape[1]} channels, so it is no B-cos DenseNet, which takes "
            f"6; use it with a conventional vit_* and bcosvit.load_backbone."
        )
    return "v2" if "features.norm0.weight" in state else "v1"


def published_features(
    state: Mapping[str, Tensor], encoded: Tensor, tap: int, flavor: Flavor
) -> Tensor:
    """The features behind dense block ``tap`` from the checkpoint's tensors, without any layer."""

    def conv(x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        weight = state[f"features.{name}.weight"]
        unit = weight / weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        linear = F.conv2d(x, unit, stride=stride, padding=padding)
        squares = F.conv2d(x.square(), torch.ones_like(weight[:1]), stride=stride, padding=padding)
        scale = 1.0
        if flavor == "v1":
            linear = torch.maximum(linear[:, 0::2], linear[:, 1::2])
            scale = 100 / weight[0].numel() ** 0.5
        return scale * linear * linear.abs() / (squares + 1e-6).sqrt()

    def norm(x: Tensor, name: str) -> Tensor:
        if flavor == "v1":
            return x
        variance, weight = (state[f"features.{name}.{key}"] for key in ("running_var", "weight"))
        return x * (weight / (variance + 1e-5).sqrt()).view(-1, 1, 1)

    with torch.no_grad():
        x = norm(conv(encoded, "conv0", 2, 3), "norm0")
        x = F.avg_pool2d(x, 3, 2, 1)
        for block, count in enumerate(_layers(state)[:tap], start=1):
            for layer in range(1, count + 1):
                here = f"denseblock{block}.denselayer{layer}"
                inner = conv(norm(x, f"{here}.norm1"), f"{here}.conv1")
                inner = conv(norm(inner, f"{here}.norm2"), f"{here}.conv2", padding=1)
                x = torch.cat([x, inner], 1)
            if block < tap:
                x = conv(norm(x, f"transition{block}.norm"), f"transition{block}.conv")
                x = F.avg_pool2d(x, 2)
    return x


def _layers(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Layers per dense block."""
    names = {tuple(key.split(".")[1:3]) for key in state if ".denselayer" in key}
    blocks = sorted({block for block, _ in names})
    return tuple(sum(block == each for each, _ in names) for block in blocks)


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}

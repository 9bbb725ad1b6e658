"""From a published B-cos DenseNet to a transformer's tokenizer, and the proof that it arrived.

A backbone that loads without complaint may still compute something else. So its features are held
against the same network computed another way, in float64: by the authors' own package where it
covers the flavor and is installed (PyPI's ``bcos``, v2), else by the plain reading of the
equations below, which shares no layer with this library.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.models.catalog import create_model, model_config
from bcosvit.models.config import DenseNetConfig, Flavor, ModelConfig
from bcosvit.models.vit import VisionTransformer
from bcosvit.models.weights import load_backbone, our_name, published_state

PEER = "bcos"
"""The authors' package, v2 alone."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Our backbone's features beside the published network's."""

    flavor: Flavor
    compared_with: str
    """In words: who computed the published network's features."""
    block: int
    """The dense block behind which they were compared."""
    error: float
    """The norm of the difference, relative to the features' norm, in float64."""
    unused: int
    """Tensors of the checkpoint behind the tap, which a tokenizer has no place for."""


def bcosify(
    checkpoint: str | Path, name: str, images: Tensor, **options: Any
) -> tuple[VisionTransformer, Agreement]:
    """The model ``name`` with the checkpoint's backbone, compared on ``images`` in [0, 1].

    The flavor is read off the checkpoint; everything behind the tokenizer is as at the start of
    training.
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
    if flavor == "v2" and find_spec(PEER) is not None:
        theirs, who = peer_features(state, encoded, config.tap), f"PyPI's {PEER} {version(PEER)}"
    else:
        theirs = published_features(state, encoded, config.tap, flavor)
        who = f"the equations of {flavor}, written out anew (not the authors' code)"
    with torch.no_grad():
        found = ours.tokenizer.backbone(encoded)
    return model.eval(), Agreement(
        flavor=flavor,
        compared_with=who,
        block=config.tap,
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


def peer_features(state: Mapping[str, Tensor], encoded: Tensor, tap: int) -> Tensor:
    """The features behind dense block ``tap`` by the authors' package."""
    # It imports torchvision unguarded, which goes through our door first.
    from bcosvit._torchvision import torchvision  # noqa: F401, I001
    from bcos.models.densenet import BcosDenseNet
    from bcos.modules import norms

    layers = _layers(state)
    growth = state["features.denseblock1.denselayer1.conv2.weight"].shape[0]
    peer = BcosDenseNet(
        growth_rate=growth,
        block_config=layers,
        num_init_features=state["features.conv0.weight"].shape[0],
        bn_size=state["features.denseblock1.denselayer1.conv1.weight"].shape[0] // growth,
        norm_layer=norms.NoBias(norms.BatchNormUncentered2d),
    )
    own = {key: state[our_name(key)] for key in peer.features.state_dict(prefix="features.")}
    peer.double().load_state_dict(own, strict=False)
    x = encoded
    with torch.no_grad():
        for name, part in peer.eval().features.named_children():
            x = part(x)
            if name == f"denseblock{tap}":
                break
    return x


def published_features(
    state: Mapping[str, Tensor], encoded: Tensor, tap: int, flavor: Flavor
) -> Tensor:
    """The same from the equations: no layers, only the checkpoint's tensors by their names."""

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

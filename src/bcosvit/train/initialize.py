"""Where a run's weights come from when not from chance."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bcosvit.models.base import Classifier
from bcosvit.models.config import Config, DenseNetConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.hub import locate
from bcosvit.models.published import load_backbone
from bcosvit.models.vit import VisionTransformer
from bcosvit.models.weights import load_state, read_config


def config_in(path: str | Path) -> Config | None:
    """The config of the model in a weights file of ours; ``None`` for other files."""
    path = locate(path)
    return read_config(path) if path.suffix == ".safetensors" else None


def initialize(model: Classifier[Any], path: str | Path) -> str:
    """Fills ``model`` from a weights file, and returns what was done, for people to read.

    A file of our own of the same kind of model fills everything, the head only where the classes
    are as many. A DenseNet, of our own or published, fills a transformer's backbone.
    """
    found = config_in(path)
    is_densenet = found is None or isinstance(found, DenseNetConfig)
    if is_densenet and isinstance(model, VisionTransformer):
        load_backbone(model, path)
        return f"The backbone starts from {path}."
    if found is None and isinstance(model, DenseNet):
        load_backbone(model, path)
        return f"The model starts from {path}."
    if is_densenet != isinstance(model, DenseNet):
        raise ValueError(
            f"{path} holds a whole vision transformer, but a DenseNet is to be trained; "
            f"give weights of a DenseNet."
        )
    state: dict[str, Tensor] = {
        k: t.float() if t.is_floating_point() else t for k, t in load_file(locate(path)).items()
    }
    assert found is not None
    if found.num_classes == model.config.num_classes:
        load_state(model, state, source=str(path))
        return f"The model starts from {path}."
    head = "classifier." if isinstance(model, DenseNet) else "head."
    fresh = {k: t for k, t in model.state_dict().items() if k.startswith(head)}
    kept = {k: t for k, t in state.items() if not k.startswith(head)}
    load_state(model, {**kept, **fresh}, source=str(path))
    return (
        f"The model starts from {path}, which knows {found.num_classes} classes; its head is "
        f"replaced by a new one for {model.config.num_classes}."
    )

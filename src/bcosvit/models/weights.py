"""Weights in files: safetensors that carry the model's config, and the authors' checkpoints.

Where a file is named, it may also be one that is shipped, on the web or on the Hugging Face hub
(``pretrained.locate``). Nothing is ever unpickled: safetensors hold tensors alone, and
checkpoints of torch's own format are read with ``weights_only``.
"""

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bcosvit.files import atomic
from bcosvit.models.base import AnyModel
from bcosvit.models.catalog import create_model
from bcosvit.models.config import Config, from_dict, to_dict
from bcosvit.models.densenet import DenseNet
from bcosvit.models.pretrained import locate
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.views import unwrapped

CONFIG_KEY = "bcosvit.config"


def save(
    model: AnyModel,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes weights and config to one safetensors file, atomically.

    ``dtype`` stores floating-point weights narrower (``torch.float16`` halves the file);
    ``metadata`` goes along (class names, recipe, ...).
    """
    model = unwrapped(model)
    save_state(model.state_dict(), model.config, path, dtype=dtype, metadata=metadata)


def save_state(
    state: Mapping[str, Tensor],
    config: Config,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """What ``save`` writes, from a model's state dict and config without the model."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    if dtype is not None:
        state = {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
    notes = {**(metadata or {}), CONFIG_KEY: json.dumps(to_dict(config))}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata=notes)


def load(where: str | Path) -> AnyModel:
    """The model in a file that ``save`` wrote, in float32 and evaluation mode.

    ``where`` is a shipped model's name, a path, ``https://ADDRESS#sha256=SUM`` or
    ``hf://OWNER/REPOSITORY[@REVISION][/FILE]``.
    """
    path = locate(where)
    config = read_config(path)
    if config is None:
        raise ValueError(
            f"{path} holds no model config, so it is not a bcosvit weights file; "
            f"load the authors' backbones with load_backbone(model, path)."
        )
    model = create_model(config)
    state = {
        # Version 0.1 spelled it in the British way.
        re.sub(r"^tokeniser\.", "tokenizer.", key): t.float() if t.is_floating_point() else t
        for key, t in load_file(path).items()
    }
    load_state(model, state, source=str(path))
    return model.eval()


def read_config(where: str | Path) -> Config | None:
    """The config of the model in a file that ``save`` wrote; ``None`` for other safetensors."""
    path = locate(where)
    notes = read_metadata(path)
    if CONFIG_KEY not in notes:
        return None
    try:
        return from_dict(json.loads(notes[CONFIG_KEY]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds a model config that cannot be read ({error}); it may be of a later "
            f"version: update bcosvit, or give other weights."
        ) from error


def read_metadata(where: str | Path) -> dict[str, str]:
    """What was written beside the weights: config, class names, recipe."""
    path = locate(where)
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); give weights that bcosvit saved."
        ) from error


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "state") -> None:
    """``load_state_dict`` that either loads all or changes nothing, and says what does not fit."""
    own = model.state_dict()
    # Old checkpoints lack the counter, which evaluation never reads.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    wrong = [
        f"{key} ({list(state[key].shape)} instead of {list(own[key].shape)})"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong}
    if problems := [f"{kind}: {_some(keys)}" for kind, keys in kinds.items() if keys]:
        raise ValueError(
            f"{source} does not fit the model; {'; '.join(problems)}: give weights of a model with "
            f"the same config."
        )
    model.load_state_dict({**own, **state})


def load_backbone(model: VisionTransformer | DenseNet, path: str | Path) -> list[str]:
    """Fills the DenseNet of ``model`` with a published state dict of the same flavor.

    Takes the authors' v1 and v2 B-cos DenseNets, torchvision's, and files of our own ``save``, by
    their own key names. Returns the keys that the model has no place for: a tokenizer ends at its
    tap, so the layers behind it and the classifier are left out.
    """
    state = published_state(path)
    backbone = model.tokenizer.backbone if isinstance(model, VisionTransformer) else model.features
    features, head = _below(state, "features."), _below(state, "classifier.")
    if not features:
        raise ValueError(
            f"{path} holds no DenseNet: no key begins with 'features.'; "
            f"it has {_some(list(state))}."
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


def published_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict of torch's or safetensors' format, stripped of wrappers around the model."""
    path = locate(path)
    if path.suffix == ".safetensors":
        state: Any = load_file(path)
    else:
        try:
            with warnings.catch_warnings():
                # What an old pickle protocol may lead to is the error below, or nothing.
                warnings.filterwarnings("ignore", "Detected pickle protocol")
                state = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError) as error:
            raise ValueError(
                f"{path} is not a plain state dict of tensors, and anything else is never "
                f"unpickled ({str(error).splitlines()[0]})."
            ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{path} is not a state dict: expected names and tensors.")
    return {our_name(key): tensor for key, tensor in state.items()}


def our_name(key: str) -> str:
    """What a published state dict's key is called here."""
    # v1 puts the network first in a Sequential; data-parallel and Lightning add prefixes too.
    key = re.sub(r"^(?:module\.|model\.|0\.)+", "", key)
    # Old torchvision files write denselayer1.norm.1 for denselayer1.norm1.
    key = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key)
    # The authors wrap each B-cos kernel in a module called `linear`.
    return re.sub(r"\.linear\.weight$", ".weight", key)


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}


def _some(items: list[str], most: int = 5) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more

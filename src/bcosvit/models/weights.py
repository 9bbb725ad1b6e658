"""State dicts in files: safetensors that carry the model's config, and published checkpoints.

Where a file is named, it may also be one that is shipped, on the web or on the Hugging Face hub
(``hub.locate``). Nothing is ever unpickled: safetensors hold tensors alone, and checkpoints in
PyTorch's own format are read with ``weights_only``.
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
from bcosvit.messages import and_more
from bcosvit.models.config import Config
from bcosvit.models.hub import is_file, locate
from bcosvit.models.registry import from_dict, to_dict

CONFIG_KEY = "bcosvit.config"
"""The metadata key of the model's config, as JSON."""
CLASSES_KEY = "bcosvit.classes"
"""The metadata key of the class names, a JSON list."""
IDS_KEY = "bcosvit.class_ids"
"""The metadata key of short names of the classes, such as WordNet IDs, a JSON list."""
RUN_KEY = "bcosvit.run"
"""The metadata key of what training says about itself, as JSON."""


def save_state(
    state: Mapping[str, Tensor],
    config: Config,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what ``bcosvit.save`` writes, from a state dict and a config without the model."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    if dtype is not None:
        state = {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
    notes = {**(metadata or {}), CONFIG_KEY: json.dumps(to_dict(config))}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata=notes)


def read_weights(where: str | Path) -> tuple[Config, dict[str, Tensor]]:
    """The config and the state dict, in float32, in a file that ``bcosvit.save`` wrote."""
    path = locate(where)
    config = read_config(path)
    if config is None:
        raise ValueError(
            f"{path} holds no model config, so it is not a bcosvit weights file; "
            f"load the authors' backbones with load_backbone(model, path)."
        )
    state = load_file(path)
    return config, {k: t.float() if t.is_floating_point() else t for k, t in state.items()}


def read_config(where: str | Path) -> Config | None:
    """The config in a file that ``bcosvit.save`` wrote; ``None`` for other safetensors."""
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


def with_backbone(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model, where a ``backbone`` that is a weights file is replaced by its config."""
    if not is_file(options.get("backbone")):
        return dict(options)
    return {**options, "backbone": read_config(options["backbone"])}


def read_metadata(where: str | Path) -> dict[str, str]:
    """What was written beside the weights: config, class names, the run."""
    path = locate(where)
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); give weights that bcosvit saved."
        ) from error


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "state") -> None:
    """Loads a state dict completely or not at all, and says what does not fit.

    Args:
        model: The model to fill.
        state: Its state dict; keys may have the names of :func:`current_key`.
        source: Where the state dict comes from, for the error message.

    Raises:
        ValueError: Keys are missing, unexpected or of the wrong shape.
    """
    own = model.state_dict()
    state = {key if key in own else current_key(key): tensor for key, tensor in state.items()}
    # Old checkpoints lack the counter, which evaluation never reads.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    wrong = [
        f"{key} ({list(state[key].shape)} instead of {list(own[key].shape)})"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong}
    if problems := [f"{kind}: {and_more(keys)}" for kind, keys in kinds.items() if keys]:
        raise ValueError(
            f"{source} does not fit the model; {'; '.join(problems)}: give weights of a model with "
            f"the same config."
        )
    model.load_state_dict({**own, **state})


def published_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict of PyTorch's or safetensors' format with current keys, without any wrapper."""
    return {current_key(key): tensor for key, tensor in plain_state(path).items()}


def plain_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict of PyTorch's or safetensors' format with its own keys, without any wrapper."""
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
    return state


def current_key(key: str) -> str:
    """What a key of version 0.1, or of a published state dict, is called here.

    Examples:
        >>> current_key("0.features.denseblock1.denselayer2.conv1.linear.weight")
        'features.denseblock1.denselayer2.conv1.weight'
    """
    # v1 puts the network first in a Sequential; data-parallel and Lightning add prefixes too.
    key = re.sub(r"^(?:module\.|model\.|0\.)+", "", key)
    # Version 0.1 spelled it in the British way.
    key = re.sub(r"^tokeniser\.", "tokenizer.", key)
    # Old torchvision files write denselayer1.norm.1 for denselayer1.norm1.
    key = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key)
    # The authors wrap each B-cos kernel in a module called `linear`.
    return re.sub(r"\.linear\.weight$", ".weight", key)

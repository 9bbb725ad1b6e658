"""Models of other libraries by name: what `bcosvit bcosify` converts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bcosvit._torchvision import torchvision
from bcosvit.messages import require, unknown
from bcosvit.models.base import load
from bcosvit.models.bcosify import IMAGENET_MEAN, IMAGENET_STD
from bcosvit.models.weights import check_finite, plain_state, read_config

LIBRARIES = ("timm", "torchvision")
PRETRAINED = "pretrained"
"""In place of a weights file: what the library itself downloads."""


@dataclass(frozen=True, kw_only=True)
class Original:
    """A model with what it expects of images."""

    model: nn.Module
    """In evaluation mode."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    image_size: int = 224


def load_original(
    name: str, weights: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> Original:
    """Creates a model of timm or torchvision, or loads a conventional model of this library.

    Args:
        name: ``timm:NAME``, ``torchvision:NAME``, or a weights file that `bcosvit.save` wrote.
        weights: The model's state dict, in PyTorch's or safetensors' format, or ``"pretrained"``
            for the weights that the library downloads. Not for a weights file of this library.
        options: Arguments of the model's constructor, e.g. ``num_classes``.

    Raises:
        ValueError: The library is not installed, has no such model, or the weights do not fit.
    """
    library, _, model_name = name.partition(":")
    if library not in LIBRARIES or not model_name:
        return _of_this_library(name, weights)
    if weights is None:
        raise ValueError(
            f"There are no weights for {name}, which would stay random: give --weights FILE, or "
            f"--weights {PRETRAINED} to let {library} download them."
        )
    download = weights == PRETRAINED
    make = _timm if library == "timm" else _torchvision
    original = make(model_name, download, dict(options or {}))
    if not download:
        _fill(original.model, weights, name)
    original.model.eval()
    return original


def _timm(name: str, download: bool, options: dict[str, Any]) -> Original:
    timm = require("timm", extra="timm", purpose=f"timm:{name}")
    if not timm.is_model(name):
        raise ValueError(unknown("model of timm", name, timm.list_models()))
    model = _made(name, lambda: timm.create_model(name, pretrained=download, **options))
    expected: dict[str, Any] = dict(getattr(model, "pretrained_cfg", {}))
    return Original(
        model=model,
        mean=tuple(expected.get("mean", IMAGENET_MEAN)),
        std=tuple(expected.get("std", IMAGENET_STD)),
        image_size=options.get("img_size", expected.get("input_size", (3, 224, 224))[-1]),
    )


def _torchvision(name: str, download: bool, options: dict[str, Any]) -> Original:
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise ValueError(unknown("model of torchvision", name, names))
    if download:
        options["weights"] = "DEFAULT"
    size = options.get("image_size", 224)
    return Original(
        model=_made(name, lambda: torchvision.models.get_model(name, **options)), image_size=size
    )


def _made(name: str, make: Any) -> nn.Module:
    try:
        made = make()
    except (TypeError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{name} cannot be created ({reason}); check its options and weights."
        ) from error
    assert isinstance(made, nn.Module)
    return made


def _fill(model: nn.Module, weights: str | Path, name: str) -> None:
    state = {key.removeprefix("module."): tensor for key, tensor in plain_state(weights).items()}
    check_finite(state, str(weights))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).splitlines()
        reason = " ".join(lines[1].split()).rstrip(".") if len(lines) > 1 else lines[0]
        reason = reason if len(reason) < 200 else f"{reason[:200]} …"
        raise ValueError(
            f"{weights} holds no weights of {name}: {reason}; check the name, and the number of "
            f"classes (--set num_classes=10)."
        ) from error


def _of_this_library(name: str, weights: str | Path | None) -> Original:
    if weights is not None:
        libraries = ", ".join(f"{each}:NAME" for each in LIBRARIES)
        raise ValueError(f"{name} does not say which model --weights is for: give {libraries}.")
    config = read_config(name) if Path(name).suffix == ".safetensors" else None
    if config is None:
        raise ValueError(
            f"{name} holds tensors without a model: name the model that they belong to, "
            f"torchvision:NAME --weights {name} or timm:NAME --weights {name}."
        )
    if config.family == "bcos":
        raise ValueError(
            f"{name} holds a {config.noun}, which explains itself already; there is nothing to "
            f"convert."
        )
    with torch.no_grad():
        model = load(name)
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return Original(model=model, mean=zero, std=one, image_size=config.image_size[0])

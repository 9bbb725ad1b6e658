"""Names and configs of models.

A name is made of axes, ``{family}_{size}_{depth of the tokenizer}``, and parsed, not looked up in
a list of functions: ``bcos_vit_ti_38``, ``vit_b_87``; stand-alone backbones are
``bcos_densenet121`` and ``densenet121``.
"""

import dataclasses
import difflib
from itertools import product
from typing import Any

from bcosvit.models.base import AnyModel
from bcosvit.models.config import Config, DenseNetConfig, ModelConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.vit import VisionTransformer

FAMILIES = {"bcos_vit": "bcos", "vit": "conventional"}
SIZES = {
    "ti": {"width": 192, "num_heads": 3},
    "s": {"width": 384, "num_heads": 6},
    "b": {"width": 768, "num_heads": 12},
}
TAPS = {"13": 1, "38": 2, "87": 3}
BACKBONES = {"bcos_densenet121": "v1", "densenet121": "conventional"}


def list_models() -> list[str]:
    """Every name that ``create_model`` knows."""
    vits = ["_".join(axes) for axes in product(FAMILIES, SIZES, TAPS)]
    return vits + list(BACKBONES)


def model_config(name: str, **options: Any) -> Config:
    """The config behind a name; ``options`` override its fields.

    ``backbone`` may be a flavor ("v1", "v2") instead of a config.
    """
    if name not in list_models():
        meant = name.lower().replace("-", "_")
        close = difflib.get_close_matches(meant, list_models(), n=3, cutoff=0.8)
        near = [meant] if meant in close else close
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"choose from {', '.join(list_models())}."
        )
        raise ValueError(f"There is no model {name!r}; {hint}")
    cls: type[Config] = DenseNetConfig if name in BACKBONES else ModelConfig
    fields: dict[str, Any]
    if name in BACKBONES:
        fields = {"flavor": BACKBONES[name]}
    else:
        family, size, tap = name.rsplit("_", 2)
        fields = {"family": FAMILIES[family], **SIZES[size], "tap": TAPS[tap]}
        if isinstance(options.get("backbone"), str):
            options["backbone"] = DenseNetConfig(flavor=options["backbone"])
    allowed = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(allowed)}.")
    return cls(**{**fields, **options})


def create_model(model: str | Config, **options: Any) -> AnyModel:
    """A freshly initialized model from a name and options, or from a config."""
    if isinstance(model, str):
        config = model_config(model, **options)
    else:
        config = dataclasses.replace(model, **options)
    return DenseNet(config) if isinstance(config, DenseNetConfig) else VisionTransformer(config)

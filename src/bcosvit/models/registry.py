"""Kinds of models and the names of their variants.

A kind is registered with its config by one decorator, which another package can use as well (see
``bcosvit.registry`` for how its module is found):

    @register_model("mine", MyConfig, variants={"my_net_s": {"width": 64}})
    class MyNet(Classifier[MyConfig]): ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import nn

from bcosvit.messages import unknown
from bcosvit.models.config import Config
from bcosvit.registry import Registry
from bcosvit.shipped import shipped

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """What the registry knows about a kind of model."""

    model: type[nn.Module]
    """The class, whose only argument is a config."""
    config: type[Config]
    variants: Mapping[str, Mapping[str, Any]]
    """Names for ``create_model``, with the fields of the config that each sets."""


KINDS = Registry[ModelKind](kind="kind of model", group="bcosvit.models")


def register_model(
    kind: str,
    config: type[Config],
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[type[M]], type[M]]:
    """Returns a class decorator that makes a kind of model known to bcosvit.

    Args:
        kind: The kind's name, which is written into weights files.
        config: The class of its configs.
        variants: Names for ``create_model``, with the fields of the config that each sets. A name
            that another kind has already goes on meaning that one.

    Returns:
        The decorator, which returns the class as it is. The class is a
        :class:`~bcosvit.models.Classifier` whose only argument is a config.

    Raises:
        ValueError: The kind exists already.
    """

    def decorate(model: type[M]) -> type[M]:
        entry = ModelKind(model=model, config=config, variants=dict(variants or {}))
        KINDS.register(kind, origin=model)(entry)
        return model

    return decorate


def kind_of(config: Config) -> str:
    """The name of the kind of model that ``config`` describes."""
    for name, kind in KINDS.items():
        if kind.config is type(config):
            return name
    raise ValueError(
        f"{type(config).__name__} is the config of no registered kind of model; register one with "
        f"bcosvit.models.register_model."
    )


def list_models(filter: str = "*", *, pretrained: bool = False) -> list[str]:
    """Lists the names that :func:`~bcosvit.create_model` knows.

    The paper's models are named by their axes, ``{family}_{size}_{depth of the tokenizer}``.

    Args:
        filter: A pattern such as ``"*_ti_*"``.
        pretrained: Whether only models whose weights come with the package are listed.

    Returns:
        The names of all variants of all kinds, or those of the shipped models.

    Examples:
        >>> list_models("vit_ti*")
        ['vit_ti_13', 'vit_ti_38', 'vit_ti_87']
        >>> list_models("*_vit_ti*", pretrained=True)
        ['bcos_vit_ti_87_imagenette']
    """
    if pretrained:
        names = list(shipped())
    else:
        names = [name for _, kind in KINDS.items() for name in kind.variants]
    return [name for name in names if fnmatch(name, filter)]


def needs_backbone(name: str) -> bool:
    """Whether models of this name are made of another one, which has to be given."""
    variants = [kind.variants[name] for _, kind in KINDS.items() if name in kind.variants]
    return any(variant.get("keep_head", False) for variant in variants)


def model_config(name: str, **options: Any) -> Config:
    """Looks up the config behind a name.

    Args:
        name: One of :func:`list_models`.
        options: Fields of the config that are to have other values.

    Returns:
        The config.

    Raises:
        ValueError: There is no such name or option, or a value is not allowed.

    Examples:
        >>> model_config("bcos_vit_s_38", num_classes=10).describe()
        'B-cos vision transformer, 10 classes, 224×224 pixels'
    """
    for _, kind in KINDS.items():
        if name in kind.variants:
            kind.config.check_fields(options, name)
            return kind.config.of(**{**kind.variants[name], **options})
    raise ValueError(unknown("model", name, [*list_models(), *shipped()]))


def to_dict(config: Config) -> dict[str, Any]:
    """Writes a config as plain values for JSON or YAML; :func:`from_dict` reads them.

    Examples:
        >>> to_dict(model_config("densenet121"))["kind"]
        'densenet'
    """
    return {"kind": kind_of(config), **config.values()}


def from_dict(values: Mapping[str, Any]) -> Config:
    """Reads the config that :func:`to_dict` wrote, also in version 0.1.

    Raises:
        ValueError: The kind is not registered, or a value is not allowed.
        KeyError: A part is missing.
        TypeError: There are fields that the kind does not have.

    Examples:
        >>> from_dict(to_dict(model_config("densenet121"))) == model_config("densenet121")
        True
    """
    rest = dict(values)
    return KINDS.get(rest.pop("kind")).config.from_values(rest)

"""Lists of names for help texts and for completion in the shell, from the registries.

Registries are read only when a help text is shown or a word is completed, since importing them
takes seconds. A help text contains ``{methods}`` where the names of all methods belong.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand


def _methods() -> Sequence[str]:
    from bcosvit.attribution import METHODS

    return METHODS.names()


def _metrics() -> Sequence[str]:
    from bcosvit.metrics import METRICS

    return METRICS.names()


def _models() -> Sequence[str]:
    from bcosvit.models import list_models

    return list_models()


def _weights() -> Sequence[str]:
    from bcosvit.models.hub import shipped

    return shipped()


def _recipes() -> Sequence[str]:
    from bcosvit.train import RECIPES

    return list(RECIPES)


def _figures() -> Sequence[str]:
    from bcosvit.paper import FIGURES

    return list(FIGURES)


def _data() -> Sequence[str]:
    from bcosvit.data.dataset import SOURCES

    return [kind.syntax for _, kind in SOURCES.items()]


NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "methods": _methods,
    "metrics": _metrics,
    "models": _models,
    "weights": _weights,
    "recipes": _recipes,
    "figures": _figures,
    "data": _data,
}
"""What can be listed, and the function that does so."""


def list_names(kind: str) -> list[str]:
    """Lists what is registered.

    Args:
        kind: A key of `NAMES`.

    Returns:
        The names; none if an optional library that they need is not installed.
    """
    try:
        return list(NAMES[kind]())
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("bcosvit"):
            raise
        return []


def complete(kind: str, *, several: bool = False) -> Callable[[str], list[str]]:
    """Returns a function that completes names in the shell.

    Args:
        kind: A key of `NAMES`.
        several: Whether names are separated by commas; "all" is then offered, too.
    """

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        names = list_names(kind)
        if several and not comma:
            names.append("all")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return completed


class ListingCommand(TyperCommand):
    """A command whose help texts list what is registered."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # The texts are templates again afterwards: something may be registered in the meantime.
        before = [(parameter, getattr(parameter, "help", None)) for parameter in self.params]
        try:
            for parameter, text in before:
                parameter.help = _listed(text)  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            for parameter, text in before:
                parameter.help = text  # type: ignore[attr-defined]


def _listed(text: str | None) -> str:
    """A help text with the names that are registered now."""
    text = text or ""
    for kind in NAMES:
        if f"{{{kind}}}" in text:
            names = list_names(kind) or ["those that `bcosvit info` lists"]
            text = text.replace(f"{{{kind}}}", escape(", ".join(names)))
    return text

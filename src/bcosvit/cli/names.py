"""Lists of names for help texts and for completion in the shell, from the registries.

A help text contains ``{methods}`` where the names of all methods belong. Importing a registry takes
seconds, so that the names of what comes with the package are read from ``names.json``, which
``python -m bcosvit.cli.names`` writes and a test compares with the registries. The registry itself
is read where it is in memory already, or where another installed package adds to it.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

from bcosvit.shipped import shipped

TABLE = Path(__file__).with_suffix(".json")
"""The names of all that comes with the package, by kind."""


@dataclass(frozen=True)
class Listing:
    """Where the names of one kind come from."""

    module: str
    """The module that fills the registry when it is imported."""
    group: str
    """The entry points by which other packages add to it."""
    read: Callable[[Any], Sequence[str]]
    """Reads the names from the module."""


REGISTRIES = {
    "methods": Listing(
        "bcosvit.attribution", "bcosvit.explainers", lambda module: module.METHODS.names()
    ),
    "metrics": Listing("bcosvit.metrics", "bcosvit.metrics", lambda module: module.METRICS.names()),
    "models": Listing("bcosvit.models", "bcosvit.models", lambda module: module.list_models()),
    "recipes": Listing("bcosvit.train", "bcosvit.recipes", lambda module: module.RECIPES.names()),
    "figures": Listing("bcosvit.paper", "bcosvit.figures", lambda module: module.FIGURES.names()),
    "data": Listing(
        "bcosvit.data.sources",
        "bcosvit.sources",
        lambda module: [kind.syntax for _, kind in module.SOURCES.items()],
    ),
    "data-keys": Listing("bcosvit.data.sources", "bcosvit.sources", lambda module: _keys(module)),
}


def _keys(module: Any) -> list[str]:
    """What names of data begin with, where they are no paths: ``scenes``, ``hf:``."""
    kinds = [(name, kind.syntax) for name, kind in module.SOURCES.items()]
    return [
        f"{name}:" if syntax.startswith(f"{name}:") else name
        for name, syntax in kinds
        if syntax.startswith((f"{name}:", f"{name}["))
    ]


def registered(kind: str) -> list[str]:
    """Reads names from a registry, which may take seconds to import.

    Args:
        kind: A key of `REGISTRIES`.

    Returns:
        The names; none if an optional library that they need is not installed.
    """
    listing = REGISTRIES[kind]
    try:
        return list(listing.read(import_module(listing.module)))
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("bcosvit"):
            raise
        return []


def list_names(kind: str) -> list[str]:
    """Lists what is registered, or shipped.

    Args:
        kind: A key of `REGISTRIES`, or "weights".

    Returns:
        The names.
    """
    if kind == "weights":
        return list(shipped())
    listing = REGISTRIES[kind]
    if listing.module in sys.modules or listing.group in _extended():
        return registered(kind)
    return list(json.loads(TABLE.read_text("utf-8"))[kind])


@cache
def _extended() -> frozenset[str]:
    """The groups of entry points that an installed package has; looked for once."""
    return frozenset(entry_points().groups)


KINDS = (*REGISTRIES, "weights")
"""What can be listed."""


def complete(*kinds: str, several: bool = False) -> Callable[[str], list[str]]:
    """Returns a function that completes names in the shell.

    Args:
        kinds: Some of `KINDS`.
        several: Whether names are separated by commas; "all" is then offered, too.
    """

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        names = [name for kind in kinds for name in list_names(kind)]
        if several and not comma:
            names.append("all")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return completed


class ListingCommand(TyperCommand):
    """A command whose help texts list what is registered, and leave them room: no column says
    <str> or <bool>."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # The texts are templates again afterwards: something may be registered in the meantime.
        parameters = self.get_params(ctx)
        before = [(parameter, getattr(parameter, "help", None)) for parameter in parameters]
        try:
            for parameter, text in before:
                parameter.help = _listed(text)  # type: ignore[attr-defined]
                if parameter.metavar is None or parameter.param_type_name == "argument":
                    parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            for parameter, text in before:
                parameter.help = text  # type: ignore[attr-defined]


def _listed(text: str | None) -> str:
    """A help text with the names that are registered now."""
    text = text or ""
    for kind in KINDS:
        if f"{{{kind}}}" in text:
            names = list_names(kind) or ["those that `bcosvit info` lists"]
            # Narrow terminals would cut a word that is longer than their lines.
            shown = ", ".join(names).replace("[?", " [?")
            text = text.replace(f"{{{kind}}}", escape(shown))
    return text


if __name__ == "__main__":
    found = {kind: registered(kind) for kind in REGISTRIES}
    TABLE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")

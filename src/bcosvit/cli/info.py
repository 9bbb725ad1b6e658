"""`bcosvit info`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.names import complete, list_names
from bcosvit.messages import require


def info(
    name: Annotated[
        str,
        typer.Argument(
            help="A model's name, or a weights file as other commands take it; without it, "
            "everything that has a name is listed.",
            autocompletion=complete("models", "weights"),
        ),
    ] = "all",
    batch_size: Annotated[int, typer.Option(min=1, help="Images in the batch for memory.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the model, e.g. maxout=1."),
    ] = None,
) -> None:
    """Prints layers, parameters, FLOPs, token grid and memory of a model, or lists all names.

    Examples:

    bcosvit info

    bcosvit info bcos_vit_b_38 --batch-size 256 --set position=add

    bcosvit info best.safetensors
    """
    from bcosvit.models.hub import is_file
    from bcosvit.models.summary import summarize
    from bcosvit.models.weights import named_config, read_config, with_backbone
    from bcosvit.report.tables import summary_table
    from bcosvit.settings import parse_settings

    if name == "all":
        _print_lists()
        return
    options = with_backbone(parse_settings(settings or []))
    if not is_file(name):
        config = named_config(name, **options)
    elif (stored := read_config(name)) is not None:
        config = stored.replace(**options)
    else:
        raise ValueError(f"{name} has no config, as files of bcosvit have; convert it by bcosify.")
    Console().print(summary_table(name, summarize(config, batch=batch_size)))


def _print_lists() -> None:
    from bcosvit.attribution import METHODS
    from bcosvit.data.sources import SOURCES
    from bcosvit.metrics import METRICS
    from bcosvit.report.tables import list_table

    costs = {"forward": "one forward pass", "gradient": "one backward pass", "many": "many passes"}
    lists: dict[str, list[tuple[str, ...]]] = {
        "models": [(model,) for model in list_names("models")],
        "shipped weights": [(weights,) for weights in list_names("weights")],
        "methods": [(key, each.title, costs[each.cost]) for key, each in METHODS.items()],
        "metrics": [(key, each.title) for key, each in METRICS.items()],
        "kinds of data": [(key, each.syntax) for key, each in SOURCES.items()],
        "recipes": _recipes(),
        "figures": [(figure,) for figure in list_names("figures")],
    }
    for title, rows in lists.items():
        if rows:
            Console().print(list_table(title, rows))


def _recipes() -> list[tuple[str, ...]]:
    """Names and summaries; none where training is not installed."""
    try:
        recipes = require("bcosvit.train", extra="train").RECIPES
    except ValueError:
        return []
    return [(name, recipe.summary) for name, recipe in recipes.items()]

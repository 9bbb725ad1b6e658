"""`bcosvit info`."""

from typing import Annotated

import typer
from rich.console import Console


def info(
    name: Annotated[str, typer.Argument(help="A model's name, e.g. bcos_vit_ti_38, or 'all'.")],
    batch: Annotated[int, typer.Option(min=1, help="Images in the batch for memory.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the model, e.g. maxout=1."),
    ] = None,
) -> None:
    """Layers, parameters, FLOPs, token grid and memory of a model.

    Example: bcosvit info bcos_vit_b_38 --batch 256 --set position=add
    """
    from bcosvit.models import list_models, model_config
    from bcosvit.models.summary import summarize
    from bcosvit.report.tables import list_table, summary_table
    from bcosvit.settings import parse_settings

    if name == "all":
        Console().print(list_table(list_models()))
        return
    config = model_config(name, **parse_settings(settings or []))
    Console().print(summary_table(name, summarize(config, batch=batch)))

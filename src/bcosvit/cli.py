"""The table of commands, nothing else; a command imports what it needs when it runs."""

from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Vision transformers that explain themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _root() -> None:
    """Vision transformers that explain themselves."""


@app.command()
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
    from bcosvit.models.summary import summarise
    from bcosvit.report.tables import list_table, summary_table
    from bcosvit.settings import parse_settings

    if name == "all":
        Console().print(list_table(list_models()))
        return
    config = model_config(name, **parse_settings(settings or []))
    Console().print(summary_table(name, summarise(config, batch=batch)))


def main() -> None:
    """Runs the command line; a ``ValueError`` is the user's to mend, so it is one red sentence."""
    try:
        app()
    except ValueError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False)
        raise SystemExit(2) from None

"""`bcosvit explain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bcosvit.cli.names import complete
from bcosvit.cli.options import Device, Weights
from bcosvit.messages import for_terminal, percent
from bcosvit.shipped import DEFAULT

if TYPE_CHECKING:
    from bcosvit.report.explain import Outcome


def explain(
    pictures: Annotated[
        list[str], typer.Argument(metavar="IMAGE|FOLDER", help="Picture files, or folders.")
    ],
    weights: Weights = DEFAULT,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes to explain, by name or number: cat,dog.", show_default="top 1"),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Explain the K most confident classes instead.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="all, or some of {methods}, separated by commas.",
            show_default="the first that applies to the model",
            autocompletion=complete("methods", several=True),
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="The HTML report.")] = "report.html",
    npz: Annotated[
        str | None, typer.Option(help="A folder for arrays, with one file per picture.")
    ] = None,
    png: Annotated[str | None, typer.Option(help="A folder for PNG files of each map.")] = None,
    json: Annotated[str | None, typer.Option(help="A file for predictions and sums.")] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="One scale per method for all classes of a picture.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop where contributions do not sum to the logit.")
    ] = False,
    device: Device = "auto",
    open_report: Annotated[
        bool, typer.Option("--open", help="Open the report in the browser.")
    ] = False,
) -> None:
    """Explains pictures: how much each pixel speaks for or against a class, as an HTML report.

    Examples:

    bcosvit explain photo.jpg --open

    bcosvit explain photos/ --weights best.safetensors --classes cat,dog
    --methods all --joint --out cats.html --npz arrays/
    """
    from bcosvit.report.explain import explain_pictures

    found = explain_pictures(
        pictures,
        weights,
        classes=classes,
        top=top,
        methods=methods,
        out=out,
        npz=npz,
        png=png,
        json=json,
        joint=joint,
        device=device,
        strict=strict,
        console=Console(stderr=True),
    )
    print_predictions(found)
    Console().print(found.summary(out), highlight=False, soft_wrap=True, markup=False)
    if open_report:
        typer.launch(Path(out).absolute().as_uri())


def print_predictions(found: "Outcome") -> None:
    """Prints the classes of the first pictures: five of a single one, else the first of each."""
    if not found.predictions:
        return
    single = len(found.predictions) == 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("" if single else "Picture", overflow="fold")
    table.add_column("Class", overflow="fold")
    table.add_column("Probability", justify="right")
    for prediction in found.predictions:
        for row, entry in enumerate(prediction.entries if single else prediction.entries[:1]):
            name = for_terminal(prediction.name) if row == 0 else ""
            table.add_row(escape(name), escape(entry["class"]), percent(entry["probability"]))
    console = Console()
    console.print(table, highlight=False)
    for prediction in found.predictions:
        if note := prediction.unlike_note:
            text = note if single else f"{for_terminal(prediction.name)}: {note}"
            console.print(text, style="yellow", highlight=False, soft_wrap=True, markup=False)
    if (more := found.explained - len(found.predictions)) > 0:
        console.print(f"and {more} more", highlight=False)
    if found.note:
        console.print(found.note, highlight=False, soft_wrap=True)

"""`bcosvit explain`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.names import complete
from bcosvit.shipped import DEFAULT

WEIGHTS = typer.Option(
    help="A shipped model ({weights}), a safetensors file, https://...#sha256=..., or "
    "hf://OWNER/REPO.",
    autocompletion=complete("weights"),
)
DEVICE = typer.Option(help="auto, cpu, cuda, ...")


def explain(
    pictures: Annotated[
        list[str], typer.Argument(metavar="IMAGE|FOLDER", help="Picture files, or folders.")
    ],
    weights: Annotated[str, WEIGHTS] = DEFAULT,
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
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Explains pictures: how much each pixel speaks for or against a class, as an HTML report.

    Examples:

    bcosvit explain photo.jpg

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
        console=Console(stderr=True),
    )
    Console().print(found.summary(out), highlight=False, soft_wrap=True, markup=False)

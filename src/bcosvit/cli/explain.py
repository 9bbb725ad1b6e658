"""`bcosvit explain`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.models.hub import DEFAULT

WEIGHTS = "A shipped model's name, a safetensors file, https://...#sha256=..., or hf://OWNER/REPO."


def explain(
    pictures: Annotated[
        list[str], typer.Argument(metavar="IMAGE|FOLDER", help="Picture files, or folders.")
    ],
    weights: Annotated[str, typer.Option(help=WEIGHTS)] = DEFAULT,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes to explain, by name or number: cat,dog.", show_default="top 1"),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Explain the K surest classes instead.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="all, or names with commas between them: inherent,rollout.",
            show_default="inherent; ixg for conventional models",
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="The HTML report.")] = "report.html",
    npz: Annotated[str | None, typer.Option(help="A folder for arrays, a file a picture.")] = None,
    png: Annotated[str | None, typer.Option(help="A folder for pictures of each map.")] = None,
    json: Annotated[str | None, typer.Option(help="A file for predictions and sums.")] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="One scale for all classes of a picture, by method.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Shows what speaks for and against a class, pixel by pixel, as an HTML report.

    Examples:

    bcosvit explain photo.jpg

    bcosvit explain photos/ --weights best.safetensors --classes cat,dog
    --methods all --joint --out cats.html --npz arrays/
    """
    from bcosvit.report.explain import explain_pictures

    console = Console(stderr=True)
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
        console=console,
    )
    Console().print(found.told(out), highlight=False, soft_wrap=True, markup=False)

"""`bcosvit export`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.options import Weights
from bcosvit.shipped import DEFAULT


def export(
    out: Annotated[str, typer.Option(help="The file to write; for hub, the folder.")],
    weights: Weights = DEFAULT,
    format: Annotated[str, typer.Option(help="onnx, torch-export or hub.")] = "onnx",
    explanation: Annotated[
        bool,
        typer.Option("--with-explanation", help="Contributions to a class as outputs as well."),
    ] = False,
) -> None:
    """Writes a model as one file that runs without this library, or as a folder for the hub.

    The file takes image (n×3×H×W, RGB from 0 to 1) and gives logits (n×K).
    With an explanation it takes target too (n classes; -1 is the predicted
    one) and gives contributions (n×H×W) and their residual (n) as well.
    Class names and preprocessing are in the file's metadata. The folder holds
    model.safetensors, config.json and a model card with explained scenes.

    Examples:

    bcosvit export --with-explanation --out model.onnx

    bcosvit export --weights best.safetensors --format torch-export --out model.pt2

    bcosvit export --weights best.safetensors --format hub --out my-model
    """
    from bcosvit.export import export_repository, export_weights
    from bcosvit.export.files import ENDINGS

    if format == "hub":
        if explanation:
            raise ValueError("In a folder for the hub B-cos models always explain themselves.")
        export_repository(weights, out)
        Console().print(out, highlight=False, soft_wrap=True, markup=False)
        return
    if format not in ENDINGS:
        known = ", ".join([*ENDINGS, "hub"])
        raise ValueError(f"There is no format {format!r}; choose from {known}.")
    console = Console(stderr=True)
    found = export_weights(weights, out, format=format, explanation=explanation, console=console)
    Console().print(found.table())
    Console().print(out, highlight=False, soft_wrap=True, markup=False)

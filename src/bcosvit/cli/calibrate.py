"""`bcosvit calibrate`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.options import Device, Weights


def calibrate(
    weights: Weights,
    known: Annotated[str, typer.Option(help="A folder of pictures of the model's own kinds.")],
    unknown: Annotated[
        str,
        typer.Option(help="A folder of pictures of other kinds, with one sub-folder per kind."),
    ],
    test_known: Annotated[
        str | None, typer.Option(help="Further pictures of the model's kinds, to measure on.")
    ] = None,
    test_unknown: Annotated[
        str | None, typer.Option(help="Pictures of still other kinds, to measure on.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="The weights file with the score.", show_default="none is written"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Pictures of each folder.")] = None,
    device: Device = "auto",
) -> None:
    """Fits the score that says "unlike anything this model was trained on", and measures it.

    The score is stored with the weights, in --out. The area under the ROC curve (AUROC) is printed
    with its 95 % interval: for the test folders, which should hold other kinds, if they are given.

    Examples:

    bcosvit calibrate --weights best.safetensors --known photos/ --unknown other/
    --test-known more/ --test-unknown others/ --out calibrated.safetensors
    """
    from bcosvit.report.calibrate import calibrate_weights

    found = calibrate_weights(
        weights,
        known,
        unknown,
        test_known=test_known,
        test_unknown=test_unknown,
        out=out,
        limit=limit,
        device=device,
        console=Console(stderr=True),
    )
    Console().print(found.summary(), highlight=False, soft_wrap=True, markup=False)

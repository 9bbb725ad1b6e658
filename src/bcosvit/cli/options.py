"""Options that several commands have."""

from typing import Annotated

import typer

from bcosvit.cli.names import complete

Weights = Annotated[
    str,
    typer.Option(
        help="A shipped model ({weights}), a safetensors file, https://...#sha256=..., or "
        "hf://OWNER/REPO.",
        autocompletion=complete("weights"),
    ),
]
Data = Annotated[str, typer.Option(help="One of: {data}.", autocompletion=complete("data-keys"))]
Split = Annotated[
    str, typer.Option(help="val (the pictures that are not used for training), train or all.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="The number of pictures to draw from the split.")
]
Masks = Annotated[
    str | None,
    typer.Option(
        help="A folder of masks named like the pictures (PNG, NPZ, Pascal VOC's XML), or a JSON "
        "file of COCO's annotations."
    ),
]
MaskValue = Annotated[
    str | None,
    typer.Option(
        help="The values of masks that mark the object, e.g. 1,3 in trimaps; by default all but 0."
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="Pictures in one pass; by default as many as suit the device."),
]
NumWorkers = Annotated[int, typer.Option(min=0, help="Processes that read ahead.")]
Seed = Annotated[int, typer.Option(help="For everything that is drawn at random.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]

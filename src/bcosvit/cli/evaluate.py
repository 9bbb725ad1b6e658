"""`bcosvit evaluate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.explain import DEVICE, WEIGHTS
from bcosvit.cli.names import complete

MASKS = typer.Option(
    help="A folder of masks named like the pictures (PNG, NPZ, Pascal VOC's XML), or a JSON file "
    "of COCO's annotations."
)
MASK_VALUE = typer.Option(
    help="The values of masks that mark the object, e.g. 1,3 in trimaps; by default all but 0."
)


def evaluate(
    weights: Annotated[str, WEIGHTS],
    data: Annotated[
        str, typer.Option(help="One of: {data}.", autocompletion=complete("data-keys"))
    ],
    out: Annotated[str, typer.Option(help="A folder for the report and its tables.")],
    metrics: Annotated[
        str,
        typer.Option(
            help="default, all, or some of {metrics}, separated by commas.",
            autocompletion=complete("metrics", several=True),
        ),
    ] = "default",
    methods: Annotated[
        str,
        typer.Option(
            help="all, or some of {methods}, separated by commas.",
            autocompletion=complete("methods", several=True),
        ),
    ] = "all",
    split: Annotated[
        str,
        typer.Option(help="val (the pictures that are not used for training), train or all."),
    ] = "val",
    limit: Annotated[
        int | None, typer.Option(min=1, help="The number of pictures to draw from the split.")
    ] = None,
    masks: Annotated[str | None, MASKS] = None,
    mask_value: Annotated[str | None, MASK_VALUE] = None,
    grids: Annotated[int, typer.Option(min=1, help="Grids of the pointing game.")] = 250,
    images: Annotated[int, typer.Option(min=1, help="Images to perturb.")] = 250,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another option of a metric."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Pictures in one pass; by default as many as suit the device."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For everything that is drawn at random.")] = 0,
    num_workers: Annotated[int, typer.Option(min=0, help="Processes that read ahead.")] = 0,
    device: Annotated[str, DEVICE] = "auto",
    precision: Annotated[
        str, typer.Option(help="What the model computes in: 32, bf16 or fp16.")
    ] = "32",
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, nothing else.")
    ] = False,
) -> None:
    """Measures accuracy and explanations, with a report, one table per metric and summary.json.

    Examples:

    bcosvit evaluate --weights best.safetensors --data photos/ --out results

    bcosvit evaluate --weights WEIGHTS --data imagenet/
    --metrics accuracy,localization --out results

    bcosvit evaluate --weights best.safetensors --data scenes --limit 100
    --metrics localization --methods inherent,intgrad --grids 25 --out quick
    """
    from bcosvit.machine import keep_freed_memory
    from bcosvit.report.evaluate import REPORT, evaluate_weights
    from bcosvit.report.tables import evaluation_table
    from bcosvit.settings import parse_settings, parse_values

    keep_freed_memory()
    found = evaluate_weights(
        weights,
        data,
        out=out,
        metrics=metrics,
        methods=methods,
        split=split,
        limit=limit,
        masks=masks,
        mask_values=parse_values(mask_value),
        options={"grids": grids, "images": images, **parse_settings(settings or [])},
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        device=device,
        precision=precision,
        console=Console(stderr=True),
    )
    if json:
        Console().print_json(data=found.summary())
        return
    Console().print(evaluation_table(found))
    Console().print(str(Path(out, REPORT)), highlight=False, soft_wrap=True, markup=False)

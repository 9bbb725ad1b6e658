"""`bcosvit evaluate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.names import complete
from bcosvit.cli.options import (
    BatchSize,
    Data,
    Device,
    Limit,
    Masks,
    MaskValue,
    NumWorkers,
    Seed,
    Split,
    Weights,
)


def evaluate(
    weights: Weights,
    data: Data,
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
    split: Split = "val",
    limit: Limit = None,
    masks: Masks = None,
    mask_value: MaskValue = None,
    grids: Annotated[int, typer.Option(min=1, help="Grids of the pointing game.")] = 250,
    images: Annotated[int, typer.Option(min=1, help="Images to perturb.")] = 250,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another option of a metric."),
    ] = None,
    batch_size: BatchSize = None,
    seed: Seed = 0,
    num_workers: NumWorkers = 0,
    device: Device = "auto",
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

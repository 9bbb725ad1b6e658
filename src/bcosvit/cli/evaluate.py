"""`bcosvit evaluate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.explain import WEIGHTS
from bcosvit.data.dataset import source_syntax


def evaluate(
    weights: Annotated[str, typer.Option(help=WEIGHTS)],
    data: Annotated[
        str,
        typer.Option(help=f"One of: {source_syntax()}."),
    ],
    out: Annotated[str, typer.Option(help="A folder for the report and its tables.")],
    metrics: Annotated[
        str,
        typer.Option(help="all, or some of accuracy,localization,perturbation,masks."),
    ] = "all",
    methods: Annotated[
        str, typer.Option(help="all, or names with commas between them: inherent,rollout.")
    ] = "all",
    split: Annotated[
        str,
        typer.Option(help="val (the pictures that training sets aside), train or all."),
    ] = "val",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Draw so many pictures of the split.")
    ] = None,
    grids: Annotated[int, typer.Option(min=1, help="Grids of the pointing game.")] = 250,
    images: Annotated[int, typer.Option(min=1, help="Images to perturb.")] = 250,
    batch: Annotated[int, typer.Option(min=1, help="Pictures in one pass.")] = 32,
    seed: Annotated[int, typer.Option(help="Of all that is drawn at random.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read ahead.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, nothing else.")
    ] = False,
) -> None:
    """Measures accuracy and explanations, with a report, a table a metric and summary.json.

    Examples:

    bcosvit evaluate --weights best.safetensors --data photos/ --out results

    bcosvit evaluate --weights best.safetensors --data scenes --limit 100
    --metrics localization --methods inherent,intgrad --grids 25 --out quick
    """
    from bcosvit.report.evaluate import REPORT, evaluate_weights
    from bcosvit.report.evaluate_table import evaluation_table

    found = evaluate_weights(
        weights,
        data,
        out=out,
        metrics=metrics,
        methods=methods,
        split=split,
        limit=limit,
        grids=grids,
        images=images,
        batch=batch,
        seed=seed,
        workers=workers,
        device=device,
        console=Console(stderr=True),
    )
    if json:
        Console().print_json(data=found.summary())
        return
    Console().print(evaluation_table(found))
    Console().print(str(Path(out, REPORT)), highlight=False, soft_wrap=True, markup=False)

"""`bcosvit reproduce`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bcosvit.cli.names import complete
from bcosvit.cli.options import BatchSize, Device


def reproduce(
    figure: Annotated[
        str,
        typer.Argument(help="One of {figures}, or all.", autocompletion=complete("figures")),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="A folder with train/ and val/, or anything else that `train` takes.",
            autocompletion=complete("data-keys"),
        ),
    ],
    out: Annotated[str, typer.Option(help="A folder for the runs and the figures.")],
    budget: Annotated[
        float | None,
        typer.Option(help="Minutes; epochs are cut to fit into them."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="paper, small (for a few thousand images), or one of {recipes}.",
            autocompletion=complete("recipes"),
            show_default="paper; small with --budget",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often every transformer is trained.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field of all recipes, e.g. precision=bf16; backbone.epochs=90 of the "
            "backbones' alone; model.depth=6 of the transformers; densenet.growth=16.",
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Some of ti,s,b.", show_default="the figure's")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Some of 13,38,87.", show_default="the figure's")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First choose learning rates on a split of the training set."),
    ] = False,
    flavor: Annotated[str, typer.Option(help="Of the B-cos backbone: v2 or v1.")] = "v2",
    bcos_backbone: Annotated[
        str | None, typer.Option(help="Weights of a B-cos DenseNet-121, instead of training one.")
    ] = None,
    conventional_backbone: Annotated[
        str | None, typer.Option(help="Weights of a DenseNet-121, instead of training one.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="A model to measure as it is, instead of training; may be repeated.",
            autocompletion=complete("weights"),
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="all, or some of {methods}, separated by commas.",
            show_default="the paper's",
            autocompletion=complete("methods", several=True),
        ),
    ] = None,
    grids: Annotated[
        int, typer.Option(min=1, help="How many grids the grid pointing game has.")
    ] = 250,
    images: Annotated[int, typer.Option(min=1, help="How many images are perturbed.")] = 250,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many validation images to measure on.")
    ] = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
) -> None:
    """Reproduces a figure of the paper on your images: trains, measures, draws.

    What exists already is used, so if the command is stopped or killed, give it
    again to continue. The folder --out gets runs/, and for every figure plots, a
    table and report.html.

    Examples:

    bcosvit reproduce accuracy --data imagenet/ --out paper --set precision=bf16

    bcosvit reproduce all --data photos/ --out paper --budget 120 --sizes ti,s
    --taps 38,87

    bcosvit reproduce faithfulness --weights bcos_vit_lite2_imagenet --data
    imagenet/ --out measured
    """
    from pathlib import Path

    from bcosvit.attribution import explainers
    from bcosvit.machine import keep_freed_memory
    from bcosvit.messages import require
    from bcosvit.settings import parse_settings

    paper = require("bcosvit.paper", extra="train", purpose="Training")
    from bcosvit.train import Stopped

    backbones = {"bcos_densenet121": bcos_backbone, "densenet121": conventional_backbone}
    options = paper.StudyOptions(
        data=data,
        out=Path(out),
        sizes=_words(sizes),
        taps=_words(taps),
        seeds=seeds,
        recipe=recipe or ("paper" if budget is None else "small"),
        settings=parse_settings(settings or []),
        flavor=flavor,
        backbones={name: file for name, file in backbones.items() if file is not None},
        weights=tuple(weights or ()),
        methods=explainers() if methods == "all" else _words(methods),
        grids=grids,
        images=images,
        limit=limit,
        batch_size=batch_size,
        device=device,
        minutes=budget,
        tune=tune,
    )
    console = Console()
    keep_freed_memory()

    def log(text: str) -> None:
        console.print(text, style="bold", highlight=False, soft_wrap=True, markup=False)

    try:
        made = paper.reproduce(figure, options, log)
    except Stopped:
        log("Stopped; everything is saved. To continue, give the same command again.")
        raise SystemExit(130) from None
    table = Table("Figure", "Claim", "Paper", "Here")
    for name, outcome in made.outcomes.items():
        for line in outcome.headlines:
            table.add_row(name, *(escape(part) for part in (line.claim, line.paper, line.ours)))
    console.print(table)
    if made.missing:
        log(f"Missing: {'; '.join(f'{what} ({why})' for what, why in made.missing.items())}.")
    console.print(str(made.page), highlight=False, soft_wrap=True, markup=False)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())

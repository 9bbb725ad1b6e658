"""The table of commands, nothing else; a command imports what it needs when it runs."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Vision transformers that explain themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _root() -> None:
    """Vision transformers that explain themselves."""


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A model's name, e.g. bcos_vit_ti_38, or 'all'.")],
    batch: Annotated[int, typer.Option(min=1, help="Images in the batch for memory.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the model, e.g. maxout=1."),
    ] = None,
) -> None:
    """Layers, parameters, FLOPs, token grid and memory of a model.

    Example: bcosvit info bcos_vit_b_38 --batch 256 --set position=add
    """
    from bcosvit.models import list_models, model_config
    from bcosvit.models.summary import summarise
    from bcosvit.report.tables import list_table, summary_table
    from bcosvit.settings import parse_settings

    if name == "all":
        Console().print(list_table(list_models()))
        return
    config = model_config(name, **parse_settings(settings or []))
    Console().print(summary_table(name, summarise(config, batch=batch)))


@app.command()
def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder with a sub-folder per class, tar shards, hf:NAME, or 'scenes'. "
            "May be left out with --resume."
        ),
    ] = None,
    *,
    out: Annotated[str, typer.Option(help="The run's folder, new unless --resume.")],
    model: Annotated[
        str | None, typer.Option(help="A model's name; by default the recipe's or the weights'.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="paper-bcos, paper-conventional, paper-backbone or quick.", show_default="quick"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field of the recipe, e.g. epochs=30, or of the model, e.g. model.maxout=1.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Weights to start from: a model's, or its backbone's."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=...")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Processes per machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, ddp or fsdp.")] = "auto",
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out where it was.")
    ] = False,
) -> None:
    """Trains a model on your images, or on drawn scenes.

    The folder --out gets run.yaml, metrics.csv, curves.png, logs for
    TensorBoard, pictures of contributions, last.ckpt, and best.safetensors
    with a model card. Ctrl-C saves and stops.

    Examples:

    bcosvit train scenes --out runs/scenes

    bcosvit train photos/ --init runs/scenes/best.safetensors --out runs/own

    bcosvit train photos/ --recipe paper-bcos --model bcos_vit_ti_38
    --init backbone.safetensors --set epochs=30 --devices 4 --out runs/ti

    bcosvit train --resume --out runs/ti
    """
    from bcosvit.settings import parse_settings

    try:
        from bcosvit.train import Machines, Stopped
        from bcosvit.train import train as run
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"Training needs {missing.name}, which is not installed: pip install 'bcosvit[train]'."
        ) from missing
    changes = parse_settings(settings or [])
    if seed is not None:
        changes["seed"] = seed
    machines = Machines(
        devices=devices,
        nodes=nodes,
        strategy=strategy,  # type: ignore[arg-type]
        accelerator=accelerator,  # type: ignore[arg-type]
    )
    try:
        run(
            data,
            out=out,
            model=model,
            recipe=recipe,
            settings=changes,
            init=init,
            resume=resume,
            machines=machines,
        )
    except Stopped as stopped:
        # All processes but the first end quietly.
        if str(stopped):
            Console().print(str(stopped), highlight=False, soft_wrap=True)
            raise SystemExit(130) from None


@app.command()
def explain(
    pictures: Annotated[
        list[str], typer.Argument(metavar="IMAGE|FOLDER", help="Picture files, or folders.")
    ],
    weights: Annotated[str, typer.Option(help="A model's safetensors file.")],
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

    bcosvit explain photo.jpg --weights best.safetensors

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


@app.command()
def evaluate(
    weights: Annotated[str, typer.Option(help="A model's safetensors file.")],
    data: Annotated[
        str,
        typer.Option(
            help="A folder with a sub-folder per class, tar shards, hf:NAME, or 'scenes'."
        ),
    ],
    out: Annotated[str, typer.Option(help="A folder for the report and its tables.")],
    metrics: Annotated[
        str,
        typer.Option(help="all, or some of accuracy,localisation,perturbation,masks."),
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
    --metrics localisation --methods inherent,intgrad --grids 25 --out quick
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
    Console().print(f"{out}/{REPORT}", highlight=False, soft_wrap=True, markup=False)


def main() -> None:
    """Runs the command line; a ``ValueError`` is the user's to mend, so it is one red sentence."""
    try:
        app()
    except ValueError as error:
        # Messages quote shapes and names, which may look like markup.
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None

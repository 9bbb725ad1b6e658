"""`bcosvit train`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.data.dataset import source_syntax


def train(
    data: Annotated[
        str | None,
        typer.Argument(help=f"One of: {source_syntax()}. May be left out with --resume."),
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
    from bcosvit.messages import require
    from bcosvit.settings import parse_settings

    require("bcosvit.train", extra="train", purpose="Training")
    from bcosvit.train import Machines, Stopped
    from bcosvit.train import train as run

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

"""`bcosvit train`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.names import complete
from bcosvit.messages import require


def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="One of: {data}. May be left out with --resume.",
            autocompletion=complete("data-keys"),
        ),
    ] = None,
    *,
    out: Annotated[str, typer.Option(help="The folder of the run; new, unless --resume is given.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="One of {models}; by default that of the weights or of the recipe.",
            autocompletion=complete("models", "weights"),
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="One of {recipes}.", show_default="quick", autocompletion=complete("recipes")
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
        typer.Option(
            help="Weights to start from: those of a model, or of its backbone.",
            autocompletion=complete("weights"),
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=...")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices per machine.")] = 1,
    num_nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, ddp or fsdp.")] = "auto",
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out where it ended.")
    ] = False,
) -> None:
    """Trains a model on your images, or on drawn scenes.

    The folder --out gets run.yaml, metrics.csv, curves.png, logs for
    TensorBoard, images of contributions, last.ckpt, and best.safetensors
    with a model card. Ctrl-C saves and stops.

    Examples:

    bcosvit train scenes --out runs/scenes

    bcosvit train photos/ --init runs/scenes/best.safetensors --out runs/own

    bcosvit train photos/ --recipe paper-bcos --model bcos_vit_ti_38
    --init backbone.safetensors --set epochs=30 --devices 4 --out runs/ti

    bcosvit train --resume --out runs/ti
    """
    from bcosvit.settings import parse_settings

    training = require("bcosvit.train", extra="train", purpose="Training")
    changes = parse_settings(settings or [])
    if seed is not None:
        changes["seed"] = seed
    try:
        training.train(
            data,
            out=out,
            model=model,
            recipe=recipe,
            settings=changes,
            init=init,
            resume=resume,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
        )
    except training.Stopped as stopped:
        # The message is empty in all processes but the first.
        if str(stopped):
            Console().print(str(stopped), highlight=False, soft_wrap=True)
            raise SystemExit(130) from None

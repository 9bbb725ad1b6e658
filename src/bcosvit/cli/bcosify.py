"""`bcosvit bcosify`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bcosvit.cli.names import complete
from bcosvit.files import atomic
from bcosvit.messages import require

if TYPE_CHECKING:
    from bcosvit.data.labeled import LabeledImages
    from bcosvit.data.sources import Source
    from bcosvit.models.bcosify import Bcosified
    from bcosvit.models.originals import Original

TOLERANCE = 1e-6
"""In float64 the same function differs by its rounding, 1e-12; another one by 1e-2 and more."""
COMPARED_IMAGES = 32
"""Images on which logits are compared and constants are measured."""
MEASURED_IMAGES, MEASURED_GRIDS = 400, 50
"""Validation images, and grids made of them, for accuracy and localization."""


def bcosify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME or torchvision:NAME with --weights; a conventional model that bcosvit "
            "saved; or a published B-cos DenseNet-121, v1 or v2, as a path or an address.",
        ),
    ],
    out: Annotated[str, typer.Option(help="The weights file to write.")],
    weights: Annotated[
        str | None,
        typer.Option(help="The model's state dict, or 'pretrained' to let its library download."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Images to measure on and, with --recipe, to train on.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Train the converted model with this recipe, usually bcosify.",
            autocompletion=complete("recipes"),
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side in pixels; by default that of the model.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="For a published DenseNet: the ViT's name.", autocompletion=complete("models")
        ),
    ] = "bcos_vit_ti_38",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the model, num_classes=10, or of the recipe, recipe.epochs=10.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="For a published DenseNet: of the layers behind the tokenizer.")
    ] = 0,
) -> None:
    """Converts a pretrained model to an equal one that explains itself.

    Prints how well both agree, the share of constants in the logits and,
    with --data, accuracy and localization. With --recipe bcosify the model
    is then fine-tuned to a B-cos network, in the folder OUT without its
    ending; the untrained one is kept beside it.

    From the authors' B-cos DenseNet it starts a B-cos ViT instead, whose
    tokenizer is that network: bcosvit train photos/ --init OUT.

    Examples:

    bcosvit bcosify torchvision:resnet18 --weights resnet18.pth --data photos/
    --out model.safetensors

    bcosvit bcosify timm:vit_tiny_patch16_224 --weights pretrained
    --data photos/ --recipe bcosify --out model.safetensors

    bcosvit bcosify densenet_121-b8daf96afb.pth --out start.safetensors
    """
    from bcosvit.settings import parse_settings

    options = parse_settings(settings or [])
    fields = {k.removeprefix("recipe."): v for k, v in options.items() if k.startswith("recipe.")}
    options = {k: v for k, v in options.items() if not k.startswith("recipe.")}
    if _is_published(source, weights):
        _from_published(source, out, model, options, seed)
        return
    if recipe is not None and data is None:
        raise ValueError("There is nothing to train on: give --data, or leave out --recipe.")
    if fields and recipe is None:
        raise ValueError(f"recipe.{next(iter(fields))} is given without --recipe: add it.")
    if recipe is not None:
        require("bcosvit.train", extra="train", purpose="Training")
    _convert(source, out, weights, data, recipe, image_size, options, fields)


def _convert(
    source: str,
    out: str,
    weights: str | None,
    data: str | None,
    recipe: str | None,
    image_size: int | None,
    options: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    import bcosvit
    from bcosvit.data.sources import open_source
    from bcosvit.models.originals import load_original

    # Problems with the images are found before the model is converted.
    images = None if data is None else open_source(data)
    original = load_original(source, weights, options)
    size = image_size or original.image_size
    converted = bcosvit.bcosify(
        original.model, mean=original.mean, std=original.std, image_size=size, b=1.0
    )
    _print(_agreement(original, converted, images, size))
    folder = Path(out).with_suffix("")
    start = (
        Path(out) if recipe is None else folder.with_name(f"{folder.name}-converted.safetensors")
    )
    bcosvit.save(converted, start)
    measured = None if images is None else _labeled(converted, images, size)
    if measured is not None:
        _print_measured({"converted, λ = 1, B = 1": _measure(converted, measured)})
    if recipe is not None:
        from bcosvit.train import train

        run = train(data, out=folder, init=start, recipe=recipe, settings=fields)
        tuned = bcosvit.load(run.weights)
        with atomic(out) as temporary:
            temporary.write_bytes(run.weights.read_bytes())
        assert measured is not None
        _print_measured({"trained": _measure(tuned, measured)})
    _print(out)


def _is_published(source: str, weights: str | None) -> bool:
    """Whether ``source`` is a DenseNet's state dict, and no other model."""
    from bcosvit.models.hub import locate
    from bcosvit.models.originals import LIBRARIES
    from bcosvit.models.weights import published_state, read_config

    if source.partition(":")[0] in LIBRARIES or weights is not None:
        return False
    path = locate(source)
    if path.suffix == ".safetensors" and read_config(path) is not None:
        return False
    return any(key.startswith("features.conv0.") for key in published_state(path))


def _agreement(
    original: "Original", converted: "Bcosified", images: "Source | None", size: int
) -> str:
    """Compares logits on images, or on drawn scenes where there are none."""
    import torch

    import bcosvit
    from bcosvit.data.sources import open_source
    from bcosvit.data.transforms import EvalTransform

    source = images or open_source(f"scenes?size={max(size, 32)}&train=8&val={COMPARED_IMAGES}")
    split = source.val.with_transform(EvalTransform(size))
    batch = torch.stack([split[k][0] for k in range(min(COMPARED_IMAGES, len(split)))])  # type: ignore[misc]
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (original.mean, original.std))
    with torch.no_grad():
        expected, found = original.model((batch - mean) / std), converted(batch)
    expected = getattr(expected, "logits", expected)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    explained = bcosvit.explain(converted, batch)
    assert explained.residual is not None and explained.logit is not None
    share = (explained.residual / explained.logit).abs().median().item()
    return (
        f"On {len(batch)} images of {source.name}, logits agree to {error:.1e} of the largest one, "
        f"and {same} predictions are the same.\n"
        f"The residual, the share of the model's constants, is {share:.2f} times the logit "
        f"(median)."
    )


def _labeled(converted: "Bcosified", source: "Source", size: int) -> "LabeledImages":
    """Validation images; the converted model labels them where the data's classes are others."""
    import torch

    from bcosvit.data.labeled import LabeledImages
    from bcosvit.data.transforms import EvalTransform

    known = len(source.classes) == converted.config.num_classes
    labels = [*range(len(source.classes)), -1]
    images = LabeledImages([source.val], labels, EvalTransform(size)).limit(MEASURED_IMAGES)
    if known:
        return images
    _print(
        f"{source.name} has not the model's {converted.config.num_classes} classes: the converted "
        f"model's predictions are taken as labels."
    )
    with torch.no_grad():
        found = [int(converted(images[k][0][None]).argmax()) for k in range(len(images))]
    return images.relabeled(found)


def _measure(model: Any, images: "LabeledImages") -> dict[str, str]:
    from bcosvit.metrics import GridPointingGame, MaskOverlap, Metric, evaluate
    from bcosvit.metrics.evaluation import obstacles

    masks = images.masks()
    metrics: list[Metric] = [GridPointingGame(grids=MEASURED_GRIDS), MaskOverlap()]
    left_out = obstacles(metrics, model, images, has_masks=masks is not None)
    metrics = [metric for metric in metrics if metric.name not in left_out]
    found = evaluate(model, images, metrics=metrics, masks=masks)
    row = {"Accuracy": f"{found.accuracy.top1.mean:.1%}"}
    for metric in metrics:
        for title, means in found.results[metric.name].columns().items():
            row[title] = f"{means['inherent']}" if "inherent" in means else "–"
    return row


def _print_measured(rows: Mapping[str, Mapping[str, str]]) -> None:
    table = Table()
    for title in ("", *next(iter(rows.values()))):
        table.add_column(title)
    for name, row in rows.items():
        table.add_row(name, *row.values())
    Console().print(table)


def _from_published(
    checkpoint: str, out: str, model: str, options: dict[str, Any], seed: int
) -> None:
    import torch

    from bcosvit.data.images import to_tensor
    from bcosvit.data.scenes import Scenes
    from bcosvit.models.base import save
    from bcosvit.models.published import from_published

    torch.manual_seed(seed)
    scenes = Scenes("val", size=96, length=2)
    images = torch.stack([to_tensor(scenes[index].image) for index in range(2)])
    network, found = from_published(checkpoint, model, images, **options)
    if not found.error < TOLERANCE:
        raise ValueError(
            f"The features behind dense block {found.block} differ by {found.error:.1e} from those "
            f"by the equations, so nothing is written; check that {checkpoint} is whole."
        )
    save(network, out)
    _print(
        f"The tokenizer of {model} is the {found.flavor} network in {checkpoint} up to dense "
        f"block {found.block} ({found.unused} tensors behind it are left out).\n"
        f"Its features agree with those by the equations, computed without its layers, to "
        f"{found.error:.1e} (relative norm, float64, 2 drawn scenes).\n{out}"
    )


def _print(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True, markup=False)

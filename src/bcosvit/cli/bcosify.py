"""`bcosvit bcosify`."""

from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.names import complete

TOLERANCE = 1e-6
"""In float64 the same function differs by its rounding, 1e-12; another one by 1e-2 and more."""


def bcosify(
    checkpoint: Annotated[
        str, typer.Argument(help="A published B-cos DenseNet-121, v1 or v2: a path or an address.")
    ],
    out: Annotated[str, typer.Option(help="The weights file to write.")],
    model: Annotated[
        str, typer.Option(help="The ViT's name.", autocompletion=complete("models"))
    ] = "bcos_vit_ti_38",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the model, num_classes=10."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the layers behind the tokenizer.")] = 0,
) -> None:
    """Starts a B-cos ViT from the authors' DenseNet, and checks that its features are theirs.

    The tokenizer is the published network up to the tap, the rest is ready to
    be trained: bcosvit train photos/ --init OUT.

    Examples:

    bcosvit bcosify densenet_121-b8daf96afb.pth --out start.safetensors

    bcosvit bcosify v1/state_dict.pkl --model bcos_vit_s_87 --set num_classes=10
    --out start.safetensors
    """
    import torch

    from bcosvit.data.images import to_tensor
    from bcosvit.data.scenes import Scenes
    from bcosvit.models.base import save
    from bcosvit.models.published import from_published
    from bcosvit.settings import parse_settings

    torch.manual_seed(seed)
    scenes = Scenes("val", size=96, length=2)
    images = torch.stack([to_tensor(scenes[index].image) for index in range(2)])
    network, found = from_published(checkpoint, model, images, **parse_settings(settings or []))
    if not found.error < TOLERANCE:
        raise ValueError(
            f"The features behind dense block {found.block} differ by {found.error:.1e} from those "
            f"of {found.compared_with}, so nothing is written; check that {checkpoint} is whole."
        )
    save(network, out)
    Console().print(
        f"The tokenizer of {model} is the {found.flavor} network in {checkpoint} up to dense "
        f"block {found.block} ({found.unused} tensors behind it are left out).\n"
        f"Its features agree with {found.compared_with} to {found.error:.1e} (relative norm, "
        f"float64, 2 drawn scenes).\n{out}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )

"""What the qualitative figures share: which model, which pictures, and tiles of explanations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcosvit.attribution import Attribution, explain_all, method_title
from bcosvit.metrics.grid_pointing import grid_images
from bcosvit.paper.lab import Lab
from bcosvit.paper.measure import Loaded
from bcosvit.paper.spec import RunSpec, vit
from bcosvit.paper.study import Study
from bcosvit.report.images import (
    RGB,
    Tile,
    colors,
    contribution_scales,
    method_image,
    on_white,
    photo_image,
)

# As the paper's figures have them, from left to right; "color" is W(x) in color.
TEASER = ("color", "inherent", "rollout", "finatt")
GRID = ("color", "inherent", "gradsam", "gradcam", "rollout", "finatt", "intgrad")
MORE = ("color", "inherent", "intgrad", "ixg", "gradcam", "gradsam")
CONVENTIONAL = (
    "intgrad",
    "ixg",
    "gradcam",
    "gradsam",
    "rollout",
    "finatt",
    "cheferlrp",
    "plrp",
)

NO_GRID = "No grid could be drawn: too few classes are recognized."


def shown_model(study: Study, family: str) -> RunSpec:
    """The paper's B-38, or the largest that was asked for, on 38 layers where possible."""
    sizes, taps = study.sizes_or(("b",)), study.taps_or(("38",))
    return vit(family, sizes[-1], "38" if "38" in taps else taps[-1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """One picture and the classes it is explained for."""

    image: Tensor
    """[3, H, W]"""
    targets: Tensor
    """[C], the model's classes."""
    names: list[str]


def singles(lab: Lab, spec: RunSpec, loaded: Loaded) -> list[Shown]:
    """The surest picture of each of some classes."""
    found = lab.measure(spec, "accuracy")
    if found is None:
        return []
    return [_shown(loaded, [index]) for index in found["shown"]["singles"]]


def grids(lab: Lab, spec: RunSpec, loaded: Loaded) -> list[Shown]:
    """The first grids of the pointing game."""
    found = lab.measure(spec, "accuracy")
    if found is None:
        return []
    return [_shown(loaded, indices) for indices in found["shown"]["grids"]]


def _shown(loaded: Loaded, indices: Sequence[int]) -> Shown:
    samples = [loaded.pictures[index] for index in indices]
    images = torch.stack([image for image, _, _ in samples])
    labels = [label for _, label, _ in samples]
    return Shown(
        image=grid_images(images[None])[0] if len(indices) > 1 else images[0],
        targets=torch.tensor(labels),
        names=[loaded.predictor.class_names[label] for label in labels],
    )


def explained(loaded: Loaded, shown: Shown, methods: Sequence[str]) -> dict[str, Attribution]:
    """Every method's maps [C, H, W] of one picture."""
    model = loaded.predictor.model
    reference = next(model.parameters())
    images = shown.image.to(reference).repeat(len(shown.targets), 1, 1, 1)
    named = tuple(dict.fromkeys("inherent" if m == "color" else m for m in methods))
    return explain_all(model, images, shown.targets.to(reference.device), named)


def tiles(
    shown: Shown,
    found: dict[str, Attribution],
    methods: Sequence[str],
    *,
    joint: bool = False,
) -> list[list[Tile]]:
    """A row a class: the picture, then every method; ``joint`` scales a method's maps alike."""
    scales = {
        method: contribution_scales(each.map.detach(), joint=joint)
        for method, each in found.items()
    }
    photo = photo_image(shown.image)
    rows = []
    for row, name in enumerate(shown.names):
        pictures = [Tile(image=photo, label=name)]
        for method in methods:
            pictures.append(Tile(image=_image(method, found, row, scales), label=_title(method)))
        rows.append(pictures)
    return rows


def _image(
    method: str, found: dict[str, Attribution], row: int, scales: dict[str, list[float]]
) -> RGB:
    if method == "color":
        return on_white(colors(found["inherent"], row))
    return method_image(method, found[method].map[row].detach(), scales[method][row])


def _title(method: str) -> str:
    return "W(x) in color" if method == "color" else method_title(method)

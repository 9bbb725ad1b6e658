"""The qualitative figures: explanations of chosen images, side by side.

Images are chosen by rule, so that none is picked by hand: the most confident one of each of some
classes, and the first grids of the grid pointing game.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bcosvit.attribution import Attribution, explain_all, method_title
from bcosvit.data.labeled import LabeledImages
from bcosvit.metrics.grid_pointing import grid_images
from bcosvit.paper.figures import NOT_MEASURED, Figure, Headline, Outcome, Panel, register_figure
from bcosvit.paper.measure import load_run, measure_run
from bcosvit.paper.study import RunSpec, Study
from bcosvit.predictor import Predictor
from bcosvit.report.images import (
    Picture,
    Tile,
    contribution_scales,
    method_image,
    panel,
    photo_image,
    weight_image,
)

COLOR = "color"
"""Among the names of methods, this stands for the rows of W(x) as colors."""

# The paper's columns from left to right.
TEASER = (COLOR, "inherent", "rollout", "finatt")
GRID = (COLOR, "inherent", "gradsam", "gradcam", "rollout", "finatt", "intgrad")
MORE = (COLOR, "inherent", "intgrad", "ixg", "gradcam", "gradsam")
CONVENTIONAL = (
    *("intgrad", "ixg", "gradcam", "gradsam", "rollout", "finatt"),
    *("cheferlrp", "plrp"),
)

NO_GRID = "No grid could be drawn, because too few classes are recognized."


def shown_model(study: Study, family: str) -> RunSpec:
    """Returns the paper's B-38, or the largest that was asked for, on 38 layers where possible."""
    specs = study.configurations(family, sizes=("b",), taps=("38",))
    largest = [spec for spec in specs if spec.short.split("-")[0] == specs[-1].short.split("-")[0]]
    return next((spec for spec in largest if spec.tap == "38"), largest[-1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One picture and the classes for which it is explained."""

    image: Tensor
    """[3, H, W]"""
    targets: Tensor
    """[C]"""
    class_names: list[str]

    @classmethod
    def of(cls, predictor: Predictor, images: LabeledImages, indices: Sequence[int]) -> "Sample":
        """Takes one image, or makes a grid of four."""
        samples = [images[index] for index in indices]
        stacked = torch.stack([image for image, _, _ in samples])
        labels = [label for _, label, _ in samples]
        return cls(
            image=grid_images(stacked[None])[0] if len(indices) > 1 else stacked[0],
            targets=torch.tensor(labels),
            class_names=[predictor.class_names[label] for label in labels],
        )

    def explain(self, predictor: Predictor, methods: Sequence[str]) -> dict[str, Attribution]:
        """Explains all classes by all methods; maps are [C, H, W]."""
        reference = next(predictor.model.parameters())
        images = self.image.to(reference).repeat(len(self.targets), 1, 1, 1)
        names = tuple(dict.fromkeys("inherent" if name == COLOR else name for name in methods))
        return explain_all(predictor.model, images, self.targets.to(reference.device), names)

    def tiles(
        self, found: dict[str, Attribution], methods: Sequence[str], *, joint: bool = False
    ) -> list[list[Tile]]:
        """Returns one row per class: the picture, then every method; with ``joint`` all maps of a
        method have one scale."""
        photo = photo_image(self.image)
        scales = {
            method: contribution_scales(each.map.detach(), joint=joint)
            for method, each in found.items()
        }
        rows = []
        for row, name in enumerate(self.class_names):
            tiles = [Tile(image=photo, label=name)]
            for method in methods:
                if method == COLOR:
                    image, label = weight_image(found["inherent"], row), "W(x) in color"
                    assert image is not None
                else:
                    map_ = found[method].map[row].detach()
                    image = method_image(method, map_, scales[method][row])
                    label = method_title(method)
                tiles.append(Tile(image=image, label=label))
            rows.append(tiles)
        return rows


def draw_panel(name: str, tiles: Sequence[Sequence[Tile]], caption: str) -> Panel:
    """Draws tiles as one picture."""
    image = np.asarray(panel(tiles))
    return Panel(name=name, caption=caption, picture=Picture.of(image, caption, photo=False))


def chosen_samples(
    study: Study, spec: RunSpec, predictor: Predictor, images: LabeledImages, kind: str
) -> list[Sample]:
    """Returns the ``"singles"`` or the ``"grids"`` that a run's accuracy decides."""
    found = measure_run(study, spec, "accuracy")
    if found is None:
        return []
    chosen = [each if isinstance(each, list) else [each] for each in found["shown"][kind]]
    return [Sample.of(predictor, images, indices) for indices in chosen]


@register_figure("qualitative")
class Qualitative(Figure):
    """The teaser, grids, and B-cos beside conventional transformers."""

    title = "Explanations of chosen images"
    about = (
        "Each map is normalized on its own: blue (against) over white to red (for) at ± the "
        "99.9th percentile, or jet from 0 for CheferLRP, Rollout and FinAtt. The images are the "
        "most confident ones of their class, and the first grids of the pointing game."
    )

    def runs(self, study: Study) -> list[RunSpec]:
        return [shown_model(study, family) for family in ("bcos", "conventional")]

    def make(self, study: Study) -> Outcome:
        bcos, conventional = self.runs(study)
        panels: list[Panel] = []
        grids: list[Sample] = []
        if (loaded := load_run(study, bcos)) is not None:
            predictor = loaded[0]
            singles = chosen_samples(study, bcos, *loaded, "singles")
            tiles = [
                row
                for sample in singles
                for row in sample.tiles(sample.explain(predictor, TEASER), TEASER)
            ]
            if tiles:
                caption = (
                    f"Inherent and attention explanations of {bcos.label} for the most confident "
                    f"image of each class."
                )
                panels.append(draw_panel("teaser", tiles, caption))
            grids = chosen_samples(study, bcos, *loaded, "grids")
            for number, sample in enumerate(grids, 1):
                found = sample.explain(predictor, (*GRID, *MORE))
                caption = f"Explanations of {bcos.label} on grid {number}."
                for name, methods in (("grid", GRID), ("bcos", MORE)):
                    tiles = sample.tiles(found, methods)
                    panels.append(draw_panel(f"{name}-{number}", tiles, caption))
        if grids and (loaded := load_run(study, conventional)) is not None:
            for number, sample in enumerate(grids, 1):
                found = sample.explain(loaded[0], CONVENTIONAL)
                caption = f"Explanations of {conventional.label} on the same grid {number}."
                tiles = sample.tiles(found, CONVENTIONAL)
                panels.append(draw_panel(f"conventional-{number}", tiles, caption))
        seen = Headline(
            claim="Inherent explanations are more detailed and more specific to a class",
            paper="by eye, on chosen images",
            ours="by eye: see the images below" if panels else NOT_MEASURED,
        )
        rows = [
            {"grid": number, "class": name}
            for number, sample in enumerate(grids, 1)
            for name in sample.class_names
        ]
        notes = [] if grids else [NO_GRID]
        return Outcome(headlines=[seen], rows=rows, panels=panels, notes=notes)


@register_figure("normalization")
class Normalization(Figure):
    """Jointly and independently normalized maps."""

    title = "Maps normalized independently and jointly"
    about = (
        "One grid, explained for its four classes: first every map is normalized by its own 99.9th "
        "percentile, then all maps of a method by that of the four together. The colors of W(x) "
        "do not change, and attention is the same for all classes."
    )
    claim: ClassVar = "Sums of positive contributions, which joint normalization makes visible"
    paper: ClassVar = "13.6, 3.3, 7.0, 5.2 (for four other classes)"

    def runs(self, study: Study) -> list[RunSpec]:
        return [shown_model(study, "bcos")]

    def make(self, study: Study) -> Outcome:
        (spec,) = self.runs(study)
        loaded = load_run(study, spec)
        grids = [] if loaded is None else chosen_samples(study, spec, *loaded, "grids")
        if loaded is None or not grids:
            headline = Headline(claim=self.claim, paper=self.paper)
            return Outcome(headlines=[headline], notes=[NO_GRID] if loaded else [])
        sample = grids[0]
        found = sample.explain(loaded[0], GRID)
        maps = found["inherent"].map.detach()
        sums = maps.clamp(min=0).sum((1, 2)).tolist()
        own, common = (contribution_scales(maps, joint=joint) for joint in (False, True))
        return Outcome(
            headlines=[
                Headline(
                    claim=self.claim,
                    paper=self.paper,
                    ours=", ".join(f"{total:.1f}" for total in sums),
                )
            ],
            rows=[
                {
                    "class": name,
                    "sum of positive contributions": total,
                    "own scale": scale,
                    "joint scale": joint,
                }
                for name, total, scale, joint in zip(
                    sample.class_names, sums, own, common, strict=True
                )
            ],
            panels=[
                draw_panel(
                    name,
                    sample.tiles(found, GRID, joint=name == "jointly"),
                    f"{name.capitalize()} normalized attribution maps of {spec.label}.",
                )
                for name in ("independently", "jointly")
            ],
        )

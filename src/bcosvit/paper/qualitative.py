"""The qualitative panels: the teaser, grids, and B-cos beside conventional transformers."""

from bcosvit.paper.figure import Headline, Outcome, Panel, PaperFigure, Row
from bcosvit.paper.lab import Lab
from bcosvit.paper.panels import (
    CONVENTIONAL,
    GRID,
    MORE,
    NO_GRID,
    TEASER,
    Shown,
    explained,
    grids,
    shown_model,
    singles,
    tiles,
)
from bcosvit.paper.spec import RunSpec
from bcosvit.paper.study import Study
from bcosvit.report.images import panel


def runs(study: Study) -> list[RunSpec]:
    return [shown_model(study, family) for family in ("bcos", "conventional")]


def make(lab: Lab) -> Outcome:
    bcos, plain = runs(lab.study)
    panels: list[Panel] = []
    rows: list[Row] = []
    shared: list[Shown] = []
    if (loaded := lab.load(bcos)) is not None:
        teaser = singles(lab, bcos, loaded)
        if teaser:
            drawn = [
                t for one in teaser for t in tiles(one, explained(loaded, one, TEASER), TEASER)
            ]
            caption = f"Inherent and attention explanations of {bcos.label}; the surest picture of "
            panels.append(Panel.of("teaser", panel(drawn), f"{caption}each class."))
        shared = grids(lab, bcos, loaded)
        for number, one in enumerate(shared):
            found = explained(loaded, one, (*GRID, *MORE))
            for name, methods in (("grid", GRID), ("bcos", MORE)):
                caption = f"Explanations of {bcos.label} on grid {number + 1}."
                image = panel(tiles(one, found, methods))
                panels.append(Panel.of(f"{name}-{number + 1}", image, caption))
            rows += [{"grid": number + 1, "class": name} for name in one.names]
    if shared and (loaded := lab.load(plain)) is not None:
        for number, one in enumerate(shared):
            found = explained(loaded, one, CONVENTIONAL)
            caption = f"Explanations of {plain.label} on the same grid {number + 1}."
            image = panel(tiles(one, found, CONVENTIONAL))
            panels.append(Panel.of(f"conventional-{number + 1}", image, caption))
    seen = Headline(
        claim="Inherent explanations are more detailed and more specific to a class",
        paper="by eye, on chosen pictures",
        ours="by eye: the pictures below, which were chosen by rule" if panels else "not measured",
    )
    notes = [] if shared else [NO_GRID]
    return Outcome(headlines=[seen], rows=rows, panels=panels, notes=notes)


FIGURE = PaperFigure(
    name="qualitative",
    title="Explanations, to look at",
    about="Each map is normalized on its own: blue (against) over white to red (for) at ± the "
    "99.9th percentile; jet from 0 for CheferLRP, Rollout and FinAtt. Pictures are the surest of "
    "their class and the first grids of the pointing game.",
    runs=runs,
    make=make,
)

"""Jointly against independently normalized panels."""

from bcosvit.paper.figure import Headline, Outcome, Panel, PaperFigure, Row
from bcosvit.paper.lab import Lab
from bcosvit.paper.panels import GRID, NO_GRID, explained, grids, shown_model, tiles
from bcosvit.paper.spec import RunSpec
from bcosvit.paper.study import Study
from bcosvit.report.images import contribution_scales, panel

PAPER = "13.6, 3.3, 7.0, 5.2 (four classes of its own)"


def runs(study: Study) -> list[RunSpec]:
    return [shown_model(study, "bcos")]


def make(lab: Lab) -> Outcome:
    (spec,) = runs(lab.study)
    loaded = lab.load(spec)
    shown = [] if loaded is None else grids(lab, spec, loaded)
    if loaded is None or not shown:
        return Outcome(headlines=[_headline([])], rows=[], notes=[NO_GRID] if loaded else [])
    one = shown[0]
    found = explained(loaded, one, GRID)
    panels = [
        Panel.of(
            name,
            panel(tiles(one, found, GRID, joint=joint)),
            f"{name.capitalize()} normalized attribution maps of {spec.label}.",
        )
        for name, joint in (("independently", False), ("jointly", True))
    ]
    maps = found["inherent"].map.detach()
    sums = maps.clamp(min=0).sum((1, 2)).tolist()
    own, joint = (contribution_scales(maps, joint=joint) for joint in (False, True))
    rows: list[Row] = [
        {
            "class": name,
            "sum of positive contributions": total,
            "scale on its own": scale,
            "joint scale": common,
        }
        for name, total, scale, common in zip(one.names, sums, own, joint, strict=True)
    ]
    return Outcome(headlines=[_headline(sums)], rows=rows, panels=panels)


def _headline(sums: list[float]) -> Headline:
    return Headline(
        claim="Sums of positive contributions, which joint normalization makes visible",
        paper=PAPER,
        ours=", ".join(f"{total:.1f}" for total in sums) or "not measured",
    )


FIGURE = PaperFigure(
    name="normalization",
    title="Maps normalized on their own and together",
    about="One grid, explained for its four classes: every map at its own 99.9th percentile, then "
    "all maps of a method at that of the four. Colors of W(x) are unchanged, and attention is the "
    "same for all classes.",
    runs=runs,
    make=make,
)

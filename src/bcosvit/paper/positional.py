"""Accuracy by positional information."""

from itertools import product

from bcosvit.paper.accuracies import Top1, accuracy_chart, accuracy_row, top1
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.spec import RunSpec, vit, with_seeds
from bcosvit.paper.study import Study

POSITIONS = ("none", "emb", "add", "mul")


def runs(study: Study) -> list[RunSpec]:
    return with_seeds(study, *(spec for each in _axes(study).values() for spec in each.values()))


def make(lab: Lab) -> Outcome:
    groups: dict[str, dict[str, Top1]] = {}
    rows: list[Row] = []
    for name, specs in _axes(lab.study).items():
        found = {p: top for p, spec in specs.items() if (top := top1(lab, spec)) is not None}
        groups[name] = found
        rows += [accuracy_row(top, position=position) for position, top in found.items()]
    return Outcome(
        headlines=[_headline(name, found) for name, found in groups.items()],
        rows=rows,
        charts=accuracy_chart("positional", "Top-1 accuracy by positional information.", groups),
    )


def _axes(study: Study) -> dict[str, dict[str, RunSpec]]:
    """By model and position; ``mul`` is the default, whose runs other figures share."""
    axes = product(study.sizes_or(("ti", "s", "b")), study.taps_or(("87",)))
    specs = {}
    for size, tap in axes:
        plain = vit("bcos", size, tap)
        specs[plain.short] = {
            position: plain if position == "mul" else vit("bcos", size, tap, position=position)
            for position in POSITIONS
        }
    return specs


def _headline(name: str, found: dict[str, Top1]) -> Headline:
    others = {position: top for position, top in found.items() if position != "mul"}
    gain = None
    ours = "not measured"
    if "mul" in found and others:
        best = max(others, key=lambda position: others[position].mean.value)
        gain = found["mul"].mean - others[best].mean
        ours = f"{number(gain, sign=True)} over {best}, the best other"
    return Headline(
        claim=f"Gain in top-1 by the multiplicative prior, {name}",
        paper="significantly better, consistently",
        ours=ours,
        value=gain,
    )


FIGURE = PaperFigure(
    name="positional",
    title="Accuracy by positional information",
    about="B-cos ViTs of three sizes on features after 87 layers, without positional information, "
    "with an additive embedding (emb), an additive (add) and a multiplicative (mul) attention "
    "prior.",
    runs=runs,
    make=make,
)

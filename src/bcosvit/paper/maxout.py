"""The MaxOut ablation."""

from bcosvit.paper.accuracies import Top1, accuracy_chart, accuracy_row, top1
from bcosvit.paper.charts import Chart
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import mean_of
from bcosvit.paper.spec import SIZE_NAMES, RunSpec, configurations, with_seeds
from bcosvit.paper.study import Study

WITH, WITHOUT, CONVENTIONAL = "B-cos, MaxOut 2", "B-cos, no MaxOut", "conventional"


def runs(study: Study) -> list[RunSpec]:
    triples = zip(*_series(study).values(), strict=True)
    return with_seeds(study, *(spec for triple in triples for spec in triple))


def make(lab: Lab) -> Outcome:
    groups: dict[str, dict[str, Top1]] = {}
    for name, specs in _series(lab.study).items():
        for spec in specs:
            if (found := top1(lab, spec)) is not None:
                groups.setdefault(spec.short, {})[name] = found
    rows: list[Row] = [
        accuracy_row(found, variant=name)
        for both in groups.values()
        for name, found in both.items()
    ]
    pairs = {"with": (WITH, WITHOUT), "conventional": (WITHOUT, CONVENTIONAL)}
    captions = {
        "with": "B-cos ViTs with and without MaxOut in the transformer.",
        "conventional": "B-cos ViTs without MaxOut, and conventional ViTs.",
    }
    charts: list[Chart] = []
    for key, names in pairs.items():
        some = {
            short: {name: found[name] for name in names if name in found}
            for short, found in groups.items()
        }
        charts += accuracy_chart(f"maxout-{key}", captions[key], some)
    sizes = [SIZE_NAMES[size] for size in lab.study.sizes_or(SIZE_NAMES)]
    return Outcome(headlines=[_gain(size, groups) for size in sizes], rows=rows, charts=charts)


def _series(study: Study) -> dict[str, list[RunSpec]]:
    return {
        WITH: configurations(study, "bcos"),
        WITHOUT: configurations(study, "bcos", maxout=1),
        CONVENTIONAL: configurations(study, "conventional"),
    }


def _gain(size: str, groups: dict[str, dict[str, Top1]]) -> Headline:
    gains = [
        found[WITH].mean - found[WITHOUT].mean
        for short, found in groups.items()
        if short.startswith(f"{size}-") and WITH in found and WITHOUT in found
    ]
    gain = mean_of(gains) if gains else None
    return Headline(
        claim=f"Gain in top-1 by MaxOut, {size}, mean over depths",
        paper="significant" if size == "Ti" else "the gap closes: on par without MaxOut",
        ours=number(gain, sign=True),
        value=gain,
    )


FIGURE = PaperFigure(
    name="maxout",
    title="Ablation of MaxOut",
    about="B-cos ViTs with two units an output and with one, which has the parameters of a "
    "conventional ViT, and beside those the conventional ones.",
    runs=runs,
    make=make,
)

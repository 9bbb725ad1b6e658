"""Accuracy of B-cos against conventional transformers."""

from bcosvit.paper.accuracies import Top1, accuracy_chart, accuracy_row, top1
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row, columns, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled, mean_of
from bcosvit.paper.spec import RunSpec, configurations, with_seeds
from bcosvit.paper.study import Study

FAMILIES = {"bcos": "B-cos", "conventional": "conventional"}


def runs(study: Study) -> list[RunSpec]:
    pairs = zip(*(configurations(study, family) for family in FAMILIES), strict=True)
    return with_seeds(study, *(spec for pair in pairs for spec in pair))


def make(lab: Lab) -> Outcome:
    groups: dict[str, dict[str, Top1]] = {}
    for family, name in FAMILIES.items():
        for spec in configurations(lab.study, family):
            if (found := top1(lab, spec)) is not None:
                groups.setdefault(spec.short, {})[name] = found
    gaps = {
        short: both["B-cos"].mean - both["conventional"].mean
        for short, both in groups.items()
        if len(both) == len(FAMILIES)
    }
    rows: list[Row] = [
        {**accuracy_row(found, family=name), **columns(gaps.get(short), "B-cos − conventional")}
        for short, both in groups.items()
        for name, found in both.items()
    ]
    return Outcome(
        headlines=[*_headlines(gaps), _best(groups)],
        rows=rows,
        charts=accuracy_chart(
            "accuracy", "Top-1 accuracy by size and depth of the backbone.", groups
        ),
        notes=_backbones(lab),
    )


def _headlines(gaps: dict[str, Sampled]) -> list[Headline]:
    mean = mean_of(list(gaps.values())) if gaps else None
    ahead = sum(gap.value >= 0 for gap in gaps.values())
    return [
        Headline(
            claim="Configurations in which B-cos ViTs are at least as accurate",
            paper="almost all of 9",
            ours=f"{ahead} of {len(gaps)}" if gaps else "not measured",
        ),
        Headline(
            claim="Mean of B-cos − conventional, top-1",
            paper="at least 0 in almost all configurations",
            ours=number(mean, sign=True),
            value=mean,
        ),
    ]


def _best(groups: dict[str, dict[str, Top1]]) -> Headline:
    found = {short: both["B-cos"].mean for short, both in groups.items() if "B-cos" in both}
    best = max(found, key=lambda short: found[short].value) if found else None
    return Headline(
        claim="Best B-cos ViT, top-1",
        paper="(ImageNet; no number in the text)",
        ours=f"{number(found[best])}, {best}" if best else "not measured",
        value=found[best] if best else None,
    )


def _backbones(lab: Lab) -> list[str]:
    notes = []
    for name in ("bcos_densenet121", "densenet121"):
        if name in lab.study.given:
            notes.append(f"The backbone {name} was given: {lab.study.given[name]}.")
        elif (done := lab.runs.done(RunSpec(model=name))) is not None:
            notes.append(
                f"The backbone {name} on its own reaches {done['final_top1']:.1%} top-1 after "
                f"{done['epochs']} epochs."
            )
    return notes


FIGURE = PaperFigure(
    name="accuracy",
    title="Accuracy of B-cos and conventional ViTs",
    about="Three sizes of transformer on frozen features after 13, 38 and 87 layers; B-cos ViTs "
    "with the multiplicative prior on a B-cos DenseNet-121, conventional ones on a conventional "
    "one. Gaps are resampled over the same pictures for both.",
    runs=runs,
    make=make,
)

"""The attention ablation: where LayerNorm stands, and B of the value and output projections."""

from itertools import product

from bcosvit.paper.accuracies import Top1, accuracy_chart, accuracy_row, top1
from bcosvit.paper.charts import grouped_bars
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row, columns, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled, mean_of, sampled
from bcosvit.paper.spec import RunSpec, vit, with_seeds
from bcosvit.paper.study import Study

STANDARD, SHIFTED_1, SHIFTED_2 = "standard", "shifted, B=1", "shifted, B=2"

# The last is the default, whose runs other figures share.
VARIANTS: dict[str, dict[str, object]] = {
    STANDARD: {"attention": "standard"},
    SHIFTED_1: {"attention_b": 1.0},
    SHIFTED_2: {},
}


def runs(study: Study) -> list[RunSpec]:
    return with_seeds(study, *(spec for each in _axes(study).values() for spec in each.values()))


def make(lab: Lab) -> Outcome:
    tops: dict[str, dict[str, Top1]] = {}
    ratios: dict[str, dict[str, Sampled]] = {}
    rows: list[Row] = []
    for short, specs in _axes(lab.study).items():
        for variant, spec in specs.items():
            found, ratio = top1(lab, spec), branch_ratio(lab, spec)
            if found is None or ratio is None:
                continue
            tops.setdefault(short, {})[variant] = found
            ratios.setdefault(short, {})[variant] = ratio
            row = accuracy_row(found, attention=variant)
            rows.append({**row, **columns(ratio, "skip ÷ attention")})
    charts = [*accuracy_chart("attention", "Top-1 accuracy by kind of attention.", tops)]
    if ratios:
        charts.append(
            grouped_bars(
                "branches",
                "Norm of the skip branch over that of the attention branch, geometric mean over "
                "layers, tokens and pictures.",
                "‖skip‖ ÷ ‖attention‖",
                {
                    short: {variant: ratio.estimate() for variant, ratio in each.items()}
                    for short, each in ratios.items()
                },
                logarithmic=True,
            )
        )
    gains = [_gain(short, tops.get(short, {})) for short in _axes(lab.study)]
    norms = [
        _norms(short, variant, ratios.get(short, {}).get(variant))
        for short in _axes(lab.study)
        for variant in (STANDARD, SHIFTED_2)
    ]
    return Outcome(headlines=[*gains, *norms], rows=rows, charts=charts)


def branch_ratio(lab: Lab, spec: RunSpec) -> Sampled | None:
    """Over the seeds that there are; geometric."""
    found = [lab.measure(seeded, "norms") for seeded in spec.seeded(lab.study.seeds)]
    logs = [sampled(each["log_ratio"]) for each in found if each is not None]
    return mean_of(logs).exp() if logs else None


def _axes(study: Study) -> dict[str, dict[str, RunSpec]]:
    axes = product(study.sizes_or(("s",)), study.taps_or(("13", "38", "87")))
    return {
        vit("bcos", size, tap).short: {
            variant: vit("bcos", size, tap, **options) for variant, options in VARIANTS.items()
        }
        for size, tap in axes
    }


def _gain(short: str, found: dict[str, Top1]) -> Headline:
    both = STANDARD in found and SHIFTED_2 in found
    gain = found[SHIFTED_2].mean - found[STANDARD].mean if both else None
    return Headline(
        claim=f"Gain in top-1 by the shifted LayerNorm (B=2), {short}",
        paper="significantly better, most on shallow backbones",
        ours=number(gain, sign=True),
        value=gain,
    )


def _norms(short: str, variant: str, ratio: Sampled | None) -> Headline:
    said = {STANDARD: "several orders of magnitude; 10⁵ at 13 layers", SHIFTED_2: "about 10⁰"}
    shown = None if ratio is None else ratio.estimate()
    return Headline(
        claim=f"Skip ÷ attention branch, {variant}, {short}",
        paper=said[variant],
        ours="not measured"
        if shown is None
        else f"{shown.mean:.3g} [{shown.low:.3g}, {shown.high:.3g}]",
        value=ratio,
    )


FIGURE = PaperFigure(
    name="attention",
    title="Ablation of the attention module",
    about="ViT-S on three depths with standard attention, with the LayerNorm shifted to queries "
    "and keys alone (B=1 in V and U, so that nothing else differs), and with B=2. Beside the "
    "accuracy: how much larger the skip branch is than what attention adds to it.",
    runs=runs,
    make=make,
)

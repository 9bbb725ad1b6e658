"""Explanations of B-cos against those of conventional transformers, by both metrics."""

from bcosvit.attribution import method_title
from bcosvit.metrics.grid_pointing import CHANCE
from bcosvit.paper.charts import Chart, method_markers
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled
from bcosvit.paper.scores import (
    Scores,
    best_post_hoc,
    mean_rows,
    means,
    method_scores,
    relative,
    score_rows,
    values,
)
from bcosvit.paper.spec import RunSpec, configurations, with_seeds
from bcosvit.paper.study import Study

PAPER = 2.32
SIDES = ("B-cos ViTs", "conventional ViTs")


def runs(study: Study) -> list[RunSpec]:
    pairs = zip(configurations(study, "bcos"), configurations(study, "conventional"), strict=True)
    return with_seeds(study, *(spec for pair in pairs for spec in pair))


def make(lab: Lab) -> Outcome:
    found = {
        metric: (
            method_scores(lab, configurations(lab.study, "bcos"), metric),
            method_scores(lab, configurations(lab.study, "conventional"), metric),
        )
        for metric in ("localization", "perturbation")
    }
    return conventional_outcome(found["localization"], found["perturbation"])


def conventional_outcome(
    localization: tuple[Scores, Scores], perturbation: tuple[Scores, Scores]
) -> Outcome:
    """From every method's scores on every model, of the B-cos and the conventional ones."""
    rows: list[Row] = []
    for name, (bcos, plain) in {"localization": localization, "ABC": perturbation}.items():
        for family, scores in (("B-cos", bcos), ("conventional", plain)):
            for row in score_rows(family, scores, "score", {}):
                rows.append({"metric": name, **row})
    return Outcome(
        headlines=[
            _headline("localization", localization, f"{PAPER} (IntGrad)"),
            _headline("perturbation", perturbation, "“much higher” (FinAtt)"),
        ],
        rows=rows,
        means=mean_rows(rows),
        charts=[*_localization_chart(localization), *_perturbation_chart(perturbation)],
        notes=[
            "Areas between curves are compared across models here, which may differ in how stable "
            "they are: the paper asks for care with them, too."
        ],
    )


def advantage(both: tuple[Scores, Scores]) -> tuple[Sampled | None, str | None]:
    """Mean inherent score on B-cos ÷ that of the best method on conventional models, and which."""
    bcos, plain = both
    best = best_post_hoc(plain)
    if best is None or "inherent" not in bcos or means(plain)[best].value <= 0:
        return None, best
    return means(bcos)["inherent"] / means(plain)[best], best


def _headline(metric: str, both: tuple[Scores, Scores], paper: str) -> Headline:
    ratio, best = advantage(both)
    named = f" ({method_title(best)})" if best else ""
    return Headline(
        claim=f"Inherent on B-cos ÷ best post-hoc on conventional ViTs, {metric}",
        paper=paper,
        ours=f"{number(ratio, 2)}{named}",
        value=ratio,
    )


def _localization_chart(both: tuple[Scores, Scores]) -> list[Chart]:
    sides = {side: values(scores) for side, scores in zip(SIDES, both, strict=True) if scores}
    if not sides:
        return []
    caption = "Localization by family; dashed: the mean over models; dotted: chance."
    return [method_markers("localization-families", caption, "localization", sides, chance=CHANCE)]


def _perturbation_chart(both: tuple[Scores, Scores]) -> list[Chart]:
    """Each side divided by its best method a model, as in the paper; the right one is then scaled
    by how the two best compare."""
    bcos, plain = both
    ratio, best = advantage(both)
    if ratio is None or best is None or ratio.value <= 0:
        return []
    scaled = {
        method: {model: value / ratio.value for model, value in each.items()}
        for method, each in values(relative(plain, best)).items()
    }
    sides = dict(zip(SIDES, (values(relative(bcos, "inherent")), scaled), strict=True))
    caption = (
        f"Areas between curves, divided by the inherent explanation's of the same model (left) or "
        f"by {method_title(best)}'s, times the ratio of both methods' means (right)."
    )
    return [method_markers("perturbation-families", caption, "ABC, relative", sides)]


FIGURE = PaperFigure(
    name="conventional",
    title="Explanations of B-cos and conventional ViTs",
    about="Inherent and post-hoc explanations of B-cos ViTs (left) and post-hoc explanations of "
    "the conventional ones (right), LRP-based ones included, by localization and perturbation.",
    runs=runs,
    make=make,
)

"""Localisation of every method on the B-cos transformers."""

from bcosvit.evaluate.localisation import CHANCE
from bcosvit.paper.charts import method_markers
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import mean_of
from bcosvit.paper.scores import (
    Scores,
    best_post_hoc,
    means,
    method_scores,
    relative,
    score_rows,
    values,
)
from bcosvit.paper.spec import RunSpec, configurations, with_seeds
from bcosvit.paper.study import Study
from bcosvit.report.plots import title

PAPER = 2.47


def runs(study: Study) -> list[RunSpec]:
    return with_seeds(study, *configurations(study, "bcos"))


def make(lab: Lab) -> Outcome:
    scores = method_scores(lab, configurations(lab.study, "bcos"), "localisation")
    return localisation_outcome(scores)


def localisation_outcome(scores: Scores) -> Outcome:
    """From every method's scores on every model."""
    headlines = _headlines(scores)
    if not scores:
        return Outcome(headlines=headlines, rows=[])
    ratio = headlines[0].value
    others = {"÷ inherent": relative(scores, "inherent")} if "inherent" in scores else {}
    side = "B-cos ViTs" + (f", inherent ×{ratio.value:.2f} the best other" if ratio else "")
    return Outcome(
        headlines=headlines,
        rows=score_rows("B-cos", scores, "localisation", others),
        charts=[
            method_markers(
                "localisation",
                "Share of positive attribution in the right cell; dashed: the mean over models; "
                "dotted: chance.",
                "localisation",
                {side: values(scores)},
                chance=CHANCE,
            )
        ],
    )


def _headlines(scores: Scores) -> list[Headline]:
    best = best_post_hoc(scores)
    ratio = each = inherent = None
    if best is not None and "inherent" in scores:
        inherent = means(scores)["inherent"]
        ratio = inherent / means(scores)[best]
        post_hoc = {m: row for m, row in scores.items() if m != "inherent"}
        each = mean_of(
            [
                score / post_hoc[own][model]
                for model, score in scores["inherent"].items()
                if (own := best_post_hoc({m: {model: r[model]} for m, r in post_hoc.items()}))
            ]
        )
    named = f" ({title(best)})" if best else ""
    return [
        Headline(
            claim="Inherent ÷ best post-hoc method, means over models",
            paper=f"{PAPER} (Rollout)",
            ours=f"{number(ratio, 2)}{named}",
            value=ratio,
        ),
        Headline(
            claim="The same, with the best method of each model, then averaged",
            paper="not given",
            ours=number(each, 2),
            value=each,
        ),
        Headline(
            claim="Inherent localisation, mean over models",
            paper="(in the plot only)",
            ours=number(inherent),
            value=inherent,
        ),
    ]


FIGURE = PaperFigure(
    name="localisation",
    title="Localisation of explanations of B-cos ViTs",
    about="The grid pointing game: four pictures in one, each class explained; the share of its "
    "positive attribution that falls on its own picture. A marker a model, a column a method.",
    runs=runs,
    make=make,
)

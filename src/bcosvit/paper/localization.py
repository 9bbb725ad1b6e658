"""Localization of every method on the B-cos transformers."""

from bcosvit.attribution import method_title
from bcosvit.metrics.grid_pointing import CHANCE
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import mean_of
from bcosvit.paper.scores import (
    Scores,
    bcos_chart,
    bcos_runs,
    bcos_scores,
    best_post_hoc,
    mean_rows,
    means,
    relative,
    score_rows,
)

PAPER = 2.47


def make(lab: Lab) -> Outcome:
    return localization_outcome(bcos_scores(lab, "localization"))


def localization_outcome(scores: Scores) -> Outcome:
    """From every method's scores on every model."""
    headlines = _headlines(scores)
    if not scores:
        return Outcome(headlines=headlines, rows=[])
    ratio = headlines[0].value
    others = {"÷ inherent": relative(scores, "inherent")} if "inherent" in scores else {}
    rows = score_rows("B-cos", scores, "localization", others)
    return Outcome(
        headlines=headlines,
        rows=rows,
        means=mean_rows(rows),
        charts=[
            bcos_chart(
                "localization",
                "Share of positive attribution in the right cell; dashed: the mean over models; "
                "dotted: chance.",
                "localization",
                scores,
                ratio,
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
    named = f" ({method_title(best)})" if best else ""
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
            claim="Inherent localization, mean over models",
            paper="(in the plot only)",
            ours=number(inherent),
            value=inherent,
        ),
    ]


FIGURE = PaperFigure(
    name="localization",
    title="Localization of explanations of B-cos ViTs",
    about="The grid pointing game: four pictures in one, each class explained; the share of its "
    "positive attribution that falls on its own picture. A marker a model, a column a method.",
    runs=bcos_runs,
    make=make,
)

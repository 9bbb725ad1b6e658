"""Pixel perturbation by every method on the B-cos transformers."""

from bcosvit.attribution import method_title
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, number
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled
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

PAPER = 1.99


def make(lab: Lab) -> Outcome:
    return perturbation_outcome(bcos_scores(lab, "perturbation"))


def perturbation_outcome(scores: Scores) -> Outcome:
    """From every method's area between the curves on every model."""
    inherent = scores.get("inherent", {})
    below = [model for model, score in inherent.items() if score.value <= 0]
    if not inherent or below:
        # Nothing can be divided by it: the areas alone are shown.
        why = f"not defined: the inherent area is not positive on {', '.join(below)}"
        rows = score_rows("B-cos", scores, "ABC", {})
        headline = _headline(why if below else "not measured")
        return Outcome(headlines=[headline], rows=rows, means=mean_rows(rows))
    normalized = relative(scores, "inherent")
    best = best_post_hoc(normalized)
    ratio = advantage(normalized, best)
    rows = score_rows("B-cos", scores, "ABC", {"÷ inherent": normalized})
    return Outcome(
        headlines=[_headline(_words(ratio, best), ratio)],
        rows=rows,
        means=mean_rows(rows),
        charts=[
            bcos_chart(
                "perturbation",
                "Area between the curves, divided by that of the inherent explanation of the same "
                "model; dashed: the mean over models.",
                "ABC ÷ inherent ABC",
                normalized,
                ratio,
            )
        ],
    )


def advantage(normalized: Scores, best: str | None) -> Sampled | None:
    """As in the paper: areas are normalized a model before they are averaged."""
    mean = means(normalized)
    if best is None or mean[best].value <= 0:
        return None
    return mean["inherent"] / mean[best]


def _words(ratio: Sampled | None, best: str | None) -> str:
    if best is None:
        return "not measured"
    if ratio is None:
        return f"not defined: the best post-hoc method, {method_title(best)}, is not above zero"
    return f"{number(ratio, 2)} ({method_title(best)})"


def _headline(ours: str, ratio: Sampled | None = None) -> Headline:
    return Headline(
        claim="Inherent ÷ best post-hoc method, normalized areas, means over models",
        paper=f"{PAPER} (Rollout)",
        ours=ours,
        value=ratio,
    )


FIGURE = PaperFigure(
    name="perturbation",
    title="Pixel perturbation by explanations of B-cos ViTs",
    about="Up to a quarter of the pixels are zeroed, most important first and least important "
    "first; the area between the two curves of confidence (ABC) says how much the order knows.",
    runs=bcos_runs,
    make=make,
)

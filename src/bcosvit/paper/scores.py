"""What the figures that compare explanation methods share."""

from collections.abc import Mapping, Sequence
from typing import Any

from bcosvit.paper.charts import Chart, method_markers
from bcosvit.paper.figure import Row, columns
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled, mean_of, sampled
from bcosvit.paper.spec import RunSpec, configurations, with_seeds
from bcosvit.paper.study import Study

Scores = dict[str, dict[str, Sampled]]
"""By method, then by model, e.g. ``Ti-38``."""

BASELINES = frozenset({"random"})
"""Methods that explain nothing, and so are not the best of any."""

_MEAN = "mean of "


def bcos_runs(study: Study) -> list[RunSpec]:
    """Of the figures about the B-cos transformers alone."""
    return with_seeds(study, *configurations(study, "bcos"))


def bcos_scores(lab: Lab, metric: str) -> Scores:
    """Of their models."""
    return method_scores(lab, configurations(lab.study, "bcos"), metric)


def bcos_chart(
    name: str,
    caption: str,
    axis: str,
    scores: Scores,
    ratio: Sampled | None,
    *,
    chance: float | None = None,
) -> Chart:
    """Their scores, headed by how the inherent explanations compare with the best others."""
    side = "B-cos ViTs" + (f", inherent ×{ratio.value:.2f} the best other" if ratio else "")
    return method_markers(name, caption, axis, {side: values(scores)}, chance=chance)


def method_scores(lab: Lab, specs: Sequence[RunSpec], metric: str) -> Scores:
    """Every method's score on every model, averaged over seeds."""
    scores: Scores = {}
    for number, spec in enumerate(specs):
        found: dict[str, list[Sampled]] = {}
        for seeded in spec.seeded(lab.study.seeds):
            result = lab.measure(seeded, metric)
            if result is None:
                continue
            # Models are measured on grids and pictures of their own: independent of each other.
            for method, score in _of_run(result, metric, 1000 * number + seeded.seed).items():
                found.setdefault(method, []).append(score)
            if not result["means"]:
                lab.missing[f"{metric} of {seeded.label}"] = "it classifies too little correctly"
        for method, each in found.items():
            scores.setdefault(method, {})[spec.short] = mean_of(each)
    return scores


def _of_run(result: Mapping[str, Any], metric: str, seed: int) -> dict[str, Sampled]:
    if metric == "localization":
        return {m: sampled(each, seed=seed) for m, each in result["scores"].items()}
    return {
        method: sampled(areas, seed=seed) / sampled(result["starts"][method], seed=seed)
        for method, areas in result["areas"].items()
    }


def relative(scores: Scores, to: str) -> Scores:
    """Every model's scores divided by those of one method on it."""
    reference = scores[to]
    return {
        method: {model: score / reference[model] for model, score in each.items()}
        for method, each in scores.items()
    }


def means(scores: Scores) -> dict[str, Sampled]:
    """By method, over models."""
    return {method: mean_of(list(each.values())) for method, each in scores.items()}


def best_post_hoc(scores: Scores) -> str | None:
    """The method with the highest mean over models, inherent ones and baselines aside."""
    found = means({m: each for m, each in scores.items() if m not in {"inherent", *BASELINES}})
    return max(found, key=lambda method: found[method].value) if found else None


def values(scores: Scores) -> dict[str, dict[str, float]]:
    """Without their intervals, for plots."""
    return {
        method: {model: score.value for model, score in each.items()}
        for method, each in scores.items()
    }


def score_rows(family: str, scores: Scores, name: str, others: Mapping[str, Scores]) -> list[Row]:
    """A row a method and model, then one a method with the mean; ``others`` are more columns."""
    rows: list[Row] = []
    for method, each in scores.items():
        for model, score in each.items():
            more = {key: other[method][model] for key, other in others.items()}
            rows.append(_row(family, method, model, name, score, more))
        more = {key: means(other)[method] for key, other in others.items()}
        mean = mean_of(list(each.values()))
        rows.append(_row(family, method, f"{_MEAN}{len(each)}", name, mean, more))
    return rows


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """Of ``score_rows``, those over all models."""
    return [row for row in rows if row["model"].startswith(_MEAN)]


def _row(
    family: str, method: str, model: str, name: str, score: Sampled, more: Mapping[str, Sampled]
) -> Row:
    return {
        "family": family,
        "method": method,
        "model": model,
        **columns(score, name),
        **{key: value.value for key, value in more.items()},
        "measurements": score.count,
    }

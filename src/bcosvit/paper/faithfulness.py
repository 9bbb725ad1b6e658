"""Figures beyond the paper: what its conclusions depend on, and other tests of explanations."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bcosvit.attribution import method_title
from bcosvit.metrics import METRICS
from bcosvit.paper.charts import Chart, grouped_bars
from bcosvit.paper.figures import (
    NOT_MEASURED,
    Figure,
    Headline,
    Outcome,
    Row,
    Scores,
    mean_rows,
    mean_scores,
    measure_scores,
    measure_scores_by_options,
    over_best,
    register_figure,
    score_rows,
)
from bcosvit.paper.measure import measure_run, options_label
from bcosvit.paper.study import RunSpec, Study

SLOPE = "additivity, slope"
"""Of measured over predicted changes: 1 where attributions are changes of the logit."""
FAMILIES = {"bcos": "B-cos", "conventional": "conventional"}


class BothFamilies(Figure):
    """A figure that needs the transformers of both families."""

    measures_weights = True

    def runs(self, study: Study) -> list[RunSpec]:
        return study.both_families()


@register_figure("options")
class Options(BothFamilies):
    """What the conclusions of both metrics depend on."""

    title = "What the conclusions depend on"
    about = (
        "Localization and perturbation with other choices than the paper's: maps smoothed over "
        "15×15 px (as in the authors' public code), images of at least 50 % confidence, removed "
        "pixels black, of the mean color or blurred instead of zero, logits instead of "
        "probabilities, squares instead of pixels. The paper's choice comes first. A ratio above 1 "
        "says that inherent explanations are better than the best post-hoc method."
    )
    sets: ClassVar[dict[str, list[dict[str, Any]]]] = {
        "localization": [
            {},
            {"smooth": 15},
            {"min_confidence": 0.5},
            {"smooth": 15, "min_confidence": 0.5},
        ],
        "perturbation": [
            {},
            {"output": "logit"},
            {"min_confidence": 0.5},
            {"smooth": 15},
            {"smooth": 15, "output": "logit"},
            {"region": 16},
            {"region": 16, "output": "logit"},
            *(
                {"removal": removal, **output}
                for removal in ("black", "mean", "blur")
                for output in ({}, {"output": "logit"})
            ),
        ],
    }
    paper: ClassVar = {"localization": "2.47 (Rollout)", "perturbation": "1.99 (Rollout)"}

    def make(self, study: Study) -> Outcome:
        headlines: list[Headline] = []
        rows: list[Row] = []
        charts: list[Chart] = []
        for metric, sets in self.sets.items():
            both = [measure_scores_by_options(study, each, metric, sets) for each in FAMILIES]
            shown = {}
            for options, bcos, conventional in zip(sets, *both, strict=True):
                label = options_label(options)
                for family, scores in zip(FAMILIES.values(), (bcos, conventional), strict=True):
                    found = score_rows(family, scores, "score")
                    rows += [{"metric": metric, "options": label, **row} for row in found]
                claim = f"{metric.capitalize()}, {label}: inherent ÷ best post-hoc on B-cos ViTs"
                paper = "not given" if options else self.paper[metric]
                lines = {
                    "B-cos ViTs": over_best(claim, paper, bcos, bcos),
                    "conventional ViTs": over_best(claim, paper, bcos, conventional),
                }
                headlines.append(lines["B-cos ViTs"])
                shown[label] = {
                    side: line.value.estimate() for side, line in lines.items() if line.value
                }
            if any(shown.values()):
                caption = (
                    f"{metric.capitalize()}: the mean of inherent explanations of B-cos ViTs over "
                    f"that of the best post-hoc method on B-cos and on conventional ViTs."
                )
                bars = {label: each for label, each in shown.items() if each}
                charts.append(grouped_bars(f"options-{metric}", caption, "ratio", bars))
        return Outcome(headlines=headlines, rows=rows, means=mean_rows(rows), charts=charts)


@register_figure("faithfulness")
class Faithfulness(BothFamilies):
    """Tests of explanations that came after the paper, or that only additive ones can pass."""

    title = "Additivity, deletion and insertion, randomized weights"
    about = (
        "Additivity: how much of the change of the logit, when one of 7×7 regions is removed, the "
        "region's attribution predicts (R² per image, and the slope of that line). Deletion and "
        "insertion: the area between the curves over all pixels, which are replaced by a blurred "
        "image. Randomized weights: how little maps resemble those of a model with shuffled "
        "weights."
    )
    metrics: ClassVar = ("additivity", "deletion_insertion", "randomization")

    def make(self, study: Study) -> Outcome:
        headlines: list[Headline] = []
        rows: list[Row] = []
        charts: list[Chart] = []
        for metric in self.metrics:
            both = {
                title: measure_scores(study, family, metric) for family, title in FAMILIES.items()
            }
            for family, scores in both.items():
                rows += [{"metric": metric, **row} for row in score_rows(family, scores, "score")]
            bcos = both["B-cos"]
            title = METRICS.get(metric).title
            claim = f"{title}: inherent ÷ best post-hoc on B-cos ViTs"
            headlines.append(over_best(claim, "not in the paper", bcos, bcos))
            charts += self._chart(metric, title, both)
        slopes = self._slopes(study)
        rows += slopes
        inherent = [row["score"] for row in slopes if row["method"] == "inherent"]
        claim = "Additivity: slope of inherent explanations, mean over models"
        ours = f"{sum(inherent) / len(inherent):.2f}" if inherent else NOT_MEASURED
        headlines.append(Headline(claim, "not in the paper", ours))
        return Outcome(headlines=headlines, rows=rows, means=mean_rows(rows), charts=charts)

    def _slopes(self, study: Study) -> list[dict[str, Any]]:
        """The slopes of measured over predicted changes, one row per model and method."""
        rows = []
        for family, title in FAMILIES.items():
            for spec in study.configurations(family):
                for seeded in spec.with_seeds(study.seeds):
                    found = measure_run(study, seeded, "additivity")
                    slopes = found["summary"]["slope"] if found and found["scores"] else {}
                    for method, slope in slopes.items():
                        row: dict[str, Any] = {"metric": SLOPE, "family": title, "method": method}
                        row["model"] = spec.short + (f", seed {seeded.seed}" * bool(seeded.seed))
                        row |= {"score": slope["mean"], "score low": slope["low"]}
                        row |= {"score high": slope["high"], "measurements": slope["count"]}
                        rows.append(row)
        return rows

    def _chart(self, metric: str, title: str, both: Mapping[str, Scores]) -> list[Chart]:
        methods: Sequence[str] = list(dict.fromkeys(m for each in both.values() for m in each))
        groups = {
            method_title(method): {
                family: mean_scores(scores)[method].estimate()
                for family, scores in both.items()
                if method in scores
            }
            for method in methods
        }
        return [grouped_bars(metric, f"{title}, means over models.", "score", groups)] * bool(
            groups
        )

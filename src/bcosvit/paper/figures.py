"""The paper's figures: which runs each needs, how they are measured, and what is drawn.

A figure is an object that describes itself. ``register_figure`` makes it known to the command line
and to ``reproduce all``. Other packages register theirs on import, or by an entry point of the
group ``bcosvit.figures``. The qualitative figures are in `bcosvit.paper.qualitative`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from bcosvit.attribution import describe_method, method_title
from bcosvit.metrics import Bootstrap, Resampled
from bcosvit.metrics.grid_pointing import CHANCE
from bcosvit.paper.charts import Chart, grouped_bars, method_markers
from bcosvit.paper.measure import NORMS, measure_options, measure_run, name_of
from bcosvit.paper.runs import run_record
from bcosvit.paper.study import BACKBONE_OF, RunSpec, Study
from bcosvit.registry import Registry
from bcosvit.report.images import Picture

Row = Mapping[str, Any]
"""Of a table: text and plain numbers by column."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Headline:
    """What the paper says, and what was found here."""

    claim: str
    paper: str
    ours: str = NOT_MEASURED
    value: Resampled | None = None
    """The number in ``ours``, where it is one."""

    @classmethod
    def of(
        cls, claim: str, paper: str, value: Resampled | None, form: str = ".3f", note: str = ""
    ) -> "Headline":
        """Writes a number with its interval and a note: ``2.471 [2.300, 2.650] (Rollout)``."""
        if value is None:
            return cls(claim, paper)
        found = value.estimate()
        ours = f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"
        return cls(claim, paper, ours.replace("-", "−") + note, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """A picture of many tiles."""

    name: str
    caption: str
    picture: Picture


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A figure that was made."""

    headlines: Sequence[Headline]
    rows: Sequence[Row] = ()
    """The table; all rows have the same columns."""
    means: Sequence[Row] = ()
    """Those rows that should be read first, where there are many."""
    charts: Sequence[Chart] = ()
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = ()


class Figure(ABC):
    """A figure or an ablation of the paper.

    Example:
        >>> FIGURES.get("maxout").title
        'Ablation of MaxOut'
    """

    name: ClassVar[str] = ""
    """Set by ``register_figure``."""
    title: ClassVar[str] = ""
    about: ClassVar[str] = ""
    """Which figure it is and how to read it, in a few sentences."""
    measures_weights: ClassVar[bool] = False
    """Whether it can also be made of models that are given instead of trained."""

    @abstractmethod
    def runs(self, study: Study) -> list[RunSpec]:
        """Returns the transformers that the figure needs, the most important first."""

    @abstractmethod
    def make(self, study: Study) -> Outcome:
        """Measures the runs where that is necessary, and draws the figure."""


FIGURES: Registry[Figure] = Registry("figure", group="bcosvit.figures")
"""All figures by name, in the order in which ``all`` makes them."""

F = TypeVar("F", bound=type[Figure])


def register_figure(name: str) -> Callable[[F], F]:
    """Class decorator that registers a figure.

    Args:
        name: The name under which users ask for the figure, and that of its folder.

    Raises:
        ValueError: If the name is taken.
    """

    def register(cls: F) -> F:
        cls.name = name
        FIGURES.register(name)(cls())
        return cls

    return register


def number_columns(value: Resampled | None, name: str) -> dict[str, float | None]:
    """Returns a number and its interval as columns of a table."""
    found = None if value is None else value.estimate()
    ends = (None, None, None) if found is None else (found.mean, found.low, found.high)
    return dict(zip((name, f"{name} low", f"{name} high"), ends, strict=True))


def mean_of_known(numbers: Iterable[Resampled | None]) -> Resampled | None:
    """Averages the numbers that are known; None if there is none."""
    known = [number for number in numbers if number is not None]
    return Resampled.mean_of(known) if known else None


# Accuracy: variants of the model are compared on the same images.


@dataclass(frozen=True, kw_only=True, eq=False)
class Top1:
    """The accuracy of one configuration over its seeds."""

    spec: RunSpec
    mean: Resampled
    """Resampled over images, which are the same for every configuration."""
    by_seed: Mapping[int, float]

    @classmethod
    def of(cls, study: Study, spec: RunSpec) -> "Top1 | None":
        """Measures all seeds that were trained; None if there is none."""
        by_seed = {}
        for seeded in spec.with_seeds(study.seeds):
            if (found := measure_run(study, seeded, "accuracy")) is not None:
                by_seed[seeded.seed] = torch.tensor([int(digit) for digit in found["correct"]])
        if not by_seed:
            return None
        mean = Bootstrap().resample(torch.stack(list(by_seed.values())).double().mean(0))
        accuracies = {seed: float(one.double().mean()) for seed, one in by_seed.items()}
        return cls(spec=spec, mean=mean, by_seed=accuracies)

    def row(self, **labels: object) -> dict[str, Any]:
        """Returns a row of the table."""
        each = torch.tensor(list(self.by_seed.values()), dtype=torch.float64)
        return {
            "model": self.spec.model,
            **labels,
            **number_columns(self.mean, "top-1"),
            "images": self.mean.count,
            "seeds": len(each),
            "seed deviation": float(each.std()) if len(each) > 1 else None,
        }


Groups = dict[str, dict[str, Top1]]
"""Accuracies by size and tap (``Ti-38``), then by variant."""


class AccuracyFigure(Figure):
    """A figure that compares variants of the model by their accuracy."""

    column: ClassVar[str]
    """The column of the table that names the variant."""

    @abstractmethod
    def variants(self, study: Study) -> dict[str, list[RunSpec]]:
        """Returns the runs of each variant, for the same sizes and taps in the same order."""

    def runs(self, study: Study) -> list[RunSpec]:
        together = zip(*self.variants(study).values(), strict=True)
        return study.with_seeds(spec for specs in together for spec in specs)

    def measure(self, study: Study) -> Groups:
        """Measures all variants."""
        variants = self.variants(study)
        groups: Groups = {}
        for specs in zip(*variants.values(), strict=True):
            found = {name: Top1.of(study, spec) for name, spec in zip(variants, specs, strict=True)}
            groups[specs[0].short] = {name: top1 for name, top1 in found.items() if top1}
        return groups

    def rows(self, groups: Groups) -> list[dict[str, Any]]:
        """Returns the table, one row per model."""
        every = (item for group in groups.values() for item in group.items())
        return [top1.row(**{self.column: variant}) for variant, top1 in every]

    def chart(self, name: str, caption: str, groups: Groups) -> list[Chart]:
        """Draws the accuracies in percent; nothing where nothing was measured."""
        shown = {
            short: {
                variant: replace(
                    each, mean=100 * each.mean, low=100 * each.low, high=100 * each.high
                )
                for variant, top1 in group.items()
                if (each := top1.mean.estimate())
            }
            for short, group in groups.items()
            if group
        }
        return [grouped_bars(name, caption, "top-1 accuracy, %", shown)] if shown else []


def gain(group: Mapping[str, Top1], variant: str, over: str | None) -> Resampled | None:
    """Returns by how much one variant is more accurate than another; None if one is missing."""
    if over is None or variant not in group or over not in group:
        return None
    return group[variant].mean - group[over].mean


@register_figure("accuracy")
class Accuracy(AccuracyFigure):
    """Accuracy of B-cos and conventional transformers."""

    title = "Accuracy of B-cos and conventional ViTs"
    about = (
        "Three sizes of transformer on frozen features after 13, 38 and 87 layers: B-cos ViTs with "
        "the multiplicative prior on a B-cos DenseNet-121, and conventional ViTs on a conventional "
        "DenseNet-121. Gaps are resampled over the same images for both."
    )
    column = "family"

    def variants(self, study: Study) -> dict[str, list[RunSpec]]:
        bcos, conventional = study.configurations("bcos"), study.configurations("conventional")
        return {"B-cos": bcos, "conventional": conventional}

    def make(self, study: Study) -> Outcome:
        groups = self.measure(study)
        gaps = {short: gain(group, "B-cos", "conventional") for short, group in groups.items()}
        known = [gap for gap in gaps.values() if gap is not None]
        ahead = f"{sum(gap.value >= 0 for gap in known)} of {len(known)}" if known else NOT_MEASURED
        bcos = {short: group["B-cos"].mean for short, group in groups.items() if "B-cos" in group}
        best = max(bcos, key=lambda short: bcos[short].value, default="")
        headlines = [
            Headline(
                "Configurations in which B-cos ViTs are at least as accurate",
                "almost all of 9",
                ahead,
            ),
            Headline.of(
                "Mean of B-cos − conventional, top-1",
                "at least 0 in almost all configurations",
                mean_of_known(known),
                "+.3f",
            ),
            Headline.of(
                "Best B-cos ViT, top-1",
                "(ImageNet; no number in the text)",
                bcos.get(best),
                note=f", {best}",
            ),
        ]
        columns = [
            number_columns(gaps[short], "B-cos − conventional")
            for short, group in groups.items()
            for _ in group
        ]
        caption = "Top-1 accuracy by size and depth of the backbone."
        return Outcome(
            headlines=headlines,
            rows=[{**row, **gap} for row, gap in zip(self.rows(groups), columns, strict=True)],
            charts=self.chart(self.name, caption, groups),
            notes=self._backbones(study),
        )

    def _backbones(self, study: Study) -> list[str]:
        notes = []
        for name in BACKBONE_OF.values():
            if name in study.backbones:
                notes.append(f"The backbone {name} was given: {study.backbones[name]}.")
            elif (record := run_record(study, RunSpec(model=name))) is not None:
                notes.append(
                    f"The backbone {name} on its own reaches {record['final_top1']:.1%} top-1 "
                    f"after {record['epochs']} epochs."
                )
        return notes


# Explanations: methods are compared on each model, and averaged over models.

Scores = dict[str, dict[str, Resampled]]
"""By method, then by model (``Ti-38``)."""

_MEAN = "mean of "


def measure_scores(study: Study, family: str, metric: str) -> Scores:
    """Measures every method on every transformer of a family, and averages over seeds."""
    return measure_scores_by_options(study, family, metric, [{}])[0]


def measure_scores_by_options(
    study: Study, family: str, metric: str, options: Sequence[Mapping[str, Any]]
) -> list[Scores]:
    """Does the same with each of several sets of the metric's options."""
    scores: list[Scores] = [{} for _ in options]
    for number, spec in enumerate(study.configurations(family)):
        found: list[dict[str, list[Resampled]]] = [{} for _ in options]
        for seeded in spec.with_seeds(study.seeds):
            # Each model has its own grids and images, so they are resampled independently.
            bootstrap = Bootstrap(seed=1000 * number + seeded.seed)
            results = measure_options(study, seeded, metric, options)
            for given, result, mine in zip(options, results, found, strict=True):
                if result is None:
                    continue
                for method, values in result["scores"].items():
                    score = bootstrap.resample(values)
                    if method in result["divisors"]:
                        score = score / bootstrap.resample(result["divisors"][method])
                    mine.setdefault(method, []).append(score)
                if not result["scores"]:
                    reason = "too few images are classified correctly"
                    study.missing[f"{name_of(metric, given)} of {seeded.label}"] = reason
        for mine, all_ in zip(found, scores, strict=True):
            for method, each in mine.items():
                all_.setdefault(method, {})[spec.short] = Resampled.mean_of(each)
    return scores


def relative_scores(scores: Scores, to: str) -> Scores:
    """Divides every model's scores by those of one method on it."""
    return {
        method: {model: score / scores[to][model] for model, score in each.items()}
        for method, each in scores.items()
    }


def mean_scores(scores: Scores) -> dict[str, Resampled]:
    """Averages every method's scores over models."""
    return {method: Resampled.mean_of(list(each.values())) for method, each in scores.items()}


def best_post_hoc(scores: Scores) -> str | None:
    """Returns the method with the highest mean that is neither exact nor a baseline."""
    means = mean_scores(scores)
    about = {method: describe_method(method) for method in scores}
    post_hoc = [method for method in scores if not (about[method].exact or about[method].baseline)]
    return max(post_hoc, key=lambda method: means[method].value, default=None)


def score_rows(
    family: str, scores: Scores, name: str, relative: Scores | None = None
) -> list[dict[str, Any]]:
    """Returns the table: per method one row per model, and one with their mean."""
    rows = []
    for method, each in scores.items():
        mean = f"{_MEAN}{len(each)}"
        for model, score in {**each, mean: Resampled.mean_of(list(each.values()))}.items():
            row: dict[str, Any] = {"family": family, "method": method, "model": model}
            row |= number_columns(score, name)
            if relative is not None:
                share = {**relative[method], mean: mean_scores(relative)[method]}[model]
                row |= number_columns(share, "÷ inherent")
            rows.append({**row, "measurements": score.count})
    return rows


def mean_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns those of `score_rows` that average over models."""
    return [row for row in rows if row["model"].startswith(_MEAN)]


def _values(scores: Scores) -> dict[str, dict[str, float]]:
    return {
        method: {model: score.value for model, score in each.items()}
        for method, each in scores.items()
    }


def ratio_line(
    claim: str, paper: str, number: Resampled, divisor: Resampled, what: str, note: str = ""
) -> Headline:
    """Divides one mean by another, called ``what``, unless its interval holds zero."""
    if divisor.estimate().low <= 0:
        return Headline(claim, paper, f"not defined: {what} is not above zero")
    return Headline.of(claim, paper, number / divisor, ".2f", note)


def over_best(claim: str, paper: str, bcos: Scores, others: Scores) -> Headline:
    """Divides the inherent mean on B-cos models by that of the best post-hoc method of ``others``,
    which are the same scores, or those on conventional models."""
    best = best_post_hoc(others)
    if best is None or "inherent" not in bcos:
        return Headline(claim, paper)
    both = mean_scores(bcos)["inherent"], mean_scores(others)[best]
    title = method_title(best)
    return ratio_line(claim, paper, *both, f"the best post-hoc method, {title},", f" ({title})")


def over_rollout(means: Mapping[str, Resampled], best: str | None, paper: str) -> list[Headline]:
    """Compares inherent explanations with the paper's best post-hoc method, if ours is another."""
    if best == "rollout" or not {"inherent", "rollout"} <= means.keys():
        return []
    claim, what = "Inherent ÷ Rollout, the paper's best post-hoc method", "Rollout's mean"
    return [ratio_line(claim, paper, means["inherent"], means["rollout"], what)]


class ScoreFigure(Figure):
    """A figure that compares explanation methods on the B-cos transformers."""

    measures_weights = True

    def runs(self, study: Study) -> list[RunSpec]:
        return study.with_seeds(study.configurations("bcos"))

    def make(self, study: Study) -> Outcome:
        return self.outcome(measure_scores(study, "bcos", self.name))

    @abstractmethod
    def outcome(self, scores: Scores) -> Outcome:
        """Makes the figure from every method's scores on every model."""

    def side(self, ratio: Resampled | None) -> str:
        """Returns the title of the plot, which compares inherent and other explanations."""
        return "B-cos ViTs" + (f", inherent ×{ratio.value:.2f} the best other" if ratio else "")


@register_figure("localization")
class Localization(ScoreFigure):
    """The grid pointing game on the B-cos transformers."""

    title = "Localization of explanations of B-cos ViTs"
    about = (
        "The grid pointing game: four images are shown as one, and each class is explained. A "
        "score is the share of positive attribution that falls on the image of the class. There "
        "is one column per method and one marker per model."
    )

    def outcome(self, scores: Scores) -> Outcome:
        claim = "Inherent ÷ best post-hoc method, means over models"
        headline = over_best(claim, "2.47 (Rollout)", scores, scores)
        means, best, inherent = mean_scores(scores), best_post_hoc(scores), scores.get("inherent")
        each = None
        if best is not None and inherent is not None:
            of_model = {
                model: {m: {model: s[model]} for m, s in scores.items()} for model in inherent
            }
            own = {model: best_post_hoc(some) or best for model, some in of_model.items()}
            shares = [score / scores[own[model]][model] for model, score in inherent.items()]
            each = Resampled.mean_of(shares)
        headlines = [
            headline,
            Headline.of(
                "The same with the best method of each model, then averaged",
                "not given",
                each,
                ".2f",
            ),
            Headline.of(
                "Inherent localization, mean over models",
                "(only in the plot)",
                means.get("inherent"),
            ),
            *over_rollout(means, best, "2.47"),
        ]
        if not scores:
            return Outcome(headlines=headlines)
        relative = None if inherent is None else relative_scores(scores, "inherent")
        rows = score_rows("B-cos", scores, "localization", relative)
        caption = (
            "Share of positive attribution in the right cell. Dashed: mean over models; dotted: "
            "chance."
        )
        sides = {self.side(headline.value): _values(scores)}
        chart = method_markers(self.name, caption, "localization", sides, chance=CHANCE)
        return Outcome(headlines=headlines, rows=rows, means=mean_rows(rows), charts=[chart])


@register_figure("perturbation")
class Perturbation(ScoreFigure):
    """Pixel perturbation on the B-cos transformers."""

    title = "Pixel perturbation by explanations of B-cos ViTs"
    about = (
        "Up to a quarter of the pixels are zeroed, the most important first and the least "
        "important first. The larger the area between the two curves of confidence (ABC), the "
        "better the explanation orders the pixels. The plot follows probabilities, as the paper "
        "does. The table also has the areas between curves of the logit, which does not saturate."
    )
    options: ClassVar = {"probability": {}, "logit": {"output": "logit"}}

    def make(self, study: Study) -> Outcome:
        found = measure_scores_by_options(study, "bcos", self.name, list(self.options.values()))
        made = dict(zip(self.options, map(self.outcome, found), strict=True))
        rows = [{"output": output, **row} for output, each in made.items() for row in each.rows]
        paper = made["probability"]
        by_logit = [
            replace(line, claim=f"{line.claim}, by the logit", paper="not given")
            for line in made["logit"].headlines
        ]
        headlines = [*paper.headlines, *by_logit]
        return replace(paper, headlines=headlines, rows=rows, means=mean_rows(rows))

    def outcome(self, scores: Scores) -> Outcome:
        claim = "Inherent ÷ best post-hoc method, normalized areas, means over models"
        paper = "1.99 (Rollout)"
        inherent = scores.get("inherent", {})
        below = [model for model, score in inherent.items() if score.value <= 0]
        if not inherent or below:
            # Nothing can be divided by the inherent area, so the areas alone are shown.
            rows = score_rows("B-cos", scores, "ABC")
            reason = f"not defined: the inherent area is not positive on {', '.join(below)}"
            headline = Headline(claim, paper, reason if below else NOT_MEASURED)
            return Outcome(headlines=[headline], rows=rows, means=mean_rows(rows))
        # As in the paper, areas are normalized per model before they are averaged.
        relative = relative_scores(scores, "inherent")
        headline = over_best(claim, paper, relative, relative)
        best = best_post_hoc(relative)
        headlines = [headline, *over_rollout(mean_scores(relative), best, "1.99")]
        rows = score_rows("B-cos", scores, "ABC", relative)
        caption = (
            "Area between the curves, divided by that of the inherent explanation of the same "
            "model. Dashed: mean over models."
        )
        sides = {self.side(headline.value): _values(relative)}
        chart = method_markers(self.name, caption, "ABC ÷ inherent ABC", sides)
        return Outcome(headlines=headlines, rows=rows, means=mean_rows(rows), charts=[chart])


@register_figure("conventional")
class Conventional(Figure):
    """Explanations of B-cos and conventional transformers by both metrics."""

    measures_weights = True
    title = "Explanations of B-cos and conventional ViTs"
    about = (
        "Inherent and post-hoc explanations of B-cos ViTs (left) and post-hoc explanations of "
        "conventional ViTs (right), including those by LRP, by localization and perturbation."
    )
    paper: ClassVar = {"localization": "2.32 (IntGrad)", "perturbation": "“much higher” (FinAtt)"}
    columns: ClassVar = {"localization": "localization", "perturbation": "ABC"}

    def runs(self, study: Study) -> list[RunSpec]:
        return study.both_families()

    def make(self, study: Study) -> Outcome:
        families = ("bcos", "conventional")
        return self.outcome(
            {
                metric: [measure_scores(study, family, metric) for family in families]
                for metric in self.paper
            }
        )

    def outcome(self, found: Mapping[str, Sequence[Scores]]) -> Outcome:
        """Makes the figure from the scores of B-cos and of conventional models by metric."""
        rows: list[Row] = [
            {"metric": self.columns[metric], **row}
            for metric, both in found.items()
            for family, scores in zip(("B-cos", "conventional"), both, strict=True)
            for row in score_rows(family, scores, "score")
        ]
        claim = "Inherent on B-cos ÷ best post-hoc on conventional ViTs"
        headlines = {
            metric: over_best(f"{claim}, {metric}", self.paper[metric], *both)
            for metric, both in found.items()
        }
        return Outcome(
            headlines=list(headlines.values()),
            rows=rows,
            means=mean_rows(rows),
            charts=[
                *self._localization_chart(*found["localization"]),
                *self._area_chart(found["perturbation"], headlines["perturbation"].value),
            ],
            notes=[
                "Areas between curves are compared across models here, which may differ in how "
                "stable they are; the paper advises caution, too."
            ],
        )

    def _localization_chart(self, bcos: Scores, conventional: Scores) -> list[Chart]:
        both = {"B-cos ViTs": _values(bcos), "conventional ViTs": _values(conventional)}
        sides = {side: scores for side, scores in both.items() if scores}
        caption = "Localization by family. Dashed: mean over models; dotted: chance."
        name, axis = "localization-families", "localization"
        return [method_markers(name, caption, axis, sides, chance=CHANCE)] if sides else []

    def _area_chart(self, both: Sequence[Scores], ratio: Resampled | None) -> list[Chart]:
        """As in the paper, divides by the best method per model, then scales the right side."""
        bcos, conventional = both
        best = best_post_hoc(conventional)
        if ratio is None or best is None or ratio.value <= 0:
            return []
        scaled = {
            method: {model: value / ratio.value for model, value in each.items()}
            for method, each in _values(relative_scores(conventional, best)).items()
        }
        caption = (
            f"Areas between curves, divided by that of the inherent explanation of the same model "
            f"(left), or by that of {method_title(best)} and times the ratio of both methods' "
            f"means (right)."
        )
        left = _values(relative_scores(bcos, "inherent"))
        sides = {"B-cos ViTs": left, "conventional ViTs": scaled}
        return [method_markers("perturbation-families", caption, "ABC, relative", sides)]


# Ablations.


@register_figure("positional")
class Positional(AccuracyFigure):
    """Accuracy by positional information."""

    title = "Accuracy by positional information"
    about = (
        "B-cos ViTs of three sizes on features after 87 layers: without positional information, "
        "with an additive embedding (emb), with an additive (add) and with a multiplicative (mul) "
        "attention prior."
    )
    column = "position"

    def variants(self, study: Study) -> dict[str, list[RunSpec]]:
        # The last is the default, whose runs are shared with other figures.
        options = {each: {"position": each} for each in ("none", "emb", "add")} | {"mul": {}}
        return {
            name: study.configurations("bcos", taps=("87",), **each)
            for name, each in options.items()
        }

    def make(self, study: Study) -> Outcome:
        groups = self.measure(study)
        headlines = []
        for short, group in groups.items():
            others = {position: top1.mean for position, top1 in group.items() if position != "mul"}
            best = max(others, key=lambda position: others[position].value, default=None)
            claim = f"Gain in top-1 by the multiplicative prior, {short}"
            paper, note = "significantly better, consistently", f" over {best}, the best other"
            headlines.append(Headline.of(claim, paper, gain(group, "mul", best), "+.3f", note))
        charts = self.chart(self.name, "Top-1 accuracy by positional information.", groups)
        return Outcome(headlines=headlines, rows=self.rows(groups), charts=charts)


@register_figure("attention")
class AttentionAblation(AccuracyFigure):
    """Where LayerNorm stands, and B of the value and output projections."""

    title = "Ablation of the attention module"
    about = (
        "ViT-S on three depths with standard attention, with LayerNorm shifted to queries and keys "
        "alone (with B=1 in V and U, so that nothing else differs), and with B=2. Beside the "
        "accuracy: how much larger the skip branch is than what attention adds to it."
    )
    column = "attention"
    # The last is the default, whose runs are shared with other figures.
    options: ClassVar[dict[str, dict[str, Any]]] = {
        "standard": {"attention": "standard"},
        "shifted, B=1": {"attention_b": 1.0},
        "shifted, B=2": {},
    }
    paper: ClassVar = {
        "standard": "several orders of magnitude; 10⁵ at 13 layers",
        "shifted, B=2": "about 10⁰",
    }

    def variants(self, study: Study) -> dict[str, list[RunSpec]]:
        return {
            name: study.configurations("bcos", sizes=("s",), **options)
            for name, options in self.options.items()
        }

    def make(self, study: Study) -> Outcome:
        groups = self.measure(study)
        ratios = {
            short: {
                variant: ratio
                for variant, top1 in group.items()
                if (ratio := branch_ratio(study, top1.spec)) is not None
            }
            for short, group in groups.items()
        }
        # A variant is shown where both its accuracy and its norms are known.
        groups = {s: {name: groups[s][name] for name in each} for s, each in ratios.items()}
        columns = [
            number_columns(ratio, "skip ÷ attention")
            for each in ratios.values()
            for ratio in each.values()
        ]
        charts = self.chart(self.name, "Top-1 accuracy by kind of attention.", groups)
        if columns:
            caption = (
                "Norm of the skip branch over that of the attention branch, geometric mean over "
                "layers, tokens and images."
            )
            shown = {
                short: {variant: ratio.estimate() for variant, ratio in each.items()}
                for short, each in ratios.items()
                if each
            }
            axis = "‖skip‖ ÷ ‖attention‖"
            charts.append(grouped_bars("branches", caption, axis, shown, logarithmic=True))
        gains = [
            Headline.of(
                f"Gain in top-1 by the shifted LayerNorm (B=2), {short}",
                "significantly better, most on shallow backbones",
                gain(group, "shifted, B=2", "standard"),
                "+.3f",
            )
            for short, group in groups.items()
        ]
        norms = [
            Headline.of(
                f"Skip ÷ attention branch, {variant}, {short}", paper, each.get(variant), ".3g"
            )
            for short, each in ratios.items()
            for variant, paper in self.paper.items()
        ]
        rows = [{**row, **more} for row, more in zip(self.rows(groups), columns, strict=True)]
        return Outcome(headlines=[*gains, *norms], rows=rows, charts=charts)


def branch_ratio(study: Study, spec: RunSpec) -> Resampled | None:
    """Measures the geometric mean of `branch_ratios` over the seeds that were trained."""
    found = [measure_run(study, seeded, NORMS) for seeded in spec.with_seeds(study.seeds)]
    logs = [Bootstrap().resample(each["log_ratio"]) for each in found if each is not None]
    return Resampled.mean_of(logs).exp() if logs else None


@register_figure("maxout")
class MaxOut(AccuracyFigure):
    """Accuracy with and without MaxOut."""

    title = "Ablation of MaxOut"
    about = (
        "B-cos ViTs with two units per output and with one unit, which have as many parameters as "
        "a conventional ViT, and conventional ViTs."
    )
    column = "variant"
    captions: ClassVar = {
        "maxout-with": "B-cos ViTs with and without MaxOut in the transformer.",
        "maxout-conventional": "B-cos ViTs without MaxOut, and conventional ViTs.",
    }

    def variants(self, study: Study) -> dict[str, list[RunSpec]]:
        return {
            "B-cos, MaxOut 2": study.configurations("bcos"),
            "B-cos, no MaxOut": study.configurations("bcos", maxout=1),
            "conventional": study.configurations("conventional"),
        }

    def make(self, study: Study) -> Outcome:
        groups, names = self.measure(study), list(self.variants(study))
        charts: list[Chart] = []
        for (chart, caption), pair in zip(
            self.captions.items(), (names[:2], names[1:]), strict=True
        ):
            some = {s: {n: group[n] for n in pair if n in group} for s, group in groups.items()}
            charts += self.chart(chart, caption, some)
        gains: dict[str, list[Resampled | None]] = {}
        for short, group in groups.items():
            gains.setdefault(short.split("-")[0], []).append(gain(group, *names[:2]))
        headlines = [
            Headline.of(
                f"Gain in top-1 by MaxOut, {size}, mean over depths",
                "significant" if size == "Ti" else "the gap closes: on par without MaxOut",
                mean_of_known(each),
                "+.3f",
            )
            for size, each in gains.items()
        ]
        return Outcome(headlines=headlines, rows=self.rows(groups), charts=charts)

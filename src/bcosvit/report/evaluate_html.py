"""The report of `bcosvit evaluate`: what was measured, by method, as tables and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcosvit.attribution import method_title
from bcosvit.data.dataset import Skipped
from bcosvit.metrics import Estimate, Evaluation, Localization, Masked, Perturbation
from bcosvit.metrics.localization import CHANCE
from bcosvit.report.evaluate_table import completeness, metric_columns
from bcosvit.report.html import (
    Html,
    definitions,
    element,
    figure,
    foot,
    page,
    paragraph,
    table,
    text,
)
from bcosvit.report.plots import bars, curves, legend

METRICS = {
    "accuracy": "Accuracy",
    "localization": "Grid pointing game",
    "perturbation": "Pixel perturbation",
    "masks": "Masks",
}
"""What can be measured, and what a page calls it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationAbout:
    """What a page says beside the numbers."""

    facts: Mapping[str, str]
    """Model, weights, data."""
    config: Mapping[str, Any]
    command: str
    versions: Mapping[str, str]
    left_out: Mapping[str, str]
    """Metrics that do not apply, and why."""
    skipped: Sequence[Skipped]
    """Pictures that could not be read."""


def evaluate_page(path: str | Path, found: Evaluation, about: EvaluationAbout) -> None:
    """Writes the report; the tables it links to lie beside it (`Evaluation.write`)."""
    settings = found.settings
    level = settings["bootstrap"]["level"]
    lead = Html(
        definitions(about.facts)
        + paragraph(
            f"Every number is a mean with its {level:.0%} interval, by resampling images (whole "
            "grids in the grid pointing game)."
        )
    )
    ending = foot(about.command, about.config, about.versions)
    with page(path, "How right the model and its explanations are", lead, ending) as write:
        write(_overview(found, settings["methods"]))
        write(_accuracy(found))
        if found.localization is not None:
            write(_localization(found.localization))
        if found.perturbation is not None:
            write(_perturbation(found.perturbation))
        if found.masks is not None:
            write(_masks(found.masks))
        if about.left_out:
            rows = [(METRICS[name], reason) for name, reason in about.left_out.items()]
            write(_section("Not measured", table("And why.", ("Metric", "Reason"), rows)))
        if about.skipped:
            skipped = [(item.key, item.reason) for item in about.skipped]
            unread = table(f"{len(skipped)} left out.", ("File", "Reason"), skipped)
            write(_section("Pictures that could not be read", unread))


def _overview(found: Evaluation, methods: Sequence[str]) -> Html:
    """Every metric by every method, the best of each metric in bold."""
    columns = metric_columns(found)
    if not columns:
        return Html("")
    best = {
        name: max(values, key=lambda method: values[method].mean) if values else None
        for name, values in columns.items()
    }
    rows = [
        [
            method_title(method),
            *(
                _estimate(values.get(method), bold=best[name] == method)
                for name, values in columns.items()
            ),
        ]
        for method in methods
    ]
    whole = table(
        "Higher is better everywhere; the best of a column is bold.",
        ("Method", *columns),
        rows,
        numbers=range(1, 1 + len(columns)),
        chosen=[number for number, method in enumerate(methods) if method == "inherent"],
    )
    complete = found.completeness
    added = [] if complete is None else [paragraph(f"Contributions {completeness(complete)}.")]
    return _section("Every metric by every method", whole, *added)


def _accuracy(found: Evaluation) -> Html:
    accuracy = found.accuracy
    rows = [("Top 1", _estimate(accuracy.top1)), ("Top 5", _estimate(accuracy.top5))]
    about = f"The share of {len(accuracy.predictions)} images whose class is among the first."
    return _section(
        METRICS["accuracy"], table(about, ("", "Share"), rows, numbers=(1,)), _link("accuracy")
    )


def _localization(found: Localization) -> Html:
    about = (
        f"Four images in one picture: the share of a class's positive attribution that falls on "
        f"its own image. {len(found.grids)} grids of {found.game.grids} asked for; they end when "
        f"fewer than four classes have correctly classified images left."
    )
    if not found.grids:
        return _section(METRICS["localization"], paragraph(about))
    chart = bars("localization", "share in the right cell", found.means, chance=CHANCE)
    return _section(
        METRICS["localization"], paragraph(about), _charts(chart), _link("localization")
    )


def _perturbation(found: Perturbation) -> Html:
    metric = found.metric
    about = (
        f"Up to {metric.share:.0%} of the pixels are zeroed in the model's own encoding, in the "
        f"order of their attribution, in the {len(found.images)} most confident correct images of "
        f"{metric.images} asked for. Confidence in the true class, relative to its start, should "
        f"fall when the most important pixels go, and stay when the least important ones do: the "
        f"area between the two curves (ABC) measures both."
    )
    if not found.images:
        return _section(METRICS["perturbation"], paragraph(about))
    shares = [100 * share for share in metric.shares]
    titles = {"most": "The most important pixels go first", "least": "The least important ones do"}
    lines = [
        figure(
            curves(
                f"curves-{order}",
                ("% of pixels removed", "confidence, relative"),
                shares,
                {method: both[order] for method, both in found.curves.items()},
            ),
            element("b", text(words)),
        )
        for order, words in titles.items()
    ]
    areas = figure(
        bars("abc", "area between the curves", found.abc), element("b", text("Area between them"))
    )
    return _section(
        METRICS["perturbation"],
        paragraph(about),
        legend(list(found.curves)),
        element("div", *lines, areas, class_="charts"),
        _link("perturbation"),
    )


def _masks(found: Masked) -> Html:
    about = (
        f"{len(found.images)} images whose object is known to the pixel, explained for their true "
        f"class; {found.without} more have no mask. Energy is the share of the positive "
        f"attribution on the object; pointing asks whether the strongest pixel lies on it."
    )
    if found.chance is None:
        return _section(METRICS["masks"], paragraph(about))
    charts = [
        bars(
            score,
            words,
            {method: each[score] for method, each in found.means.items()},
            chance=found.chance.mean,
        )
        for score, words in {"energy": "energy in the mask", "pointing": "pointing"}.items()
    ]
    return _section(METRICS["masks"], paragraph(about), _charts(*charts), _link("masks"))


def _section(heading: str, *content: Html) -> Html:
    name = heading.lower().replace(" ", "-")
    top = element("h2", text(heading), id=name)
    return element("section", top, *content, aria_labelledby=name)


def _charts(*charts: Html) -> Html:
    return element("div", *(element("figure", chart) for chart in charts), class_="charts")


def _link(name: str) -> Html:
    file = element("a", text(f"{name}.csv"), href=f"{name}.csv")
    return element("p", text("Image by image: "), file, class_="soft")


def _estimate(value: Estimate | None, *, bold: bool = False) -> Html:
    if value is None:
        return text("–")
    mean = element("b" if bold else "span", text(f"{value.mean:.3f}".replace("-", "−")))
    interval = f"{value.low:.3f} to {value.high:.3f}".replace("-", "−")
    return Html(mean + element("small", text(interval)))

"""The report of `bcosvit evaluate`: what was measured, by method, as tables and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcosvit.attribution import method_title
from bcosvit.data.dataset import Skipped
from bcosvit.metrics import METRICS, BarChart, Chart, CurveChart, Estimate, Evaluation, MetricResult
from bcosvit.report.evaluate_table import metric_columns
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
        for name, result in found.results.items():
            write(_metric(name, result))
        if about.left_out:
            rows = [(METRICS.get(name).title, reason) for name, reason in about.left_out.items()]
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
    added = [] if complete is None else [paragraph(f"Contributions {complete}.")]
    return _section("Every metric by every method", whole, *added)


def _metric(name: str, result: MetricResult) -> Html:
    """A metric's own words, numbers and charts."""
    parts = [paragraph(result.about())]
    if facts := result.facts():
        rows = [(title, _estimate(value)) for title, value in facts.items()]
        parts.append(table("", ("", "Share"), rows, numbers=(1,)))
    if charts := result.charts():
        drawn = [_chart(chart) for chart in charts]
        if any(isinstance(chart, CurveChart) for chart in charts):
            parts.append(
                legend([method for values in result.columns().values() for method in values])
            )
        parts.append(element("div", *drawn, class_="charts"))
    if facts or charts:
        parts.append(_link(name))
    return _section(METRICS.get(name).title, *parts)


def _chart(chart: Chart) -> Html:
    if isinstance(chart, BarChart):
        return element("figure", bars(chart.name, chart.axis, chart.values, chance=chart.chance))
    drawn = curves(chart.name, (chart.x_axis, chart.y_axis), chart.positions, chart.curves)
    return figure(drawn, element("b", text(chart.title)))


def _section(heading: str, *content: Html) -> Html:
    name = heading.lower().replace(" ", "-")
    top = element("h2", text(heading), id=name)
    return element("section", top, *content, aria_labelledby=name)


def _link(name: str) -> Html:
    file = element("a", text(f"{name}.csv"), href=f"{name}.csv")
    return element("p", text("Image by image: "), file, class_="soft")


def _estimate(value: Estimate | None, *, bold: bool = False) -> Html:
    if value is None:
        return text("–")
    mean = element("b" if bold else "span", text(f"{value.mean:.3f}".replace("-", "−")))
    interval = f"{value.low:.3f} to {value.high:.3f}".replace("-", "−")
    return Html(mean + element("small", text(interval)))

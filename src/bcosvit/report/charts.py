"""Charts for pages: matplotlib draws them as SVG, and the page's style sheet colors them.

Charts are inlined, so that they are sharp at any size and follow a page from light to dark: the
one color `INK` becomes ``currentColor``, and text stays text in the page's font. The identifiers
and addresses that matplotlib writes into files of their own are removed.
"""

import io
import re
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from bcosvit.attribution import describe_method, method_title
from bcosvit.metrics import BarChart, Chart, CurveChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""The color of text and lines, which becomes that of the page."""


def draw_chart(chart: Chart) -> Markup:
    """Draws a chart of a metric.

    Args:
        chart: One of the charts that `MetricResult.charts` returns. Its name is unique on the page.

    Returns:
        The chart as SVG.
    """
    return draw_bars(chart) if isinstance(chart, BarChart) else draw_curves(chart)


def draw_bars(chart: BarChart) -> Markup:
    """Draws one bar per method with its interval, the highest first."""
    ordered = sorted(chart.values.items(), key=lambda item: item[1].mean)
    name, axis, chance = chart.name, chart.axis, chart.chance
    with chart_style(name):
        figure, axes = _axes(0.8 + 0.33 * len(ordered))
        for place, (method, value) in enumerate(ordered):
            axes.barh(place, value.mean, 0.66, color=method_color(method))
            axes.plot([value.low, value.high], [place, place], color=INK, linewidth=1.2)
        if chance is not None:
            axes.axvline(chance, color=INK, linestyle=(0, (3, 3)), linewidth=1)
        else:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.locator_params(axis="x", nbins=4)
        axes.set_yticks(range(len(ordered)), [method_title(method) for method, _ in ordered])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(axis if chance is None else f"{axis} (dashed: chance, {chance:.2g})")
        figures = ", ".join(f"{method_title(m)} {value.mean:.3f}" for m, value in reversed(ordered))
        return inlined_svg(figure, name, f"Bar chart of {axis}: {figures}.")


def draw_curves(chart: CurveChart) -> Markup:
    """Draws one curve per method, with a band for its interval."""
    with chart_style(chart.name):
        figure, axes = _axes(3.6)
        for method, points in chart.curves.items():
            color = method_color(method)
            axes.fill_between(
                chart.positions,
                [point.low for point in points],
                [point.high for point in points],
                color=color,
                alpha=0.12,
                linewidth=0,
            )
            axes.plot(
                chart.positions,
                [point.mean for point in points],
                color=color,
                linewidth=2.4 if describe_method(method).exact else 1.4,
                linestyle=(0, (4, 2)) if describe_method(method).baseline else "solid",
            )
        axes.set_xlabel(chart.x_axis)
        axes.set_ylabel(chart.y_axis)
        axes.margins(x=0.01)
        # Zero is always in view, so that charts side by side can be compared.
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        ends = ", ".join(
            f"{method_title(method)} {points[-1].mean:.3f}"
            for method, points in chart.curves.items()
        )
        alt = f"{chart.y_axis} by {chart.x_axis}, at the end: {ends}."
        return inlined_svg(figure, chart.name, alt)


def method_color(method: str) -> str:
    """Returns the color of a method in charts."""
    return describe_method(method).color


def chart_style(name: str) -> AbstractContextManager[None]:
    """Returns matplotlib's settings for a chart; ``name`` makes its identifiers reproducible."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            # Otherwise identifiers differ each time that a chart is drawn.
            "svg.hashsalt": name,
            "font.size": 11,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def _axes(height: float) -> "tuple[Figure, Axes]":
    # Without pyplot there is no global state and no need for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    axes = figure.subplots()
    axes.patch.set_visible(False)
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def inlined_svg(figure: "Figure", name: str, alt: str) -> Markup:
    """Converts a matplotlib figure to SVG for a page.

    Args:
        figure: The figure, drawn within `chart_style`.
        name: Unique on the page.
        alt: The text for readers who do not see the chart.

    Returns:
        The ``<svg>`` element.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # A page has several charts, whose identifiers must differ.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))

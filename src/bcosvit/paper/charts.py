"""The two kinds of plots in the paper's figures, as files and as parts of a page."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING

from markupsafe import Markup

from bcosvit.attribution import method_title
from bcosvit.metrics import Estimate
from bcosvit.report.charts import INK, chart_style, inlined_svg, method_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = ("#d0342c", "#2f7ed8", "#c98a10", "#6b9a1f")
"""Colors of bars that are not methods, in order."""

_GRAY = "#8a8a94"
_MARKERS = {"Ti": "o", "S": "s", "B": "^"}
_OTHER_MARKERS = "DvPX*"
_LABEL_CHARACTERS = 10
"""Below a group of bars; longer labels take several lines."""
_LEGEND_INCHES = 1.0
"""The width of one model in a legend."""
_WIDE_INCHES = 6.5
_TAP_ALPHA = {"13": 0.35, "38": 0.65, "87": 1.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """A plot as SVG and PNG files, and as SVG for a page."""

    name: str
    caption: str
    inline: Markup
    svg: bytes
    png: bytes
    wide: bool = False
    """Whether it needs the whole width of a page."""


def grouped_bars(
    name: str,
    caption: str,
    axis: str,
    groups: Mapping[str, Mapping[str, Estimate]],
    *,
    series: Sequence[str] = (),
    logarithmic: bool = False,
) -> Chart:
    """Draws bars with intervals.

    Args:
        name: The name of the files; unique on the page.
        caption: What the chart shows.
        axis: The title of the vertical axis.
        groups: Values by group, then by series.
        series: The first ones, in this order; by default that in which they come.
        logarithmic: Whether the vertical axis is logarithmic.
    """
    from matplotlib.figure import Figure

    shown_series = {key for bars in groups.values() for key in bars}
    first = [key for key in series if key in shown_series]
    series = list(dict.fromkeys([*first, *(key for bars in groups.values() for key in bars)]))
    colors = dict(zip(series, SERIES, strict=False))
    width = 0.8 / max(1, len(series))
    with chart_style(name):
        figure = Figure(figsize=(max(4.5, 1.6 + 0.75 * len(groups)), 3.4), layout="constrained")
        axes = figure.subplots()
        for place, bars in enumerate(groups.values()):
            for key, shown in bars.items():
                at = place + (series.index(key) - (len(series) - 1) / 2) * width
                axes.bar(at, shown.mean, 0.92 * width, color=colors.get(key, _GRAY))
                axes.plot([at, at], [shown.low, shown.high], color=INK, linewidth=1.2)
        axes.set_xticks(range(len(groups)), [fill(name, _LABEL_CHARACTERS) for name in groups])
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(axis)
        if logarithmic:
            axes.set_yscale("log")
            _plain_numbers(axes)
        _grid(axes)
        _legend(figure, {key: colors.get(key, _GRAY) for key in series})
        values = "; ".join(
            f"{group}: " + ", ".join(f"{key} {shown.mean:.3g}" for key, shown in bars.items())
            for group, bars in groups.items()
        )
        return _chart(figure, name, caption, f"Bar chart of {axis}. {values}.")


def _plain_numbers(axes: "Axes") -> None:
    """Labels a short logarithmic axis by 0.5, 1 and 2 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def method_markers(
    name: str,
    caption: str,
    axis: str,
    sides: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    chance: float | None = None,
) -> Chart:
    """Draws one marker per method and model, a dashed line at each method's mean, and a dotted one
    at chance.

    Args:
        name: The name of the files; unique on the page.
        caption: What the chart shows.
        axis: The title of the vertical axis.
        sides: Values by side of the chart, by method, then by model, e.g. ``Ti-38``.
        chance: What guessing scores, where that means something.
    """
    from matplotlib.figure import Figure

    models = [m for methods in sides.values() for values in methods.values() for m in values]
    looks = _looks(list(dict.fromkeys(models)))
    with chart_style(name):
        figure = Figure(figsize=(5.2 * len(sides), 3.8), layout="constrained")
        both = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
        for axes, (side, methods) in zip(both, sides.items(), strict=True):
            means = {
                method: sum(values.values()) / len(values) for method, values in methods.items()
            }
            order = sorted(means, key=lambda method: -means[method])
            for place, method in enumerate(order):
                _markers(axes, place, method, methods[method], means[method], looks)
            axes.set_xticks(range(len(order)), [_short(method) for method in order], rotation=30)
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
            if chance is not None:
                axes.axhline(chance, color=INK, linestyle=(0, (1, 3)), linewidth=1)
            axes.set_title(side, fontsize=11)
            _grid(axes)
        both[0].set_ylabel(axis)
        both[0].set_ylim(bottom=min(0, both[0].get_ylim()[0]))
        _shapes(figure, looks)
        values = "; ".join(
            f"{side}: "
            + ", ".join(
                f"{method_title(m)} {sum(v.values()) / len(v):.3f}" for m, v in methods.items()
            )
            for side, methods in sides.items()
        )
        return _chart(figure, name, caption, f"Markers of {axis} by method, means: {values}.")


_Looks = Mapping[str, tuple[str, float]]
"""The marker of each model, and how opaque it is."""


def _looks(models: Sequence[str]) -> _Looks:
    """Shapes for sizes and shades for depths; models that are not the paper's have other shapes."""
    others = cycle(_OTHER_MARKERS)
    looks = {}
    for model in models:
        size, _, tap = model.partition("-")
        known = size in _MARKERS and tap in _TAP_ALPHA
        looks[model] = (_MARKERS[size], _TAP_ALPHA[tap]) if known else (next(others), 1.0)
    return looks


def _markers(
    axes: "Axes", place: int, method: str, values: Mapping[str, float], mean: float, looks: _Looks
) -> None:
    color = method_color(method)
    for number, (model, value) in enumerate(values.items()):
        marker, alpha = looks[model]
        aside = (number - (len(values) - 1) / 2) * 0.6 / max(1, len(values))
        axes.plot(place + aside, value, marker, color=color, alpha=alpha, ms=6)
    axes.plot([place - 0.4, place + 0.4], [mean, mean], "--", color=color, linewidth=1.6)


def _short(method: str) -> str:
    return "Inherent" if method == "inherent" else method_title(method)


def _shapes(figure: "Figure", looks: _Looks) -> None:
    from matplotlib.lines import Line2D

    models = list(looks)
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=_GRAY, alpha=alpha)
        for marker, alpha in looks.values()
    ]
    fitting = int(figure.get_figwidth() / _LEGEND_INCHES)
    # In one row, or with one column per size: matplotlib fills columns first.
    columns = len(models) if len(models) <= fitting else len({m.split("-")[0] for m in models})
    figure.legend(
        handles, models, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def _legend(figure: "Figure", colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color) for color in colors.values()]
    longest = max((len(name) for name in colors), default=0)
    # A character takes about a twelfth of an inch, the patch and the gaps as much as eight.
    fitting = int(12 * figure.get_figwidth() / (longest + 8))
    columns = max(1, min(4, fitting))
    figure.legend(handles, list(colors), loc="outside upper center", ncols=columns, frameon=False)


def _grid(axes: "Axes") -> None:
    axes.patch.set_visible(False)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)


def _chart(figure: "Figure", name: str, caption: str, alt: str) -> Chart:
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
    # The layout is known now; computing it takes most of the time.
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    return Chart(
        name=name,
        caption=caption,
        inline=inlined_svg(figure, name, alt),
        svg=svg.getvalue(),
        png=png.getvalue(),
        wide=figure.get_figwidth() > _WIDE_INCHES,
    )

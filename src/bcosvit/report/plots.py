"""Charts for pages: matplotlib draws them, the page's style colors them.

They are inlined as SVG, so that they are sharp at any size and follow a page from light to dark:
what matplotlib is told to draw in one peculiar ink becomes ``currentColor``, and text is text in
the page's font. Names and addresses that matplotlib writes into files of their own are taken out.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from bcosvit.attribution import METHODS, method_title
from bcosvit.report.html import Html, element, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
_OTHERS = "#8a8a94"


class Interval(Protocol):
    """A mean with its interval, such as an ``Estimate``."""

    @property
    def mean(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def bars(
    name: str, axis: str, means: Mapping[str, Interval], *, chance: float | None = None
) -> Html:
    """A bar a method with its interval, the highest first; ``chance`` is a dashed line."""
    ordered = sorted(means.items(), key=lambda item: item[1].mean)
    with style(name):
        figure, axes = _axes(0.8 + 0.33 * len(ordered))
        for place, (method, value) in enumerate(ordered):
            axes.barh(place, value.mean, 0.66, color=color_of(method))
            axes.plot([value.low, value.high], [place, place], color=INK, linewidth=1.2)
        if chance is not None:
            axes.axvline(chance, color=INK, linestyle=(0, (3, 3)), linewidth=1)
        else:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(ordered)), [method_title(method) for method, _ in ordered])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(axis if chance is None else f"{axis} (dashed: chance, {chance:.2g})")
        figures = ", ".join(f"{method_title(m)} {value.mean:.3f}" for m, value in reversed(ordered))
        return inlined_svg(figure, name, f"Bar chart of {axis}: {figures}.")


def curves(
    name: str,
    axes_labels: tuple[str, str],
    positions: Sequence[float],
    lines: Mapping[str, Sequence[Interval]],
) -> Html:
    """A line a method over ``positions``, with a band for its interval."""
    with style(name):
        figure, axes = _axes(3.6)
        for method, points in lines.items():
            color = color_of(method)
            axes.fill_between(
                positions,
                [point.low for point in points],
                [point.high for point in points],
                color=color,
                alpha=0.12,
                linewidth=0,
            )
            axes.plot(
                positions,
                [point.mean for point in points],
                color=color,
                linewidth=2.4 if _is(method, "exact") else 1.4,
                linestyle=(0, (4, 2)) if _is(method, "baseline") else "solid",
            )
        axes.set_xlabel(axes_labels[0])
        axes.set_ylabel(axes_labels[1])
        axes.margins(x=0.01)
        # Zero is always in view, so that charts side by side can be compared.
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        ends = ", ".join(f"{method_title(m)} {points[-1].mean:.3f}" for m, points in lines.items())
        return inlined_svg(
            figure, name, f"{axes_labels[1]} by {axes_labels[0]}, at the end: {ends}."
        )


def legend(methods: Sequence[str]) -> Html:
    """Which color is which method's, for charts that share it."""
    items = [
        element(
            "li",
            element("i", style=f"background: {color_of(method)}"),
            text(method_title(method)),
        )
        for method in methods
    ]
    return element("ul", *items, class_="legend")


def color_of(method: str) -> str:
    """Returns the color of a method in charts."""
    return METHODS.get(method).color if method in METHODS else _OTHERS


def _is(method: str, what: str) -> bool:
    return method in METHODS and bool(getattr(METHODS.get(method), what))


def style(name: str) -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            # Else a chart would have other names inside each time it is drawn.
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
    # Without pyplot there is no global state, and no display is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    axes = figure.subplots()
    axes.patch.set_visible(False)
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def inlined_svg(figure: "Figure", name: str, alt: str) -> Html:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # A page holds several charts, whose inner names must not meet.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    return Html(svg.replace("<svg", f'<svg role="img" aria-label="{text(alt)}"', 1))

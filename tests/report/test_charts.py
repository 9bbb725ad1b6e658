"""Charts as SVG that fits into a page."""

import itertools
import re

from bcosvit.metrics import BarChart, CurveChart, Estimate
from bcosvit.report.charts import draw_chart
from tests.report.support import Page


def estimate(mean: float) -> Estimate:
    return Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1, count=5)


MEANS = {"inherent": estimate(0.6), "random": estimate(0.25), "Rollout(start=<1>)": estimate(0.3)}


def charts() -> list[str]:
    lines = {method: [value, estimate(0.1)] for method, value in MEANS.items()}
    return [
        draw_chart(BarChart(name="one", axis="share", values=MEANS, chance=0.25)),
        draw_chart(BarChart(name="two", axis="area", values=MEANS)),
        draw_chart(
            CurveChart(
                name="three",
                title="",
                x_axis="% removed",
                y_axis="confidence",
                positions=[0, 25],
                curves=lines,
            )
        ),
    ]


def test_several_charts_live_in_one_page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<div>" + "".join(charts()) + "</div>", "utf-8")
    page = Page(path)
    assert page.tags.count("svg") == 3
    assert not re.search(r"https?:|xmlns|<\?xml|<!DOCTYPE", page.source)
    for link in re.findall(r'(?:url\(|href=")#([\w-]+)', page.source):
        assert link in page.ids


def test_charts_are_read_out_and_follow_the_page():
    first = charts()[0]
    assert 'role="img"' in first
    assert "Inherent contributions 0.600" in first
    assert "Rollout(start=&lt;1&gt;) 0.300" in first
    assert "currentColor" in first
    assert "#010203" not in first
    # Text stays text.
    assert re.search(r"<text[^>]*>Random map</text>", first)


def test_charts_are_drawn_alike_every_time():
    assert charts() == charts()


def test_the_highest_comes_first():
    order = re.findall(r"<text[^>]*>(Inherent contributions|Random map)</text>", charts()[0])
    # Matplotlib counts upwards, so what is drawn last stands on top.
    assert order == ["Random map", "Inherent contributions"]


def test_ticks_of_small_numbers_do_not_overlap():
    """In the size in which they are drawn, with titles of methods beside them."""
    small = {
        "inherent": Estimate(mean=0.001, low=-0.0043, high=0.0041, count=3),
        "smoothgrad": Estimate(mean=0.0066, low=0.006, high=0.0073, count=3),
    }
    drawn = draw_chart(BarChart(name="one", axis="area", values=small))
    ticks = re.findall(r' x="([\d.]+)"[^>]*>[^<\d]*[\d.]+</text>', drawn)
    places = sorted(map(float, ticks))
    assert len(places) >= 2
    # A text of seven characters in 11 points.
    assert min(b - a for a, b in itertools.pairwise(places)) > 7 * 0.65 * 11

"""Reports in a real browser: no error, no request, nothing beyond the edge, at two widths.

Screenshots are saved in the folder that BCOSVIT_SCREENSHOTS names.
"""

from pathlib import Path

import pytest

from bcosvit.report.evaluate import write_report
from bcosvit.report.explain import explain_pictures
from bcosvit.report.provenance import Provenance
from tests.browser import chromium, open_page, screenshot
from tests.report.made import evaluation
from tests.report.support import write_pictures, write_weights

pytestmark = pytest.mark.slow

LONG = "a-name-without-a-single-space-" * 6


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    """One of each kind, with names that are too long, bad pictures, and every method."""
    folder = tmp_path_factory.mktemp("reports")
    pictures = write_pictures(folder / "pictures", 3)
    (pictures / "0000.png").rename(pictures / f"{LONG}.png")
    (pictures / f"broken-{LONG}.png").write_bytes(b"not a picture")
    classes = ("cat", LONG, "sea star", "<i>mouse</i>", "tench, Tinca tinca")
    made = {}
    for family in ("bcos", "conventional"):
        weights = write_weights(folder / f"{family}.safetensors", family=family, classes=classes)
        made[family] = folder / f"{family}.html"
        explain_pictures([pictures], weights, top=2, methods="all", out=made[family])
    made["evaluate"] = folder / "evaluate.html"
    write_report(
        made["evaluate"],
        evaluation(),
        facts={"Model": "B-cos vision transformer, 5 classes", "Weights": f"{LONG}.safetensors"},
        provenance=Provenance(
            command=f"bcosvit evaluate --weights {LONG}",
            versions={"bcosvit": "1"},
            config={"key": LONG},
        ),
        left_out={"masks": "the data have no masks"},
    )
    return made


OVERFLOWING = """() => {
    const edge = document.documentElement.clientWidth + 1;
    return [...document.querySelectorAll("body *")]
        .filter(e => !e.closest(".scroll") || e.matches(".scroll"))
        .filter(e => e.getBoundingClientRect().right > edge)
        .map(e => e.tagName + "." + e.className.toString());
}"""
"""Elements that reach beyond the right edge, except those inside a box that scrolls."""

FONT_SIZES = """() => [...document.querySelectorAll("p, td, th, figcaption, dd, pre, h2, .scale")]
    .map(e => parseFloat(getComputedStyle(e).fontSize))"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["bcos", "conventional", "evaluate"])
def test_reports_in_chromium(browser, reports, kind, width, dark):
    with open_page(browser, width, dark=dark) as page:
        page.goto(reports[kind].as_uri())
        assert page.addresses == [reports[kind].as_uri()]
        assert page.problems == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(OVERFLOWING) == []
        unread = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
        assert page.evaluate(unread) == 0
        assert min(page.evaluate(FONT_SIZES)) >= 12
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 20, 22)") == dark
        screenshot(page, f"{kind}-{width}-{'dark' if dark else 'light'}")

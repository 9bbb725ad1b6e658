"""Reports in a real browser: no error, no request, nothing beyond the edge, at two widths.

Screenshots are left in the folder that BCOSVIT_SCREENSHOTS names, to be looked at.
"""

import os
from pathlib import Path

import pytest

from bcosvit.report.evaluate_html import EvaluationAbout, evaluate_page
from bcosvit.report.explain import explain_pictures
from tests.browser import Browser, browser
from tests.report.made import evaluation
from tests.report.support import write_pictures, write_weights

pytestmark = pytest.mark.slow

LONG = "a-name-without-a-single-space-" * 6


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
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
    about = EvaluationAbout(
        facts={"Model": "B-cos vision transformer, 5 classes", "Weights": f"{LONG}.safetensors"},
        config={"key": LONG},
        command=f"bcosvit evaluate --weights {LONG}",
        versions={"bcosvit": "1"},
        left_out={"masks": "the data have no masks"},
        skipped=(),
    )
    evaluate_page(made["evaluate"], evaluation(), about)
    return made


def overflowing(page: Browser) -> list[str]:
    """Elements that reach beyond the right edge, but for those inside a box that scrolls."""
    return page.run(
        """
        const edge = document.documentElement.clientWidth + 1;
        return [...document.querySelectorAll("body *")]
            .filter(e => !e.closest(".scroll") || e.matches(".scroll"))
            .filter(e => e.getBoundingClientRect().right > edge)
            .map(e => e.tagName + "." + e.className.toString());
        """
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["bcos", "conventional", "evaluate"])
def test_reports_in_chromium(chromium, reports, kind, width, dark):
    chromium.run("document.open(); document.close();")
    chromium.requests(), chromium.logged("browser")
    chromium.open(reports[kind], width, dark=dark)
    asked = [url for url in chromium.requests() if not url.startswith("data:")]
    assert asked == [reports[kind].as_uri()]
    assert chromium.logged("browser") == []
    assert chromium.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert overflowing(chromium) == []
    # Every picture was decoded, and text is large enough to be read.
    unread = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert chromium.run(unread) == 0
    sizes = """
        return [...document.querySelectorAll("p, td, th, figcaption, dd, pre, h2, .scale")]
            .map(e => parseFloat(getComputedStyle(e).fontSize));
    """
    assert min(chromium.run(sizes)) >= 12
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 20, 22)") == dark
    if folder := os.environ.get("BCOSVIT_SCREENSHOTS"):
        height = chromium.run("return document.documentElement.scrollHeight")
        chromium.resize(width, min(height, 3400))
        name = f"{kind}-{width}-{'dark' if dark else 'light'}.png"
        chromium.screenshot(Path(folder, name))

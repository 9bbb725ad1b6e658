"""The page in a real browser, as people use it: with a mouse, a keyboard, a telephone.

Screenshots are left in the folder that BCOSVIT_SCREENSHOTS names, to be looked at.
"""

import base64
import json
import os
import re
import shutil
import time
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from bcosvit.report.explained import TITLES
from bcosvit.web.answers import Box
from tests.browser import Browser, browser
from tests.report.support import CLASSES, Page, write_pictures
from tests.web.support import proxied, serving, small_answers

TAB, ENTER, RIGHT, SPACE = "\ue004", "\ue007", "\ue014", " "


@pytest.fixture(scope="module")
def started():
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("Chromium and its driver are not installed (chromium, chromium-driver).")
    with browser() as chromium:
        yield chromium


@pytest.fixture
def page(started, address):
    """The page anew; whatever a test does, nothing is asked of another host."""
    started.open("about:blank", 1280)
    started.requests()
    started.open(address, 1280)
    yield started
    asked = [url for url in started.requests() if not url.startswith(("data:", "blob:"))]
    assert asked
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(address).netloc}


def upload(page: Browser, *paths: Path) -> None:
    page.type("#upload input[type=file]", "\n".join(map(str, paths)))


def shown(page: Browser, count: int = 4) -> None:
    page.until(f"return document.querySelectorAll('#views figure').length === {count}")


def words(page: Browser, selector: str) -> str:
    return page.run(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''")


def says(page: Browser, selector: str, text: str) -> None:
    found = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
    page.until(f"return {found}.includes({json.dumps(text)})")


def sources(page: Browser, selector: str) -> list[str]:
    images = f"document.querySelectorAll({json.dumps(selector + ' img')})"
    return page.run(f"return [...{images}].map(image => image.src)")


def facts(page: Browser, selector: str) -> dict[str, float]:
    """Names and numbers of a list of facts."""
    pairs = page.run(
        f"const of = tag => [...document.querySelectorAll({json.dumps(selector)} + ' ' + tag)]"
        ".map(e => e.innerText); return [of('dt'), of('dd')];"
    )
    numbers = [float(value.replace("−", "-").rstrip(" %")) for value in pairs[1]]
    return dict(zip(pairs[0], numbers, strict=True))


def shot(page: Browser, name: str, width: int) -> None:
    if folder := os.environ.get("BCOSVIT_SCREENSHOTS"):
        height = page.run("return document.documentElement.scrollHeight")
        page.resize(width, min(height, 3400))
        page.run("scrollTo(0, 0)")
        page.screenshot(Path(folder, f"serve-{name}-{width}.png"))


def test_a_photo_gets_classes_and_an_explanation(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    found = answers.predict(answers.open(pictures[0]))
    names = page.run(
        "return [...document.querySelectorAll('#classes button b')].map(e => e.innerText)"
    )
    assert names == [CLASSES[label] for label in found.surest(5)]
    assert "%" in words(page, "#classes button")
    assert words(page, "#title").startswith(names[0])


@pytest.mark.slow
class TestFlows:
    """What a page is used for."""

    def test_dropping_and_pasting(self, page, pictures):
        data = base64.b64encode(pictures[0].read_bytes()).decode()
        given = f"""
            const bytes = Uint8Array.from(atob("{data}"), c => c.charCodeAt(0));
            const file = new File([bytes], "given.png", {{type: "image/png"}});
            const transfer = new DataTransfer();
            transfer.items.add(file);
        """
        page.until("return document.querySelector('#upload button') !== null")
        page.run(
            given
            + """const drop = new DragEvent("drop", {dataTransfer: transfer, bubbles: true});
            document.querySelector("#upload button").dispatchEvent(drop);"""
        )
        shown(page)
        page.call("refresh")
        page.until("return document.querySelector('#upload input[type=file]') !== null")
        says(page, ".empty", "paste one")
        # Until the page listens.
        page.until(
            given
            + """document.dispatchEvent(
                new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true}));
            return document.querySelectorAll("#views figure").length === 4;"""
        )

    def test_choosing_a_class(self, page, answers, pictures):
        upload(page, pictures[0])
        shown(page)
        before = sources(page, "#views")
        second = answers.predict(answers.open(pictures[0])).surest(2)[1]
        page.click("#classes button:nth-child(2)")
        says(page, "#title", CLASSES[second])
        after = sources(page, "#views")
        # The photo is the same; its map, overlay and colours are not.
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]
        pressed = "return document.querySelector('#classes [aria-pressed=true] b').innerText"
        assert page.run(pressed) == CLASSES[second]

    def test_completeness_is_shown_as_a_number(self, page, answers, pictures):
        upload(page, pictures[1])
        shown(page)
        picture = answers.open(pictures[1])
        sums = answers.sums(picture, answers.predict(picture).surest(1)[0])
        got = facts(page, "#sums")
        assert got["Σ contributions"] == pytest.approx(sums.contributions, abs=1e-3)
        assert got["+ bias"] == pytest.approx(sums.bias, abs=1e-4)
        total = got["Σ contributions"] + got["+ residual"] + got["+ bias"]
        assert total == pytest.approx(got["= logit"], abs=2e-4)
        assert got["off by"] < 1e-3

    def test_comparing_methods(self, page, answers, pictures):
        upload(page, pictures[0])
        shown(page)
        for number, method in enumerate(answers.methods[1:], start=1):
            page.click(f"#methods label:nth-of-type({number}) input")
            says(page, "#compared", TITLES[method])
        assert len(set(sources(page, "#compared"))) == len(answers.methods) - 1
        page.click("#methods label:nth-of-type(1) input")
        page.until("return !document.querySelector('#compared').innerText.includes('Input ×')")

    def test_overlay_and_scale(self, page, answers, pictures):
        upload(page, pictures[0])
        shown(page)
        picture = answers.open(pictures[0])
        label = answers.predict(picture).surest(3)[2]
        page.click("#classes button:nth-child(3)")
        says(page, "#title", CLASSES[label])
        own, joint = (answers.explain(picture, label, joint=j).scale for j in (False, True))
        says(page, "#views .scale", f"+{own:.2g}")
        page.click("#scale label:nth-of-type(2) input")
        says(page, "#views .scale", f"+{joint:.2g}")
        before = sources(page, "#views")
        page.click("#overlay input[type=range]")
        page.press(RIGHT)
        last = f"return document.querySelectorAll('#views img')[2].src !== {json.dumps(before[2])}"
        page.until(last)
        assert sources(page, "#views")[1] == before[1]

    def test_regions_by_dragging_clicking_and_typing(self, page, answers, pictures):
        upload(page, pictures[0])
        shown(page)
        says(page, "#region", "No region yet")
        picture = answers.open(pictures[0])
        label = answers.predict(picture).surest(1)[0]

        def measured() -> Box:
            """The box in the fields, once the numbers shown are those of the model for it."""
            page.until("return document.querySelectorAll('#region dd').length === 5")
            edges = page.run(
                "return ['x', 'y', 'width', 'height'].map(name =>"
                " Number(document.querySelector(`#box-${name} input`).value))"
            )
            expected = answers.region(picture, label, Box.of(edges))
            says(page, "#region", f"{expected.together:+.3f}"[:-1].replace("-", "−"))
            got = facts(page, "#region")
            assert got["for"] == pytest.approx(expected.positive, abs=1e-3)
            assert got["against"] == pytest.approx(expected.negative, abs=1e-3)
            assert got["of the evidence"] == pytest.approx(100 * expected.share, abs=0.1)
            return Box.of(edges)

        page.drag("#views figure:nth-child(2) .stage", (0.26, 0.13), (0.74, 0.6))
        says(page, "#region", "for")
        assert measured() == Box(x=4, y=2, width=8, height=8)
        # The box is seen on every picture.
        drawn = "document.querySelectorAll('#views rect')"
        widths = page.run(f"return [...{drawn}].map(each => each.getAttribute('width'))")
        assert set(widths) == {"8"}
        page.drag("#views figure .stage", (0.53, 0.53), (0.53, 0.53))
        page.until("return document.querySelector('#box-width input').value === '2'")
        assert measured() == Box(x=7, y=7, width=2, height=2)
        page.type("#box-width input", "\ue003" * 3 + "\ue017" * 3 + "5")
        page.until("return +document.querySelector('#views rect').getAttribute('width') === 5")
        assert measured() == Box(x=7, y=7, width=5, height=2)
        page.type("#box-width input", "0")
        says(page, "#region", "beyond the picture of 16×16 pixels")

    def test_several_pictures_with_a_broken_one(self, page, answers, pictures, tmp_path):
        (tmp_path / "<img src=x onerror=alert(1)>.png").write_bytes(b"no picture")
        upload(page, *pictures, tmp_path / "<img src=x onerror=alert(1)>.png")
        shown(page)
        buttons = "return document.querySelectorAll('#pictures button').length"
        assert page.run(buttons) == 3
        assert "is not a picture of a known format" in words(page, "#pictures [role=alert]")
        for number, path in enumerate(pictures, start=1):
            label = answers.predict(answers.open(path)).surest(1)[0]
            button = f"#pictures button:nth-child({number})"
            page.click(button)
            page.until(
                "const of = selector => document.querySelector(selector + ' img').src;"
                f"return of('#views') === of('{button}')"
            )
            says(page, "#title", CLASSES[label])
        # A choice is remembered with its picture.
        chosen = answers.predict(answers.open(pictures[2])).surest(4)[3]
        page.click("#classes button:nth-child(4)")
        says(page, "#title", CLASSES[chosen])
        page.click("#pictures button:nth-child(1)")
        says(page, "#title", CLASSES[answers.predict(answers.open(pictures[0])).surest(1)[0]])
        page.click("#pictures button:nth-child(3)")
        says(page, "#title", CLASSES[chosen])

    def test_nothing_but_a_broken_one_and_then_a_good_one(self, page, pictures, tmp_path):
        (tmp_path / "broken.png").write_bytes(b"no picture")
        upload(page, tmp_path / "broken.png")
        says(page, "#pictures [role=alert]", "broken.png is not a picture of a known format")
        says(page, ".empty", "Drop photos")
        # Told once: where the picture would be, and not in a message over the page as well.
        assert words(page, "body").count("is not a picture") == 1
        page.click("#upload [aria-label=Clear]")
        page.until("return !document.querySelector('#pictures [role=alert]')")
        upload(page, pictures[0])
        shown(page)
        page.click("#upload [aria-label=Clear]")
        page.until("return !document.querySelector('#results')?.checkVisibility()")
        says(page, ".empty", "Drop photos")

    def test_too_many_pictures(self, page, tmp_path):
        upload(page, *sorted(write_pictures(tmp_path / "many", 5).iterdir()))
        says(page, "body", "5 pictures are too many at once: give at most 4.")

    def test_any_class(self, page, pictures):
        upload(page, pictures[0])
        shown(page)
        page.click("#other input")
        page.type("#other input", "sea")
        page.press(ENTER)
        says(page, "#title", "sea star")

    def test_downloads(self, page, pictures, tmp_path):
        page.develop("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        upload(page, *pictures[:2])
        shown(page)
        page.click("#classes button:nth-child(2)")
        name = "return document.querySelector('#classes button:nth-child(2) b').innerText"
        chosen = page.run(name)
        says(page, "#title", chosen)
        page.click("#methods label:nth-of-type(2) input")
        says(page, "#compared", "IntGrad")
        for kind, ending in (("html", "html"), ("npz", "zip"), ("png", "png")):
            page.click(f"#save-{kind}")
            path, end = tmp_path / f"bcosvit.{ending}", time.monotonic() + 30
            while not path.exists():
                assert time.monotonic() < end, f"No {path.name} was saved."
                time.sleep(0.05)
        report = Page(tmp_path / "bcosvit.html")
        report.assert_self_contained()
        assert "IntGrad" in report.text
        with zipfile.ZipFile(tmp_path / "bcosvit.zip") as archive:
            first, _ = archive.namelist()
            with archive.open(first) as file, np.load(file) as arrays:
                assert arrays["classes"].tolist() == [chosen]
                assert {"map_inherent", "map_intgrad", "weights"} <= set(arrays)
        with Image.open(tmp_path / "bcosvit.png") as image:
            assert image.width > 4 * 192

    def test_the_api_is_described_without_help_from_elsewhere(self, page):
        page.click("footer button")
        says(page, "body", "/explain")
        assert "/look" not in words(page, "body")

    def test_two_visitors_see_their_own(self, page, answers, address, pictures):
        upload(page, pictures[0])
        shown(page)
        first = page.call("window/new", type="tab")["handle"]
        own = page.run("return document.querySelector('#views img').src")
        handles = page.call_get("window/handles")
        page.call("window", handle=first)
        page.open(address, 1280)
        upload(page, pictures[1])
        shown(page)
        assert page.run("return document.querySelector('#views img').src") != own
        page.call("window", handle=next(each for each in handles if each != first))
        page.click("#classes button:nth-child(2)")
        label = answers.predict(answers.open(pictures[0])).surest(2)[1]
        says(page, "#title", CLASSES[label])
        assert page.run("return document.querySelector('#views img').src") == own


@pytest.mark.slow
class TestEverybody:
    """Those without a mouse, with a small screen, in the dark."""

    def test_by_keyboard_alone(self, page, pictures):
        upload(page, *pictures[:2])
        shown(page)
        page.click("h1")
        controls = [
            *("upload", "pictures", "classes", "other", "overlay", "scale", "box-x", "box-y"),
            *("box-width", "box-height", "methods", "save-html", "save-npz", "save-png"),
        ]
        reached = []
        for _ in range(80):
            page.press(TAB)
            here = page.run(
                f"""const e = document.activeElement, s = getComputedStyle(e);
                const inside = {json.dumps(controls)}
                    .find(id => document.getElementById(id).contains(e));
                const focus = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2;
                return [e.tagName, inside ?? "", focus];"""
            )
            if here[0] == "BODY":
                break
            reached.append(here)
        # In the order in which they stand.
        assert list(dict.fromkeys(place for _, place, _ in reached if place)) == controls
        assert [each for each in reached if not each[2]] == []
        nodes = page.develop("Accessibility.getFullAXTree")["nodes"]
        named = {
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node["ignored"]
            and any(p["name"] == "focusable" and p["value"]["value"] for p in node["properties"])
        }
        assert [role for role, name in named if not name] == []
        assert len(named) > 25
        # A class is chosen with Enter, and the focus stays where it was.
        page.run("document.querySelector('#classes button:nth-child(2)').focus()")
        chosen = page.run("return document.activeElement.querySelector('b').innerText")
        page.press(ENTER)
        says(page, "#title", chosen)
        assert page.run("return document.activeElement.querySelector('b')?.innerText") == chosen

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390])
    def test_screens(self, page, address, pictures, width, dark):
        page.open(address, width, dark=dark)
        says(page, ".empty", "Drop photos")
        scheme = "dark" if dark else "light"
        shot(page, f"empty-{scheme}", width)
        page.resize(width, 900)
        upload(page, *pictures)
        shown(page)
        page.click("#methods label:nth-of-type(5) input")
        says(page, "#compared", "Rollout")
        page.drag("#views .stage", (0.3, 0.3), (0.7, 0.6))
        says(page, "#region", "for")
        assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        beyond = """
            const edge = document.documentElement.clientWidth + 1;
            return [...document.querySelectorAll("main *")]
                .filter(e => e.getBoundingClientRect().right > edge && e.checkVisibility())
                .map(e => e.tagName + "." + e.className.toString());
        """
        assert page.run(beyond) == []
        unread = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
        assert page.run(unread) == 0
        assert _contrasts(page) == []
        ground = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (_light(ground) < 0.2) == dark
        shot(page, scheme, width)

    def test_conventional_models_are_not_said_to_be_exact(self, started, tmp_path, pictures):
        answers = small_answers(tmp_path, family="conventional")
        (tmp_path / "server").mkdir()
        with serving(answers.subject.weights, folder=tmp_path / "server") as address:
            started.open(address, 1280)
            upload(started, pictures[0])
            shown(started, 3)
            says(started, "#title", "%")
            assert "Does it add up?" not in words(started, "body")
            assert "W(x)" not in words(started, "body")
            shot(started, "conventional", 1280)
            started.open("about:blank", 1280)


@pytest.mark.slow
def test_behind_a_proxy(started, answers, pictures, tmp_path):
    """What the page needs is asked for below the path that the proxy shows."""
    with (
        serving(answers.subject.weights, "--root-path", "/explain", folder=tmp_path) as address,
        proxied(address) as shown_at,
    ):
        started.open("about:blank", 1280)
        started.requests()
        started.open(shown_at, 1280)
        upload(started, pictures[0])
        shown(started)
        asked = [url for url in started.requests() if not url.startswith(("data:", "blob:"))]
        below = shown_at.removesuffix("/")
        beside = {urlsplit(url).path for url in asked if not url.startswith(below)}
        # What Gradio's page and the browser ask a host for, wherever the page is; a 404 will do.
        assert beside <= {"/manifest.json", "/favicon.ico"}
        started.open("about:blank", 1280)


def _contrasts(page: Browser) -> list[str]:
    """Own texts that are too faint for their ground (WCAG AA: 4.5)."""
    pairs = page.run(
        """
        const colour = (e, name) => getComputedStyle(e)[name];
        const ground = e => {
            for (; e; e = e.parentElement) {
                const found = colour(e, "backgroundColor");
                if (!/, 0\\)$|transparent/.test(found)) return found;
            }
            return "rgb(255, 255, 255)";
        };
        return [...document.querySelectorAll("h1, h2, h3, .soft, .hint, dt, dd, figcaption, b")]
            .filter(e => e.checkVisibility())
            .map(e => [e.innerText, colour(e, "color"), ground(e)]);
        """
    )
    assert pairs
    faint = []
    for text, ink, ground in pairs:
        low, high = sorted((_light(ink), _light(ground)))
        if (high + 0.05) / (low + 0.05) < 4.5:
            faint.append(f"{text}: {ink} on {ground}")
    return faint


def _light(colour: str) -> float:
    """Relative luminance, from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

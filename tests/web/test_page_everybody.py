"""The page for those without a mouse, with a small screen, in the dark, or behind a proxy.

Screenshots are left in the folder that BCOSVIT_SCREENSHOTS names, to be looked at.
"""

import json
import re
from urllib.parse import urlsplit

import pytest

from tests.browser import Browser
from tests.web.support import proxied, serving, small_answers
from tests.web.visitor import ENTER, TAB, says, shot, shown, upload, words

pytestmark = pytest.mark.slow


def test_by_keyboard_alone(page, pictures):
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
def test_screens(page, address, pictures, width, dark):
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


def test_conventional_models_are_not_said_to_be_exact(started, tmp_path, pictures):
    answers = small_answers(tmp_path, family="conventional")
    (tmp_path / "server").mkdir()
    with serving(answers.predictor.weights, folder=tmp_path / "server") as address:
        started.open(address, 1280)
        upload(started, pictures[0])
        shown(started, 3)
        says(started, "#title", "%")
        assert "Does it add up?" not in words(started, "body")
        assert "W(x)" not in words(started, "body")
        shot(started, "conventional", 1280)
        started.open("about:blank", 1280)


def test_behind_a_proxy(started, answers, pictures, tmp_path):
    """What the page needs is asked for below the path that the proxy shows."""
    with (
        serving(answers.predictor.weights, "--root-path", "/explain", folder=tmp_path) as address,
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
        const color = (e, name) => getComputedStyle(e)[name];
        const ground = e => {
            for (; e; e = e.parentElement) {
                const found = color(e, "backgroundColor");
                if (!/, 0\\)$|transparent/.test(found)) return found;
            }
            return "rgb(255, 255, 255)";
        };
        return [...document.querySelectorAll("h1, h2, h3, .soft, .hint, dt, dd, figcaption, b")]
            .filter(e => e.checkVisibility())
            .map(e => [e.innerText, color(e, "color"), ground(e)]);
        """
    )
    assert pairs
    faint = []
    for text, ink, ground in pairs:
        low, high = sorted((_light(ink), _light(ground)))
        if (high + 0.05) / (low + 0.05) < 4.5:
            faint.append(f"{text}: {ink} on {ground}")
    return faint


def _light(color: str) -> float:
    """Relative luminance, from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

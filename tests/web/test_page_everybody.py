"""The page for those without a mouse, with a small screen, in the dark, or behind a proxy.

Screenshots are saved in the folder that BCOSVIT_SCREENSHOTS names.
"""

import re
from urllib.parse import urlsplit

import pytest

from tests.browser import open_page, screenshot
from tests.web.support import proxied, serving, small_service
from tests.web.visitor import drag, says, shown, upload

pytestmark = pytest.mark.slow

CONTROLS = [
    *("upload", "pictures", "classes", "other", "overlay", "scale", "box-x", "box-y"),
    *("box-width", "box-height", "methods", "save-html", "save-npz", "save-png"),
]
FOCUSED = """controls => {
    const e = document.activeElement, s = getComputedStyle(e);
    const inside = controls.find(id => document.getElementById(id).contains(e));
    const outlined = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2;
    return [e.tagName, inside ?? "", outlined];
}"""


def test_by_keyboard_alone(page, pictures):
    upload(page, *pictures[:2])
    shown(page)
    page.click("h1")
    reached = []
    for _ in range(80):
        page.keyboard.press("Tab")
        here = page.evaluate(FOCUSED, CONTROLS)
        if here[0] == "BODY":
            break
        reached.append(here)
    # In the order in which they are on the page.
    assert list(dict.fromkeys(place for _, place, _ in reached if place)) == CONTROLS
    assert [each for each in reached if not each[2]] == []
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in tree["nodes"]
        if not node["ignored"]
        and any(p["name"] == "focusable" and p["value"]["value"] for p in node["properties"])
    }
    assert [role for role, name in named if not name] == []
    assert len(named) > 25
    # A class is chosen with Enter, and the focus stays where it was.
    page.focus("#classes button:nth-child(2)")
    chosen = page.locator("#classes button:nth-child(2) b").inner_text()
    page.keyboard.press("Enter")
    says(page, "#title", chosen)
    assert page.evaluate("document.activeElement.querySelector('b')?.innerText") == chosen


BEYOND = """() => {
    const edge = document.documentElement.clientWidth + 1;
    return [...document.querySelectorAll("main *")]
        .filter(e => e.getBoundingClientRect().right > edge && e.checkVisibility())
        .map(e => e.tagName + "." + e.className.toString());
}"""


CUT = """() => [...document.querySelectorAll("#box input")].filter(input => {
    const [style, canvas] = [getComputedStyle(input), document.createElement("canvas")];
    const context = canvas.getContext("2d");
    context.font = style.font;
    const room = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    // Browsers reserve the width of arrows where a field of numbers shows them.
    return room - (style.appearance == "textfield" ? 0 : 16) < context.measureText("224").width;
}).map(input => input.closest("[id]").id)"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_screens(browser, address, pictures, width, dark):
    scheme = "dark" if dark else "light"
    with open_page(browser, width, dark=dark) as page:
        page.goto(address)
        says(page, ".empty", "Drop photos")
        screenshot(page, f"serve-empty-{scheme}-{width}")
        upload(page, *pictures)
        shown(page)
        page.click("#methods label:nth-of-type(5) input")
        says(page, "#compared", "Rollout")
        drag(page, "#views .stage", (0.3, 0.3), (0.7, 0.6))
        says(page, "#region", "For the class")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(BEYOND) == []
        unread = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
        assert page.evaluate(unread) == 0
        assert faint_texts(page) == []
        assert page.evaluate(CUT) == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(ground) < 0.2) == dark
        screenshot(page, f"serve-{scheme}-{width}")


def test_conventional_models_are_not_said_to_be_exact(browser, tmp_path, pictures):
    service = small_service(tmp_path, family="conventional")
    (tmp_path / "server").mkdir()
    with (
        serving(service.predictor.weights, folder=tmp_path / "server") as address,
        open_page(browser) as page,
    ):
        page.goto(address)
        upload(page, pictures[0])
        shown(page, 3)
        says(page, "#title", "%")
        text = page.locator("body").inner_text()
        assert "sum to the logit?" not in text
        assert "W(x)" not in text
        screenshot(page, "serve-conventional-1280")


def test_behind_a_proxy(browser, service, pictures, tmp_path):
    """All requests go below the path that the proxy shows."""
    with (
        serving(service.predictor.weights, "--root-path", "/explain", folder=tmp_path) as address,
        proxied(address) as shown_at,
        open_page(browser) as page,
    ):
        page.goto(shown_at)
        upload(page, pictures[0])
        shown(page)
        below = shown_at.removesuffix("/")
        beside = {urlsplit(url).path for url in page.addresses if not url.startswith(below)}
        # Gradio's page and the browser ask each host for these; they may be missing.
        assert beside <= {"/manifest.json", "/favicon.ico"}


COLORS = """() => {
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
}"""


def faint_texts(page) -> list[str]:
    """Texts whose contrast is too low (WCAG AA: 4.5)."""
    pairs = page.evaluate(COLORS)
    assert pairs
    faint = []
    for text, ink, ground in pairs:
        low, high = sorted((luminance(ink), luminance(ground)))
        if (high + 0.05) / (low + 0.05) < 4.5:
            faint.append(f"{text}: {ink} on {ground}")
    return faint


def luminance(color: str) -> float:
    """Relative luminance, from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

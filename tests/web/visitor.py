"""What a visitor does and sees on the page in a browser."""

import json
import os
from pathlib import Path

from tests.browser import Browser

TAB, ENTER, RIGHT = "\ue004", "\ue007", "\ue014"


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

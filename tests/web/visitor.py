"""What a visitor does and sees on the page in a browser."""

from pathlib import Path
from typing import Any


def expect(found: Any) -> Any:
    """Playwright's assertions, which wait; imported late, since it may not be installed."""
    from playwright.sync_api import expect

    # The page waits for the model, which takes long on a busy machine.
    expect.set_options(timeout=30_000)
    return expect(found)


def upload(page: Any, *paths: Path) -> None:
    page.locator("#upload input[type=file]").set_input_files([str(path) for path in paths])


def shown(page: Any, count: int = 4) -> None:
    """Waits until so many pictures are shown."""
    expect(page.locator("#views figure")).to_have_count(count)


def says(page: Any, selector: str, text: str) -> None:
    """Waits until an element contains a text."""
    expect(page.locator(selector).first).to_contain_text(text, use_inner_text=True)


def sources(page: Any, selector: str) -> list[str]:
    return page.locator(f"{selector} img").evaluate_all("images => images.map(i => i.src)")


def facts(page: Any, selector: str) -> dict[str, float]:
    """Names and numbers of a list of facts."""
    names = page.locator(f"{selector} dt").all_inner_texts()
    values = page.locator(f"{selector} dd").all_inner_texts()
    numbers = [float(value.replace("−", "-").strip("<> %")) for value in values]
    return dict(zip(names, numbers, strict=True))


def drag(page: Any, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws with the mouse between two points of an element, as shares of its size."""
    target = page.locator(selector).first
    target.scroll_into_view_if_needed()
    edge = target.bounding_box()
    first, last = (
        (edge["x"] + x * edge["width"], edge["y"] + y * edge["height"]) for x, y in (start, end)
    )
    page.mouse.move(*first)
    page.mouse.down()
    page.mouse.move(*last)
    page.mouse.up()

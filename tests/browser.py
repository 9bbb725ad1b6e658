"""Headless Chromium as Debian installs it, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Without these, Chromium tries to reach hosts of its maker at each start.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where it is not installed."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: pip install playwright"
    )
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Any, width: int = 1280, *, dark: bool = False) -> Iterator[Any]:
    """An empty page of its own, as a visitor has it.

    Its ``addresses`` are those that the browser asked for, its ``problems`` errors and warnings.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        is_mobile=width < 600,
        color_scheme="dark" if dark else "light",
    )
    page = context.new_page()
    page.addresses, page.problems = [], []

    def asked(request: Any) -> None:
        if not request.url.startswith(("data:", "blob:")):
            page.addresses.append(request.url)

    def printed(message: Any) -> None:
        if message.type in ("error", "warning"):
            page.problems.append(message.text)

    page.on("request", asked)
    page.on("console", printed)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    try:
        yield page
    finally:
        context.close()


def screenshot(page: Any, name: str) -> None:
    """Saves the page, up to a few screens, in the folder that BCOSVIT_SCREENSHOTS names."""
    if folder := os.environ.get("BCOSVIT_SCREENSHOTS"):
        size = page.viewport_size
        height = min(page.evaluate("document.documentElement.scrollHeight"), 3400)
        page.set_viewport_size({**size, "height": height})
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=Path(folder, f"{name}.png"))
        page.set_viewport_size(size)

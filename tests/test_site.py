"""The documentation builds without warnings, and what is built needs nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import chromium, open_page, screenshot

ROOT = Path(__file__).parents[1]
# Elements that make a browser fetch what they name, and by which attribute.
FETCHING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
}
# Links of these kinds point at pages and are not fetched.
POINTERS = {"canonical", "next", "prev", "alternate"}
CSS_ADDRESS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


class Page(HTMLParser):
    """What a page fetches, what it links to, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        pointer = tag == "link" and given.get("rel", "") in POINTERS
        if (wanted := given.get(FETCHING.get(tag, ""))) is not None and not pointer:
            self.fetched.append(wanted)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Whatever tries to reach the network fails there.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def target(page: Path, address: str) -> tuple[Path, str] | None:
    """The file and anchor that an address on a page means; None for other sites."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


def test_nothing_is_fetched_from_elsewhere(site, pages):
    remote = {
        (page.name, address)
        for page, content in pages.items()
        for address in content.fetched
        if not address.startswith("data:") and target(page, address) is None
    }
    assert remote == set()
    styles = [*site.rglob("*.css"), *pages]
    assert {a for path in styles for a in CSS_ADDRESS.findall(path.read_text())} == set()


def test_links_resolve(pages):
    broken = set()
    for page, content in pages.items():
        for address in (*content.links, *content.fetched):
            # The page for missing pages is written for the root of a server.
            if page.name == "404.html" or address.startswith("data:"):
                continue
            if (found := target(page, address)) is None:
                continue
            path, anchor = found
            if not path.is_file() or (anchor and path in pages and not _has(pages[path], anchor)):
                broken.add((page.name, address))
    assert broken == set()


def _has(page: Page, anchor: str) -> bool:
    # Material makes the line anchors of its own controls when the page runs.
    return anchor in page.anchors or anchor.startswith("__")


def test_pages_that_people_look_for_are_there(pages):
    names = {path.stem for path in pages}
    assert {"quickstart", "idea", "own-data", "own-method", "own-metric", "own-model"} <= names


def test_reference_covers_the_public_surface(pages):
    """Every public name has an entry with its docstring on some page of the reference."""
    import bcosvit
    from bcosvit import attribution, data, export, metrics, models, nn, ops, paper, train

    shown = {anchor for page in pages.values() for anchor in page.anchors}
    last = {anchor.rpartition(".")[2] for anchor in shown if anchor.startswith("bcosvit.")}
    packages = (bcosvit, attribution, data, export, metrics, models, nn, ops, paper, train)
    public = {name for package in packages for name in getattr(package, "__all__", ())}
    assert public - last == set()


@pytest.mark.slow
def test_search_works_from_the_disk(site):
    """Without a server and without a network, as somebody who unpacked the site would use it."""
    with chromium() as browser:
        with open_page(browser, 1200) as page:
            page.goto((site / "index.html").as_uri())
            page.locator(".md-search__input").click()
            page.keyboard.type("residual")
            page.locator(".md-search-result__item").nth(2).wait_for()
            screenshot(page, "site-search")
            assert page.problems == []
        for name, width in {"idea": 1200, "api/attribution": 1200, "quickstart": 400}.items():
            with open_page(browser, width) as page:
                page.goto((site / f"{name}.html").as_uri())
                screenshot(page, f"site-{Path(name).stem}-{width}")
                # Only wide code and tables may scroll sideways, each on its own.
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                assert [url for url in page.addresses if url.startswith("http")] == []
                assert page.problems == []

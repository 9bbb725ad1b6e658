"""One server for all tests of page and API: starting one takes longer than most of them."""

import shutil
from urllib.parse import urlsplit

import pytest

from tests.browser import browser
from tests.report.support import write_pictures
from tests.web.support import serving, small_answers


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """The server's model, asked without it for comparison."""
    return small_answers(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address(answers, tmp_path_factory):
    limits = ("--max-pictures", "4", "--max-upload", "1", "--queue", "8", "--concurrency", "1")
    folder = tmp_path_factory.mktemp("server")
    with serving(answers.predictor.weights, *limits, folder=folder) as address:
        yield address


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return sorted(write_pictures(tmp_path_factory.mktemp("pictures"), 3).iterdir())


@pytest.fixture(scope="module")
def started():
    """A browser, which is to end before the server does."""
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

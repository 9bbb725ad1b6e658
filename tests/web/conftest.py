"""One server for all tests of page and API: starting one takes longer than most of them."""

from urllib.parse import urlsplit

import pytest

from tests.browser import chromium, open_page
from tests.report.support import write_pictures
from tests.web.support import serving, small_service


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """What the server computes, for comparison."""
    return small_service(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address(service, tmp_path_factory):
    limits = ("--max-pictures", "4", "--max-upload", "1", "--queue", "8", "--concurrency", "1")
    folder = tmp_path_factory.mktemp("server")
    with serving(service.predictor.weights, *limits, folder=folder) as address:
        yield address


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return sorted(write_pictures(tmp_path_factory.mktemp("pictures"), 3).iterdir())


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser, address):
    """The page for a new visitor; no other host is contacted."""
    with open_page(browser) as page:
        page.goto(address)
        yield page
        assert page.addresses
        assert {urlsplit(url).netloc for url in page.addresses} == {urlsplit(address).netloc}

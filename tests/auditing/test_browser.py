"""The report of an audit and its pages on the server in a real browser, at two widths."""

import pytest

from tests.browser import chromium, open_page, screenshot
from tests.report.test_browser import FONT_SIZES, OVERFLOWING
from tests.web.support import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def address(trained, audited, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with serving(trained[1], "--audit", str(audited.folder), folder=folder) as address:
        yield f"{address.rstrip('/')}/audit/"


def assert_fits(page):
    assert page.problems == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate(OVERFLOWING) == []
    assert min(page.evaluate(FONT_SIZES)) >= 12


def assert_filters_work(page, audited):
    visible = page.locator("article.suspicion:visible").count
    shown = audited.suspicions[:8]
    assert visible() == len(shown)
    page.check("#only-significant")
    assert visible() == len(audited.significant)
    page.uncheck("#only-significant")
    page.select_option("#class", "1")
    assert visible() == sum(each.cue.label == 1 for each in shown)
    assert page.locator("details.class:visible").count() == 1
    page.select_option("#class", "all")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_report_in_chromium(browser, audited, width, dark):
    with open_page(browser, width, dark=dark) as page:
        page.goto((audited.folder / "report.html").as_uri())
        assert len(page.addresses) == 1
        assert_fits(page)
        assert_filters_work(page, audited)
        screenshot(page, f"audit-{width}-{'dark' if dark else 'light'}")


@pytest.mark.parametrize("width", [1280, 390])
def test_served_audit_in_chromium(browser, audited, address, width):
    with open_page(browser, width) as page:
        page.goto(address)
        assert_fits(page)
        assert_filters_work(page, audited)
        page.locator("details.class > summary > a").first.click()
        page.wait_for_url("**/list/class-0")
        assert page.locator("main a").count() == 48
        page.wait_for_function("[...document.images].some(i => i.naturalWidth)")
        assert_fits(page)
        screenshot(page, f"audit-list-{width}")
        page.locator("main a").first.click()
        page.wait_for_url("**/picture/*")
        assert page.locator("img:visible").count() >= 2
        assert_fits(page)
        screenshot(page, f"audit-picture-{width}")

"""Slow methods in a real browser, with the model that ships: cost, progress, cancel, tabs."""

import re
import time

import httpx
import pytest

import bcosvit
from bcosvit.shipped import DEFAULT
from tests.browser import open_page, screenshot
from tests.web.support import is_busy, processor_seconds, serving, used_until_idle
from tests.web.visitor import expect, says, shown

pytestmark = pytest.mark.slow

WAIT = 120_000
"""Milliseconds that a busy machine may take."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The address of a server with a model for 224×224 pixels."""
    with serving(DEFAULT, folder=tmp_path_factory.mktemp("large")) as address:
        yield address


@pytest.fixture(params=[1280, 390])
def page(browser, large, request):
    with open_page(browser, request.param) as page:
        page.width = request.param
        page.goto(large)
        page.click("#examples button:first-child")
        expect(page.locator("#views figure")).to_have_count(4, timeout=WAIT)
        yield page


def choice(page, title):
    return page.locator("#methods label", has_text=title)


@pytest.fixture(scope="module")
def occlusion_seconds(large):
    """Processor seconds of the cheapest way to explain a photo by occlusion."""
    photo = bcosvit.shipped.photo("rocket").read_bytes()
    before = processor_seconds(large)
    asked = {"files": {"picture": photo}, "data": {"method": "occlusion"}}
    assert httpx.post(f"{large}api/explain", **asked, timeout=WAIT / 1000).status_code == 200
    return processor_seconds(large) - before


def test_cost_progress_and_cancel(page, large, occlusion_seconds):
    # About 200 predictions, and none.
    assert re.search(r"slow, about .*\d+ s", choice(page, "Occlusion").inner_text())
    assert "slow" not in choice(page, "Input ×").inner_text()
    choice(page, "Occlusion").locator("input").click()
    expect(page.locator("#working progress")).to_be_visible(timeout=WAIT)
    expect(page.locator("#working")).to_contain_text(re.compile(r"about .* left"), timeout=WAIT)
    share = float(page.locator("#working progress").get_attribute("value"))
    assert 0 < share < 1
    screenshot(page, f"working-{page.width}")
    # A fast method comes at once, while nothing of the slow one is lost from sight.
    choice(page, "Input ×").locator("input").click()
    expect(page.locator("#compared figure")).to_have_count(1, timeout=WAIT)
    expect(page.locator("#working progress")).to_be_visible(timeout=WAIT)
    before = processor_seconds(large)
    page.click("#cancel button, button#cancel")
    says(page, "#working", "Stopped")
    expect(page.locator("#cancel")).to_be_hidden()
    screenshot(page, f"stopped-{page.width}")
    assert used_until_idle(large, before) < occlusion_seconds / 4


def test_another_choice_ends_the_one_before(page, large, occlusion_seconds):
    choice(page, "Occlusion").locator("input").click()
    expect(page.locator("#working progress")).to_be_visible(timeout=WAIT)
    before = processor_seconds(large)
    choice(page, "Occlusion").locator("input").click()
    expect(page.locator("#working progress")).to_have_count(0, timeout=WAIT)
    assert used_until_idle(large, before) < occlusion_seconds / 4


def test_it_stops_when_the_tab_closes(browser, large, occlusion_seconds):
    with open_page(browser) as page:
        page.goto(large)
        page.click("#examples button:first-child")
        shown(page)
        # More than is computed meanwhile.
        for title in ("Occlusion", "IntGrad", "SmoothGrad"):
            choice(page, title).locator("input").click()
        expect(page.locator("#working progress")).to_be_visible(timeout=WAIT)
        # Longer than the server is patient with a client who is not heard.
        time.sleep(11)
        assert is_busy(large)
        before = processor_seconds(large)
    # All three take nearly twice as long as occlusion, and had 13 seconds.
    assert used_until_idle(large, before) < occlusion_seconds / 4


def test_others_do_not_wait(browser, large):
    with open_page(browser) as page, open_page(browser) as other:
        page.goto(large)
        # Of the first one, results of the test before may be kept.
        page.click("#examples button:nth-child(2)")
        shown(page)
        choice(page, "Occlusion").locator("input").click()
        expect(page.locator("#working progress")).to_be_visible(timeout=WAIT)
        other.goto(large)
        other.click("#examples button:first-child")
        shown(other)
        choice(other, "Input ×").locator("input").click()
        expect(other.locator("#compared figure")).to_have_count(1, timeout=WAIT)
        expect(page.locator("#working progress")).to_be_visible()


def test_what_was_shown_is_downloaded_at_once(browser, large, tmp_path):
    with open_page(browser) as page:
        page.goto(large)
        page.click("#examples button:first-child")
        shown(page)
        choice(page, "SmoothGrad").locator("input").click()
        start = time.monotonic()
        expect(page.locator("#compared figure")).to_have_count(1, timeout=WAIT)
        computed = time.monotonic() - start
        for kind in ("npz", "png", "html"):
            start = time.monotonic()
            with page.expect_download(timeout=WAIT) as download:
                page.click(f"#save-{kind}")
            download.value.save_as(tmp_path / f"made.{kind}")
            assert (tmp_path / f"made.{kind}").stat().st_size > 10_000
            assert time.monotonic() - start < computed

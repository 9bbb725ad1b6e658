"""Pictures that are uploaded to the page, and files that are downloaded, in a real browser."""

import base64
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.browser import open_page
from tests.report.support import CLASSES, Page, write_pictures
from tests.web.visitor import expect, says, shown, sources, upload

pytestmark = pytest.mark.slow

TRANSFER = """
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "given.png", {type: "image/png"}));
"""
DROP = f"""data => {{
    {TRANSFER}
    document.querySelector("#upload button").dispatchEvent(
        new DragEvent("drop", {{dataTransfer: transfer, bubbles: true}}));
}}"""
PASTE = f"""data => {{
    {TRANSFER}
    document.dispatchEvent(
        new ClipboardEvent("paste", {{clipboardData: transfer, bubbles: true}}));
    return document.querySelectorAll("#views figure").length === 4;
}}"""


def test_dropping_and_pasting(page, pictures):
    data = base64.b64encode(pictures[0].read_bytes()).decode()
    page.wait_for_selector("#upload button")
    page.evaluate(DROP, data)
    shown(page)
    page.reload()
    says(page, ".empty", "paste one")
    page.wait_for_selector("#upload input[type=file]", state="attached")
    # Again and again, until the page listens.
    page.wait_for_function(PASTE, arg=data, polling=500)


def test_several_pictures_with_a_broken_one(page, service, pictures, tmp_path):
    broken = tmp_path / "<img src=x onerror=alert(1)>.png"
    broken.write_bytes(b"no picture")
    upload(page, *pictures, broken)
    shown(page)
    expect(page.locator("#pictures button")).to_have_count(3)
    says(page, "#pictures [role=alert]", "is not an image")
    for number, path in enumerate(pictures, start=1):
        label = service.predict(service.open(path)).top(1)[0]
        button = f"#pictures button:nth-child({number})"
        page.click(button)
        (source,) = sources(page, button)
        expect(page.locator("#views img").first).to_have_attribute("src", source)
        says(page, "#title", CLASSES[label])
    # A choice is remembered with its picture.
    chosen = service.predict(service.open(pictures[2])).top(4)[3]
    page.click("#classes button:nth-child(4)")
    says(page, "#title", CLASSES[chosen])
    page.click("#pictures button:nth-child(1)")
    says(page, "#title", CLASSES[service.predict(service.open(pictures[0])).top(1)[0]])
    page.click("#pictures button:nth-child(3)")
    says(page, "#title", CLASSES[chosen])


def test_fast_clicks_are_not_lost(page, service, pictures):
    upload(page, *pictures)
    shown(page)
    expect(page.locator("#pictures button")).to_have_count(3)
    # Without waiting: the last one counts.
    page.evaluate(
        "for (const n of [1, 0, 1, 0, 2]) document.querySelectorAll('#pictures button')[n].click()"
    )
    (source,) = sources(page, "#pictures button:nth-child(3)")
    expect(page.locator("#views img").first).to_have_attribute("src", source)
    says(page, "#title", CLASSES[service.predict(service.open(pictures[2])).top(1)[0]])


def test_nothing_but_a_broken_one_and_then_a_good_one(page, pictures, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    upload(page, tmp_path / "broken.png")
    says(page, "#pictures [role=alert]", "broken.png is not an image")
    says(page, ".empty", "Drop photos")
    # Once: where the picture would be, and not in a message over the page as well.
    assert page.locator("body").inner_text().count("is not an image") == 1
    page.click("#upload [aria-label=Clear]")
    expect(page.locator("#pictures [role=alert]")).to_have_count(0)
    upload(page, pictures[0])
    shown(page)
    page.click("#upload [aria-label=Clear]")
    expect(page.locator("#results")).not_to_be_visible()
    says(page, ".empty", "Drop photos")


def test_too_many_pictures(page, tmp_path):
    upload(page, *sorted(write_pictures(tmp_path / "many", 5).iterdir()))
    says(page, "body", "5 pictures are too many at once")


def test_two_visitors_see_their_own(page, browser, service, address, pictures):
    upload(page, pictures[0])
    shown(page)
    own = sources(page, "#views")[0]
    with open_page(browser) as other:
        other.goto(address)
        upload(other, pictures[1])
        shown(other)
        assert sources(other, "#views")[0] != own
        page.click("#classes button:nth-child(2)")
        label = service.predict(service.open(pictures[0])).top(2)[1]
        says(page, "#title", CLASSES[label])
        assert sources(page, "#views")[0] == own


def test_downloads(page, pictures, tmp_path):
    upload(page, *pictures[:2])
    shown(page)
    page.click("#classes button:nth-child(2)")
    chosen = page.locator("#classes button:nth-child(2) b").inner_text()
    says(page, "#title", chosen)
    page.click("#methods label:nth-of-type(2) input")
    says(page, "#compared", "IntGrad")
    for kind, ending in (("html", "html"), ("npz", "zip"), ("png", "png")):
        with page.expect_download() as download:
            page.click(f"#save-{kind}")
        assert download.value.suggested_filename == f"bcosvit.{ending}"
        download.value.save_as(tmp_path / f"bcosvit.{ending}")
    report = Page(tmp_path / "bcosvit.html")
    report.assert_self_contained()
    assert "IntGrad" in report.text
    with zipfile.ZipFile(tmp_path / "bcosvit.zip") as archive:
        first, _ = archive.namelist()
        with archive.open(first) as file, np.load(file) as arrays:
            assert arrays["classes"].tolist() == [chosen]
            assert {"map_inherent", "map_intgrad", "weights"} <= set(arrays)
    with Image.open(tmp_path / "bcosvit.png") as image:
        assert image.width > 4 * 192


def test_the_api_is_described_without_help_from_elsewhere(page):
    page.click("footer button")
    says(page, "body", "/explain")
    assert "/show" not in page.locator("body").inner_text()

"""Pictures that go into the page, and files that come out of it, in a real browser."""

import base64
import time
import zipfile

import numpy as np
import pytest
from PIL import Image

from tests.report.support import CLASSES, Page, write_pictures
from tests.web.visitor import says, shown, upload, words

pytestmark = pytest.mark.slow


def test_dropping_and_pasting(page, pictures):
    data = base64.b64encode(pictures[0].read_bytes()).decode()
    given = f"""
        const bytes = Uint8Array.from(atob("{data}"), c => c.charCodeAt(0));
        const file = new File([bytes], "given.png", {{type: "image/png"}});
        const transfer = new DataTransfer();
        transfer.items.add(file);
    """
    page.until("return document.querySelector('#upload button') !== null")
    page.run(
        given
        + """const drop = new DragEvent("drop", {dataTransfer: transfer, bubbles: true});
        document.querySelector("#upload button").dispatchEvent(drop);"""
    )
    shown(page)
    page.call("refresh")
    page.until("return document.querySelector('#upload input[type=file]') !== null")
    says(page, ".empty", "paste one")
    # Until the page listens.
    page.until(
        given
        + """document.dispatchEvent(
            new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true}));
        return document.querySelectorAll("#views figure").length === 4;"""
    )


def test_several_pictures_with_a_broken_one(page, answers, pictures, tmp_path):
    (tmp_path / "<img src=x onerror=alert(1)>.png").write_bytes(b"no picture")
    upload(page, *pictures, tmp_path / "<img src=x onerror=alert(1)>.png")
    shown(page)
    buttons = "return document.querySelectorAll('#pictures button').length"
    assert page.run(buttons) == 3
    assert "is not a picture of a known format" in words(page, "#pictures [role=alert]")
    for number, path in enumerate(pictures, start=1):
        label = answers.predict(answers.open(path)).top(1)[0]
        button = f"#pictures button:nth-child({number})"
        page.click(button)
        page.until(
            "const of = selector => document.querySelector(selector + ' img').src;"
            f"return of('#views') === of('{button}')"
        )
        says(page, "#title", CLASSES[label])
    # A choice is remembered with its picture.
    chosen = answers.predict(answers.open(pictures[2])).top(4)[3]
    page.click("#classes button:nth-child(4)")
    says(page, "#title", CLASSES[chosen])
    page.click("#pictures button:nth-child(1)")
    says(page, "#title", CLASSES[answers.predict(answers.open(pictures[0])).top(1)[0]])
    page.click("#pictures button:nth-child(3)")
    says(page, "#title", CLASSES[chosen])


def test_nothing_but_a_broken_one_and_then_a_good_one(page, pictures, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    upload(page, tmp_path / "broken.png")
    says(page, "#pictures [role=alert]", "broken.png is not a picture of a known format")
    says(page, ".empty", "Drop photos")
    # Told once: where the picture would be, and not in a message over the page as well.
    assert words(page, "body").count("is not a picture") == 1
    page.click("#upload [aria-label=Clear]")
    page.until("return !document.querySelector('#pictures [role=alert]')")
    upload(page, pictures[0])
    shown(page)
    page.click("#upload [aria-label=Clear]")
    page.until("return !document.querySelector('#results')?.checkVisibility()")
    says(page, ".empty", "Drop photos")


def test_too_many_pictures(page, tmp_path):
    upload(page, *sorted(write_pictures(tmp_path / "many", 5).iterdir()))
    says(page, "body", "5 pictures are too many at once: give at most 4.")


def test_two_visitors_see_their_own(page, answers, address, pictures):
    upload(page, pictures[0])
    shown(page)
    first = page.call("window/new", type="tab")["handle"]
    own = page.run("return document.querySelector('#views img').src")
    handles = page.call_get("window/handles")
    page.call("window", handle=first)
    page.open(address, 1280)
    upload(page, pictures[1])
    shown(page)
    assert page.run("return document.querySelector('#views img').src") != own
    page.call("window", handle=next(each for each in handles if each != first))
    page.click("#classes button:nth-child(2)")
    label = answers.predict(answers.open(pictures[0])).top(2)[1]
    says(page, "#title", CLASSES[label])
    assert page.run("return document.querySelector('#views img').src") == own


def test_downloads(page, pictures, tmp_path):
    page.develop("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    upload(page, *pictures[:2])
    shown(page)
    page.click("#classes button:nth-child(2)")
    name = "return document.querySelector('#classes button:nth-child(2) b').innerText"
    chosen = page.run(name)
    says(page, "#title", chosen)
    page.click("#methods label:nth-of-type(2) input")
    says(page, "#compared", "IntGrad")
    for kind, ending in (("html", "html"), ("npz", "zip"), ("png", "png")):
        page.click(f"#save-{kind}")
        path, end = tmp_path / f"bcosvit.{ending}", time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < end, f"No {path.name} was saved."
            time.sleep(0.05)
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
    assert "/look" not in words(page, "body")

"""What the page shows of a picture, in a real browser."""

import pytest

from bcosvit.attribution import METHODS
from bcosvit.web.service import Box
from tests.report.support import CLASSES
from tests.web.visitor import drag, expect, facts, says, shown, sources, upload


def test_a_photo_gets_classes_and_an_explanation(page, service, pictures):
    upload(page, pictures[0])
    shown(page)
    found = service.predict(service.open(pictures[0]))
    names = page.locator("#classes button b").all_inner_texts()
    assert names == [CLASSES[label] for label in found.top(5)]
    says(page, "#classes button", "%")
    says(page, "#title", names[0])


@pytest.mark.slow
def test_choosing_a_class(page, service, pictures):
    upload(page, pictures[0])
    shown(page)
    before = sources(page, "#views")
    second = service.predict(service.open(pictures[0])).top(2)[1]
    page.click("#classes button:nth-child(2)")
    says(page, "#title", CLASSES[second])
    after = sources(page, "#views")
    # The photo is the same; its map, overlay and colors are not.
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]
    assert page.locator("#classes [aria-pressed=true] b").inner_text() == CLASSES[second]


@pytest.mark.slow
def test_any_class(page, pictures):
    upload(page, pictures[0])
    shown(page)
    page.click("#other input")
    page.keyboard.type("sea")
    page.keyboard.press("Enter")
    says(page, "#title", "sea star")


@pytest.mark.slow
def test_completeness_is_shown_as_a_number(page, service, pictures):
    upload(page, pictures[1])
    shown(page)
    picture = service.open(pictures[1])
    sums = service.sums(picture, service.predict(picture).top(1)[0])
    got = facts(page, "#sums")
    assert got["Σ contributions"] == pytest.approx(sums.contributions, abs=1e-3)
    assert got["+ bias"] == pytest.approx(sums.bias, abs=1e-4)
    total = got["Σ contributions"] + got["+ residual"] + got["+ bias"]
    assert total == pytest.approx(got["= logit"], abs=2e-4)
    assert got["off by"] < 1e-3


@pytest.mark.slow
def test_comparing_methods(page, service, pictures):
    upload(page, pictures[0])
    shown(page)
    for number, name in enumerate(service.methods[1:], start=1):
        method = METHODS.get(name)
        offered = page.locator(f"#methods label:nth-of-type({number})")
        assert offered.inner_text().startswith(method.title)
        assert ("slow" in offered.inner_text()) == (method.cost == "many")
        offered.locator("input").click()
        expect(page.locator("#compared figcaption", has_text=method.title)).to_have_count(1)
    assert len(set(sources(page, "#compared"))) == len(service.methods) - 1
    page.click("#methods label:nth-of-type(1) input")
    expect(page.locator("#compared")).not_to_contain_text("Input ×")


@pytest.mark.slow
def test_overlay_and_scale(page, service, pictures):
    upload(page, pictures[0])
    shown(page)
    picture = service.open(pictures[0])
    label = service.predict(picture).top(3)[2]
    page.click("#classes button:nth-child(3)")
    says(page, "#title", CLASSES[label])
    own, joint = (service.explain(picture, label, joint=j).scale for j in (False, True))
    says(page, "#views .scale", f"+{own:.2g}")
    page.click("#scale label:nth-of-type(2) input")
    says(page, "#views .scale", f"+{joint:.2g}")
    before = sources(page, "#views")
    page.focus("#overlay input[type=range]")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#views img").nth(2)).not_to_have_attribute("src", before[2])
    assert sources(page, "#views")[1] == before[1]


@pytest.mark.slow
def test_regions_by_dragging_clicking_and_typing(page, service, pictures):
    upload(page, pictures[0])
    shown(page)
    says(page, "#region", "No region yet")
    picture = service.open(pictures[0])
    label = service.predict(picture).top(1)[0]

    def measured() -> Box:
        """The box in the fields, once the numbers shown are those of the model for it."""
        expect(page.locator("#region dd")).to_have_count(5)
        box = Box.of(
            [
                int(page.locator(f"#box-{name} input").input_value())
                for name in ("x", "y", "width", "height")
            ]
        )
        expected = service.region(picture, label, box)
        says(page, "#region", f"{expected.together:+.3f}"[:-1].replace("-", "−"))
        got = facts(page, "#region")
        assert got["For the class"] == pytest.approx(expected.positive, abs=1e-3)
        assert got["Against it"] == pytest.approx(expected.negative, abs=1e-3)
        assert got["Share of the evidence"] == pytest.approx(100 * expected.share, abs=0.1)
        return box

    drag(page, "#views figure:nth-child(2) .stage", (0.26, 0.13), (0.74, 0.6))
    says(page, "#region", "For the class")
    assert measured() == Box(x=4, y=2, width=8, height=8)
    # The box is shown on all pictures.
    widths = page.locator("#views rect").evaluate_all("e => e.map(r => r.getAttribute('width'))")
    assert set(widths) == {"8"}
    drag(page, "#views figure .stage", (0.53, 0.53), (0.53, 0.53))
    expect(page.locator("#box-width input")).to_have_value("2")
    assert measured() == Box(x=7, y=7, width=2, height=2)
    page.fill("#box-width input", "5")
    expect(page.locator("#views rect").first).to_have_attribute("width", "5")
    assert measured() == Box(x=7, y=7, width=5, height=2)
    page.fill("#box-width input", "50")
    says(page, "#region", "beyond the picture of 16×16 pixels")

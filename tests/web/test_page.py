"""What the page shows of a picture, in a real browser."""

import json

import pytest

from bcosvit.attribution import method_title
from bcosvit.web.answers import Box
from tests.report.support import CLASSES
from tests.web.visitor import ENTER, RIGHT, facts, says, shown, sources, upload, words


def test_a_photo_gets_classes_and_an_explanation(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    found = answers.predict(answers.open(pictures[0]))
    names = page.run(
        "return [...document.querySelectorAll('#classes button b')].map(e => e.innerText)"
    )
    assert names == [CLASSES[label] for label in found.top(5)]
    assert "%" in words(page, "#classes button")
    assert words(page, "#title").startswith(names[0])


@pytest.mark.slow
def test_choosing_a_class(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    before = sources(page, "#views")
    second = answers.predict(answers.open(pictures[0])).top(2)[1]
    page.click("#classes button:nth-child(2)")
    says(page, "#title", CLASSES[second])
    after = sources(page, "#views")
    # The photo is the same; its map, overlay and colors are not.
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]
    pressed = "return document.querySelector('#classes [aria-pressed=true] b').innerText"
    assert page.run(pressed) == CLASSES[second]


@pytest.mark.slow
def test_any_class(page, pictures):
    upload(page, pictures[0])
    shown(page)
    page.click("#other input")
    page.type("#other input", "sea")
    page.press(ENTER)
    says(page, "#title", "sea star")


@pytest.mark.slow
def test_completeness_is_shown_as_a_number(page, answers, pictures):
    upload(page, pictures[1])
    shown(page)
    picture = answers.open(pictures[1])
    sums = answers.sums(picture, answers.predict(picture).top(1)[0])
    got = facts(page, "#sums")
    assert got["Σ contributions"] == pytest.approx(sums.contributions, abs=1e-3)
    assert got["+ bias"] == pytest.approx(sums.bias, abs=1e-4)
    total = got["Σ contributions"] + got["+ residual"] + got["+ bias"]
    assert total == pytest.approx(got["= logit"], abs=2e-4)
    assert got["off by"] < 1e-3


@pytest.mark.slow
def test_comparing_methods(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    for number, method in enumerate(answers.methods[1:], start=1):
        page.click(f"#methods label:nth-of-type({number}) input")
        says(page, "#compared", method_title(method))
    assert len(set(sources(page, "#compared"))) == len(answers.methods) - 1
    page.click("#methods label:nth-of-type(1) input")
    page.until("return !document.querySelector('#compared').innerText.includes('Input ×')")


@pytest.mark.slow
def test_overlay_and_scale(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    picture = answers.open(pictures[0])
    label = answers.predict(picture).top(3)[2]
    page.click("#classes button:nth-child(3)")
    says(page, "#title", CLASSES[label])
    own, joint = (answers.explain(picture, label, joint=j).scale for j in (False, True))
    says(page, "#views .scale", f"+{own:.2g}")
    page.click("#scale label:nth-of-type(2) input")
    says(page, "#views .scale", f"+{joint:.2g}")
    before = sources(page, "#views")
    page.click("#overlay input[type=range]")
    page.press(RIGHT)
    last = f"return document.querySelectorAll('#views img')[2].src !== {json.dumps(before[2])}"
    page.until(last)
    assert sources(page, "#views")[1] == before[1]


@pytest.mark.slow
def test_regions_by_dragging_clicking_and_typing(page, answers, pictures):
    upload(page, pictures[0])
    shown(page)
    says(page, "#region", "No region yet")
    picture = answers.open(pictures[0])
    label = answers.predict(picture).top(1)[0]

    def measured() -> Box:
        """The box in the fields, once the numbers shown are those of the model for it."""
        page.until("return document.querySelectorAll('#region dd').length === 5")
        edges = page.run(
            "return ['x', 'y', 'width', 'height'].map(name =>"
            " Number(document.querySelector(`#box-${name} input`).value))"
        )
        expected = answers.region(picture, label, Box.of(edges))
        says(page, "#region", f"{expected.together:+.3f}"[:-1].replace("-", "−"))
        got = facts(page, "#region")
        assert got["for"] == pytest.approx(expected.positive, abs=1e-3)
        assert got["against"] == pytest.approx(expected.negative, abs=1e-3)
        assert got["of the evidence"] == pytest.approx(100 * expected.share, abs=0.1)
        return Box.of(edges)

    page.drag("#views figure:nth-child(2) .stage", (0.26, 0.13), (0.74, 0.6))
    says(page, "#region", "for")
    assert measured() == Box(x=4, y=2, width=8, height=8)
    # The box is seen on every picture.
    drawn = "document.querySelectorAll('#views rect')"
    widths = page.run(f"return [...{drawn}].map(each => each.getAttribute('width'))")
    assert set(widths) == {"8"}
    page.drag("#views figure .stage", (0.53, 0.53), (0.53, 0.53))
    page.until("return document.querySelector('#box-width input').value === '2'")
    assert measured() == Box(x=7, y=7, width=2, height=2)
    page.type("#box-width input", "\ue003" * 3 + "\ue017" * 3 + "5")
    page.until("return +document.querySelector('#views rect').getAttribute('width') === 5")
    assert measured() == Box(x=7, y=7, width=5, height=2)
    page.type("#box-width input", "0")
    says(page, "#region", "beyond the picture of 16×16 pixels")

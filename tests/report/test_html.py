"""Pages: escaped, complete or absent, and the same for everyone."""

import pytest

from bcosvit.report.html import Html, bar, element, figure, foot, page, picture, scale, table, text
from bcosvit.report.style import CSS
from tests.report.support import Page

EVIL = "<script>alert(\"x\")</script> & 'more'"


def write(path, *content, title="A title"):
    ending = foot("a command", {"key": EVIL}, {"bcosvit": "1"})
    with page(path, title, Html("<p>Lead</p>"), ending) as add:
        for piece in content:
            add(piece)
    return Page(path)


def test_every_text_is_escaped(tmp_path):
    content = [
        text(EVIL),
        element("p", text(EVIL), title=EVIL),
        figure(element("b", text(EVIL)), text(EVIL)),
        table(EVIL, (EVIL, "b"), [(EVIL, EVIL)]),
        scale("red, blue", (EVIL,)),
        picture(b"\x89PNG", EVIL, (1, 1)),
    ]
    read = write(tmp_path / "page.html", *content, title=EVIL)
    assert "script" not in read.tags
    assert "<script" not in read.source
    assert read.images[0]["alt"] == EVIL


def test_html_is_not_escaped_twice():
    assert text(text("a & b")) == "a &amp; b"
    assert table("c", ("x", "y"), [("r", element("b", text("1")))]).count("<b>1</b>") == 1


def test_tables_are_semantic():
    made = table("What it is", ("Name", "Number"), [("one", 1)], numbers=(1,), chosen=(0,))
    assert "<caption>What it is</caption>" in made
    assert '<th scope="col">Name</th>' in made
    assert '<th scope="row">one</th><td class="number">1</td>' in made
    assert '<tr aria-current="true">' in made


def test_bars_stay_inside():
    assert "width: 100.00%" in bar(1.5)
    assert "width: 0.00%" in bar(-1)


def test_a_page_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "page.html"

    def fail() -> None:
        with page(path, "t", Html(""), Html("")) as add:
            add(Html("<p>half</p>"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(path.parent.iterdir()) == []
    read = write(path, Html("<p>whole</p>"))
    read.assert_self_contained()
    assert "whole" in read.text


def test_an_older_page_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "page.html"
    write(path, Html("<p>old</p>"))
    with pytest.raises(RuntimeError), page(path, "t", Html(""), Html("")):
        raise RuntimeError
    assert "old" in Page(path).text


def test_names_that_are_not_unicode(tmp_path):
    read = write(tmp_path / "page.html", element("p", text("caf\udce9.jpg")))
    assert "caf\\udce9.jpg" in read.text


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("surroundings", [0, 1])
@pytest.mark.parametrize("ink", ["--ink", "--soft", "--accent"])
@pytest.mark.parametrize("ground", ["--ground", "--card"])
def test_contrast(surroundings, ink, ground):
    """WCAG AA for text, light and dark."""

    def color(name: str) -> float:
        return luminance(CSS.split(f"{name}: ")[1 + surroundings][:7])

    low, high = sorted([color(ink), color(ground)])
    assert (high + 0.05) / (low + 0.05) >= 4.5

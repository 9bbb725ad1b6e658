"""Pages: escaped, complete or absent, and readable in light and dark."""

import re
from pathlib import Path

import pytest

import bcosvit
from bcosvit.metrics.accuracy import class_accuracies
from bcosvit.report.images import MapFigure, Picture
from bcosvit.report.pages import macros, stream_page
from bcosvit.report.provenance import Provenance
from bcosvit.report.tables import confusion_matrix
from tests.report.support import Page

EVIL = "<script>alert(\"x\")</script> & 'more'"
PAGE = "report/templates/page.html.jinja"
CSS = Path(bcosvit.__file__).parent.joinpath("report/templates/style.css").read_text()


def parts():
    return macros("report/templates/macros.html.jinja")


def stream(path, title="A title"):
    how = Provenance(command="a command", versions={"bcosvit": "1"}, config={"key": EVIL})
    return stream_page(path, PAGE, title=title, provenance=how)


def write(path, *content, title="A title"):
    with stream(path, title) as add:
        for piece in content:
            add(piece)
    return Page(path)


def test_every_text_is_escaped(tmp_path):
    picture = Picture(data=b"\x89PNG", alt=EVIL, width=1, height=1)
    content = [
        parts().definitions({EVIL: EVIL}),
        parts().map_figure(
            MapFigure(picture=picture, title=EVIL, gradient="red, blue", ends=(EVIL,))
        ),
        parts().table(EVIL, (EVIL, "b"), [(EVIL, EVIL)]),
    ]
    read = write(tmp_path / "page.html", *content, title=EVIL)
    assert "script" not in read.tags
    assert "<script" not in read.source
    assert read.images[0]["alt"] == EVIL


def test_html_is_not_escaped_twice():
    assert parts().definitions({"a & b": "c"}).count("a &amp; b") == 1
    assert parts().table("c", ("x",), [("r", parts().bar(0.5))]).count("<i style=") == 1


def test_tables_are_semantic():
    made = parts().table("What it is", ("Name", "Number"), [("one", 1)], (1,), (0,))
    assert "<caption>What it is</caption>" in made
    assert '<th scope="col">Name</th>' in made
    assert '<th scope="row">one</th><td class="number">1</td>' in made
    assert '<tr aria-current="true">' in made


def test_bars_stay_inside():
    assert "width: 100.00%" in parts().bar(1.5)
    assert "width: 0.00%" in parts().bar(-1)


def test_a_page_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "page.html"

    def fail() -> None:
        with stream(path) as add:
            add("<p>half</p>")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(path.parent.iterdir()) == []
    read = write(path, "<p>whole</p>")
    read.assert_self_contained()
    assert "whole" in read.text


def test_an_older_page_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "page.html"
    write(path, "<p>old</p>")
    with pytest.raises(RuntimeError), stream(path):
        raise RuntimeError
    assert "old" in Page(path).text


def test_names_that_are_not_unicode(tmp_path):
    read = write(tmp_path / "page.html", parts().definitions({"file": "caf\udce9.jpg"}))
    assert "caf\\udce9.jpg" in read.text


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("surroundings", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ink", ["--ink", "--soft", "--accent"])
@pytest.mark.parametrize("ground", ["--ground", "--card"])
def test_contrast(surroundings, ink, ground):
    """WCAG AA for text, light and dark."""

    def color(name: str) -> float:
        return luminance(CSS.split(f"{name}: ")[1 + surroundings][:7])

    low, high = sorted([color(ink), color(ground)])
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_confusion_matrices_hold_what_is_taken_for_what():
    labels, predicted = [0, 0, 0, 2, 2], [0, 2, 3, 2, 0]
    found = class_accuracies(labels, predicted)
    matrix = confusion_matrix(found)
    assert matrix == ([0, 2, 3], [[1, 1, 1], [1, 1, 0]])
    shown = parts().confusion_table(matrix, found, ["cat", "dog", "fox", EVIL])
    assert re.findall(r">(\d*)</td>", shown) == ["", "1", "1", "1", "1", "1", ""]
    assert "<script" not in shown
    assert confusion_matrix(class_accuracies(range(21), range(21))) is None


def test_intervals_are_below_accuracies():
    shown = parts().accuracy_table(class_accuracies([1, 1], [1, 0]), ["cat", EVIL])
    assert "50.0 %<small>" in shown
    assert "cat (1)" in shown and "<script" not in shown

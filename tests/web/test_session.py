"""What a page sends is checked, and what it shows is escaped."""

import pytest

from bcosvit.web.session import EMPTY, INDEPENDENT, JOINT, PageEvents, Selection
from tests.report.support import CLASSES


@pytest.fixture
def events(service):
    return PageEvents(service=service)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "invalid state"),
        ([], "invalid state"),
        ({"current": 0}, "invalid state"),
        ({"current": 0, "labels": 3}, "invalid state"),
        ({"current": "x", "labels": {}}, "invalid state"),
        ({"current": 0, "labels": {"0": 5}}, "only 5 classes"),
        ({"current": 0, "labels": {"0": -1}}, "only 5 classes"),
        ({"current": 2, "labels": {}}, "has been removed"),
        ({"current": -2, "labels": {}}, "has been removed"),
    ],
)
def test_invalid_states(events, state, says):
    with pytest.raises(ValueError, match=f"(?i){says}"):
        events.selection(["a", "b"], state)


def test_a_state_is_read_as_it_was_written():
    selection = Selection(paths=["a", "b"], current=1, labels={0: 4}).with_label(2)
    assert Selection.of(["a", "b"], selection.state(), 5) == selection
    assert selection.labels == {0: 4, 1: 2}


def test_nothing_uploaded_shows_nothing(events):
    assert events.upload(None) == (None, "")
    assert events.show(None, EMPTY, 0.5, INDEPENDENT, None, None, None, None) == [""] * 4
    assert events.compare([], EMPTY, ["rollout"], JOINT) == ""


def test_more_pictures_than_allowed_are_refused(events, pictures):
    many = [str(pictures[0])] * (events.service.limits.pictures + 1)
    with pytest.raises(ValueError, match="17 pictures are too many at once"):
        events.upload(many)
    with pytest.raises(ValueError, match="17 pictures are too many at once"):
        events.selection(many, EMPTY)


def test_pictures_keep_their_places_beside_unreadable_ones(events, pictures, tmp_path):
    broken = tmp_path / "<script>.png"
    broken.write_bytes(b"no picture")
    paths = [str(broken), str(pictures[0]), str(pictures[1])]
    selection, content = events.upload(paths)
    assert selection.current == 1
    assert 'data-index="1" aria-pressed="true"' in content
    assert 'data-index="2" aria-pressed="false"' in content
    assert "<script>" not in content
    assert "&lt;script&gt;.png is not an image" in content


def test_names_of_classes_are_escaped(events, pictures):
    state = {"current": 0, "labels": {"0": 3}}
    assert CLASSES[3] == "<b>mouse</b>"
    title, *_ = events.show([str(pictures[0])], state, 0.5, INDEPENDENT, 1, 1, 2, 2)
    assert "&lt;b&gt;mouse&lt;/b&gt;" in title


def test_a_box_that_is_half_typed_is_no_mistake(events, pictures):
    selection = Selection(paths=[str(pictures[0])], current=0, labels={})
    assert "No region yet" in events.region(selection, 1, 2, None, 4)
    assert "Σ" not in events.region(selection, 1, 2, 3, 4)
    assert 'role="alert"' in events.region(selection, 1, 2, 30, 4)

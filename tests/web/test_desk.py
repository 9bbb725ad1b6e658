"""What a page sends back is checked, and what it is shown is escaped."""

import pytest

from bcosvit.web.desk import JOINT, OWN, START, Desk, Visit
from tests.report.support import CLASSES


@pytest.fixture
def desk(answers):
    return Desk(answers=answers)


@pytest.mark.parametrize(
    ("note", "says"),
    [
        (None, "a note that is not its own"),
        ([], "a note that is not its own"),
        ({"at": 0}, "a note that is not its own"),
        ({"at": 0, "labels": 3}, "a note that is not its own"),
        ({"at": "x", "labels": {}}, "a note that is not its own"),
        ({"at": 0, "labels": {"0": 5}}, "The model has 5 classes, another was chosen"),
        ({"at": 0, "labels": {"0": -1}}, "The model has 5 classes, another was chosen"),
        ({"at": 2, "labels": {}}, "a picture was chosen that is no longer there"),
        ({"at": -2, "labels": {}}, "a picture was chosen that is no longer there"),
    ],
)
def test_notes_that_are_not_ours(desk, note, says):
    with pytest.raises(ValueError, match=f"(?i){says}"):
        desk.visit(["a", "b"], note)


def test_a_note_comes_back_as_it_was():
    visit = Visit(paths=["a", "b"], at=1, labels={0: 4}).with_label(2)
    assert Visit.of(["a", "b"], visit.note(), 5) == visit
    assert visit.labels == {0: 4, 1: 2}


def test_nothing_uploaded_shows_nothing(desk):
    assert desk.receive(None) == (None, "")
    assert desk.look(None, START, 0.5, OWN, None, None, None, None) == [""] * 4
    assert desk.compare([], START, ["rollout"], JOINT) == ""


def test_more_than_is_allowed_is_refused_whatever_is_asked(desk, pictures):
    many = [str(pictures[0])] * (desk.answers.limits.pictures + 1)
    with pytest.raises(ValueError, match="17 pictures are too many at once"):
        desk.receive(many)
    with pytest.raises(ValueError, match="17 pictures are too many at once"):
        desk.visit(many, START)


def test_pictures_keep_their_places_beside_unreadable_ones(desk, pictures, tmp_path):
    broken = tmp_path / "<script>.png"
    broken.write_bytes(b"no picture")
    paths = [str(broken), str(pictures[0]), str(pictures[1])]
    visit, content = desk.receive(paths)
    assert visit.at == 1
    assert 'data-index="1" aria-pressed="true"' in content
    assert 'data-index="2" aria-pressed="false"' in content
    assert "<script>" not in content
    assert "&lt;script&gt;.png is not a picture" in content


def test_names_of_classes_are_escaped(desk, pictures):
    note = {"at": 0, "labels": {"0": 3}}
    assert CLASSES[3] == "<b>mouse</b>"
    title, *_ = desk.look([str(pictures[0])], note, 0.5, OWN, 1, 1, 2, 2)
    assert "&lt;b&gt;mouse&lt;/b&gt;" in title


def test_a_box_that_is_half_typed_is_no_mistake(desk, pictures):
    visit = Visit(paths=[str(pictures[0])], at=0, labels={})
    assert "No region yet" in desk.measure(visit, 1, 2, None, 4)
    assert "Σ" not in desk.measure(visit, 1, 2, 3, 4)
    assert 'role="alert"' in desk.measure(visit, 1, 2, 30, 4)

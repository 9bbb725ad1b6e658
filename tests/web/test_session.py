"""What a page sends is checked, and what it shows is escaped."""

import threading

import pytest

from bcosvit.attribution.passes import Cancelled
from bcosvit.web import session
from bcosvit.web.session import EMPTY, INDEPENDENT, JOINT, PageEvents, Selection
from tests.report.support import CLASSES
from tests.web.support import small_service


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
    assert list(events.compare([], EMPTY, ["rollout"], JOINT)) == [("", "")]


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


def test_fast_methods_are_shown_before_slow_ones(tmp_path, pictures, monkeypatch):
    # One that knows no map yet.
    events = PageEvents(service=small_service(tmp_path))
    monkeypatch.setattr(session, "TICK", 0.001)
    state = {"current": 0, "labels": {"0": 1}}
    chosen = ["occlusion", "ixg", "rollout"]
    shown = list(events.compare([str(pictures[0])], state, chosen, INDEPENDENT))
    first, last = shown[0], shown[-1]
    assert "Occlusion" not in first[0] and "Input ×" in first[0] and "Rollout" in first[0]
    assert "Occlusion" in first[1] and "<progress" in first[1]
    assert {maps for maps, _ in shown[1:-1]} <= {None}
    # In the order of the check boxes, and nothing is at work any more.
    assert last[0].index("Occlusion") < last[0].index("Input ×") < last[0].index("Rollout")
    assert last[1] == ""


def test_a_comparison_is_cancelled(tmp_path, pictures, monkeypatch):
    events = PageEvents(service=small_service(tmp_path))
    monkeypatch.setattr(session, "TICK", 0.001)
    state = {"current": 0, "labels": {"0": 2}}
    asked = iter([False] * 3)
    compared = events.compare(
        [str(pictures[1])], state, ["smoothgrad"], INDEPENDENT, lambda: next(asked, True)
    )
    with pytest.raises(Cancelled):
        list(compared)
    assert next(asked, None) is None
    upload = events.service.open(pictures[1])
    assert events.service._cached(upload, (2,), "smoothgrad") is None


def test_how_long_a_job_will_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    half, end = threading.Event(), threading.Event()

    def run(tell):
        tell(0.0)
        now[0] = 3.0
        tell(0.25)
        half.set()
        assert end.wait(60)
        raise ValueError("in the thread")

    job = session._Job(run)
    assert half.wait(60)
    assert (job.share, job.seconds_left) == (0.25, 9.0)
    end.set()
    assert job.is_done(60)
    with pytest.raises(ValueError, match="in the thread"):
        job.result()

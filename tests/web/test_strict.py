"""Contributions that miss the logit: a sentence for whoever asks the server, an error if strict."""

from types import SimpleNamespace

import pytest

from bcosvit.attribution.base import TOLERANCES
from bcosvit.web.api import endpoint_functions
from bcosvit.web.session import INDEPENDENT, PageEvents
from tests.web.support import small_service

pytestmark = pytest.mark.filterwarnings("ignore::bcosvit.attribution.CompletenessWarning")


@pytest.fixture
def incomplete(tmp_path, monkeypatch):
    """A service that takes rounding for a mistake."""
    for dtype in TOLERANCES:
        monkeypatch.setitem(TOLERANCES, dtype, -1.0)
    return small_service(tmp_path)


@pytest.fixture
def endpoints(incomplete, tmp_path):
    return endpoint_functions(incomplete, SimpleNamespace(GRADIO_CACHE=tmp_path, temp_files=set()))


ARGUMENTS = {
    "explain": ("dog", "", 0.5, False),
    "region": ("dog", 0, 0, 4, 4),
    "report": ("dog", "", "html"),
}


@pytest.mark.parametrize("endpoint", ARGUMENTS)
def test_the_api_says_so_and_refuses_if_strict(endpoints, pictures, endpoint):
    photo = [str(pictures[0])] if endpoint == "report" else str(pictures[0])
    found = endpoints[endpoint](photo, *ARGUMENTS[endpoint], False)
    if endpoint == "report":
        with open(found, encoding="utf-8") as file:
            assert "The contributions miss the logit by" in file.read()
    else:
        numbers = found[0] if endpoint == "explain" else found
        assert "miss the logit" in numbers["incompleteness"]
    with pytest.raises(ValueError, match="miss the logit"):
        endpoints[endpoint](photo, *ARGUMENTS[endpoint], True)


@pytest.mark.parametrize("versus", [-1, 2])
def test_the_page_says_so(incomplete, pictures, versus):
    events, state = PageEvents(service=incomplete), {"current": 0, "labels": {"0": 1}}
    title, *_ = events.show([str(pictures[0])], state, 0.5, INDEPENDENT, versus, 1, 1, 2, 2)
    assert title.count("The contributions miss the logit by") in (1, 2)
    assert 'role="note"' in title

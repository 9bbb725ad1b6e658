"""One server for all tests of page and API: starting one takes longer than most of them."""

import pytest

from tests.report.support import write_pictures
from tests.web.support import serving, small_answers


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """The server's model, asked without it for comparison."""
    return small_answers(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address(answers, tmp_path_factory):
    limits = ("--max-pictures", "4", "--max-upload", "1", "--queue", "8", "--concurrency", "1")
    folder = tmp_path_factory.mktemp("server")
    with serving(answers.subject.weights, *limits, folder=folder) as address:
        yield address


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return sorted(write_pictures(tmp_path_factory.mktemp("pictures"), 3).iterdir())

"""What all tests of training share."""

from pathlib import Path

import pytest

from bcosvit.train.callbacks import History
from tests.train.support import DATA, model_config, recipe, train


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes half the time of a small run; fixtures of a module still do."""
    monkeypatch.setattr(History, "_write_curves", lambda self: None)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, in one process."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(DATA, out=folder, model=model_config(), recipe=recipe())
    return folder

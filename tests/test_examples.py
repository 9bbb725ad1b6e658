"""The examples in docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch
from PIL import Image

import bcosvit
import bcosvit.data

ROOT = Path(bcosvit.__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("bcosvit/**/*.py")
    if ">>>" in path.read_text("utf-8")
)
NAMES = {"bcosvit": bcosvit, "torch": torch}
"""What examples may use without importing it."""


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (64, 48)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = dict(NAMES)
    if name.startswith("bcosvit.data."):
        names |= {public: getattr(bcosvit.data, public) for public in bcosvit.data.__all__}
    assert doctest.testmod(module, extraglobs=names).failed == 0

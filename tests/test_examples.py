"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
from PIL import Image

import bcosvit.data

PACKAGES = (bcosvit.data,)
MODULES = ["bcosvit.messages", "bcosvit.registry"] + [
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (64, 48)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = {public: getattr(bcosvit.data, public) for public in bcosvit.data.__all__}
    assert doctest.testmod(module, extraglobs=names).failed == 0

"""The wheel as a stranger gets it: small, complete, and enough to explain a picture."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bcosvit.doctor import EXTRAS
from bcosvit.shipped import DEFAULT
from tests.report.support import Page, write_pictures

ROOT = Path(__file__).parents[1]
MEGABYTES = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the tree and nothing old gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", wheel, "--target", folder)
    return folder


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    result = subprocess.run([*command, "--no-deps", "--no-index"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def run(installed: Path, code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Python with the wheel before everything else, and without what the extras would bring."""
    absent = [module for modules in EXTRAS.values() for module in modules]
    block = f"import sys; sys.modules.update(dict.fromkeys({absent}));"
    return subprocess.run(
        [sys.executable, "-c", block + code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200"},
        **options,
    )


def test_it_is_small_and_complete(wheel):
    assert wheel.stat().st_size <= MEGABYTES * 10**6
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"bcosvit/py.typed", f"bcosvit/pretrained/{DEFAULT}.safetensors"} <= names
    assert f"bcosvit/pretrained/{DEFAULT}.md" in names
    source = ROOT / "src/bcosvit"
    files = [*source.rglob("*.py"), *source.glob("*/templates/*"), *source.glob("*/static/*")]
    assert {path.relative_to(ROOT / "src").as_posix() for path in files} <= names
    assert any(path.suffix == ".jinja" for path in files)
    outside = {name for name in names if not name.startswith(("bcosvit/", "bcosvit-"))}
    assert outside == set()


def test_it_explains_a_picture(installed, tmp_path):
    picture = next(write_pictures(tmp_path / "pictures", 1, size=256).iterdir())
    code = "import runpy; runpy.run_module('bcosvit', run_name='__main__', alter_sys=True)"
    result = run(installed, code, "explain", str(picture), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Probability" in result.stdout
    assert result.stdout.endswith("1 picture explained: report.html\n")
    page = Page(tmp_path / "report.html")
    page.assert_self_contained()
    assert DEFAULT in page.text


def test_it_is_the_wheel_that_runs(installed):
    code = "import bcosvit, bcosvit.doctor, json; print(json.dumps([bcosvit.__file__, "
    code += "list(bcosvit.doctor.examine().weights)]))"
    result = run(installed, code)
    assert result.returncode == 0, result.stderr
    file, weights = json.loads(result.stdout)
    assert Path(file).is_relative_to(installed)
    assert DEFAULT in weights


def test_importing_it_costs_little(installed):
    """Little beside torch, that is: both are timed in one process, the ratio is what holds."""
    code = "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); "
    code += "before = set(sys.modules); import bcosvit; c = time.perf_counter(); import json; "
    code += "print(json.dumps([b - a, c - b, sorted(set(sys.modules) - before)]))"
    result = run(installed, code)
    assert result.returncode == 0, result.stderr
    torchs, ours, modules = json.loads(result.stdout)
    print(f"import torch: {torchs:.2f} s, import bcosvit on top: {ours:.2f} s")
    assert ours < torchs
    strangers = {name.split(".")[0] for name in modules} - {"bcosvit", "safetensors", "torch"}
    assert {"torchvision", "matplotlib", "PIL", "rich", "typer", "pandas"} & strangers == set()

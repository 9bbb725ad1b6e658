"""`bcosvit doctor`, and what else helps a user find the way: completion and examples."""

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bcosvit.doctor
from bcosvit.cli import app
from bcosvit.doctor import CORE, EXTRAS, examine
from tests.report.support import write_weights

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An installation with nothing but the core, and one shipped model."""
    shelf = tmp_path / "shelf"
    write_weights(shelf / f"{bcosvit.doctor.DEFAULT}.safetensors")
    monkeypatch.setattr("bcosvit.shipped.FOLDER", shelf)
    monkeypatch.setattr(bcosvit.doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(bcosvit.doctor, "HAS_TRITON", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = tmp_path / "cache/bcosvit/weights/0/m.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(2**20))
    return tmp_path


def test_what_is_missing_comes_with_its_command(bare):
    result = CliRunner(env={"COLUMNS": "150"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "lacks onnx, onnxscript, onnxruntime: pip install 'bcosvit[export]'" in result.stdout
    assert "triton is not installed" in result.stdout
    assert f"{bcosvit.doctor.DEFAULT} (0.0 MiB, the default)" in result.stdout
    assert f"{bare / 'cache/bcosvit/weights'} (1.0 MiB)" in result.stdout


def test_json(bare):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert found["versions"]["bcosvit"] == bcosvit.__version__
    assert found["extras"]["hub"] == {
        "missing": ["huggingface_hub"],
        "install": "pip install 'bcosvit[hub]'",
    }
    assert found["cached"] == 2**20
    assert found["default_weights"] in found["weights"]
    assert found == json.loads(json.dumps(examine().as_dict()))


def test_here():
    found = examine()
    assert all(found.versions[name] for name in CORE)
    assert found.torchvision.startswith("imported")
    assert "cpu" in found.devices
    assert not any(extra.missing for extra in found.extras.values())


def test_a_broken_torchvision_is_a_finding(monkeypatch):
    monkeypatch.delitem(sys.modules, "bcosvit._torchvision", raising=False)
    monkeypatch.delattr(bcosvit, "_torchvision", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "cannot be imported (ModuleNotFoundError" in examine().torchvision


def test_the_lists_are_the_projects():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return tuple(
            {"pyyaml": "yaml", "scikit-learn": "sklearn"}.get(name, name)
            for name in (re.match(r"[\w-]+", line)[0] for line in requirements)
        )

    extras = {key: names(v) for key, v in project["optional-dependencies"].items() if key in EXTRAS}
    assert extras == EXTRAS
    assert set(project["optional-dependencies"]) - set(EXTRAS) <= {"dev", "docs", "bench"}
    assert names(project["dependencies"]) == CORE


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples(command):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert re.search(r"Examples?:", result.stdout)
    assert len(re.findall(rf"bcosvit {command}\b", result.stdout)) >= 1


def test_shell_completion(monkeypatch):
    """Typer asks which shell it runs in; here it is told."""
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    result = CliRunner().invoke(app, ["--show-completion"], prog_name="bcosvit")
    assert result.exit_code == 0, result.output
    assert "_BCOSVIT_COMPLETE=complete_bash" in result.stdout
    asked = {
        "_BCOSVIT_COMPLETE": "complete_bash",
        "COMP_WORDS": "bcosvit ex",
        "COMP_CWORD": "1",
    }
    result = CliRunner(env=asked).invoke(app, [], prog_name="bcosvit")
    assert result.stdout.split() == ["explain", "export"]

"""The installed command, run as a user runs it."""

import ast
import json
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from bcosvit import create_model, list_models, save
from bcosvit.attribution import METHODS
from bcosvit.cli import app, main, names
from bcosvit.cli.names import KINDS, REGISTRIES, TABLE, registered
from bcosvit.data.sources import SOURCES
from bcosvit.metrics import METRICS
from bcosvit.shipped import DEFAULT
from bcosvit.train import RECIPES
from tests.command import bcosvit
from tests.conftest import small_config


def run(*arguments: str):
    """In this process: starting another one takes longer than most commands."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_info_prints_the_models_costs():
    result = bcosvit("info", "bcos_vit_ti_38", "--batch-size", "8", "--set", "maxout=1")
    assert result.returncode == 0, result.stderr
    # 12 blocks of width 192 without MaxOut: 12·(4·192² + 8·192²) weights, q and k biases, LayerNorm
    # and a prior of 3·196² each.
    parameters = 12 * (12 * 192**2 + 2 * 192 + 2 * 192 + 3 * 196**2)
    assert f"{parameters:,}" in result.stdout
    assert "14×14 = 196" in result.stdout
    assert "training, batch 8" in result.stdout


def test_info_knows_shipped_models():
    result = run("info", "bcos_vit_ti_87_imagenette")
    assert result.exit_code == 0, result.output
    assert "14×14 = 196" in result.stdout


def test_info_describes_weights_files(tmp_path):
    path = tmp_path / "model.safetensors"
    save(create_model(small_config(depth=2)), path)
    result = run("info", str(path), "--batch-size", "2")
    assert result.exit_code == 0, result.output
    assert "16×16 pixels" in result.stdout and "training, batch 2" in result.stdout


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app).commands))
def test_help_fits_narrow_terminals(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "Options" in shown and "…" not in shown
    assert not re.search(r"<(str|bool|int)\b", shown)


def test_info_lists_everything_that_has_a_name():
    result = run("info")
    assert result.exit_code == 0, result.output
    listed = (*list_models(), *METHODS.names(), *METRICS.names(), *SOURCES.names(), *RECIPES)
    assert [name for name in listed if name not in result.stdout] == []


@pytest.mark.parametrize(
    ("command", "lists"),
    [
        ("explain", ("methods", "weights")),
        ("evaluate", ("methods", "metrics", "weights", "data")),
        ("train", ("models", "recipes", "data")),
        ("reproduce", ("figures", "recipes", "methods")),
    ],
)
def test_help_lists_what_is_registered(command, lists, monkeypatch):
    monkeypatch.setattr(names, "list_names", lambda kind: [f"{kind}-from-a-registry"])
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    words = "".join(result.output.split())
    assert [kind for kind in KINDS if f"{kind}-from-a-registry" in words] == [
        kind for kind in KINDS if kind in lists
    ]
    assert [kind for kind in KINDS if f"{{{kind}}}" in words] == []


def test_table_of_names_is_that_of_the_registries():
    # Written by: python -m bcosvit.cli.names
    table = json.loads(TABLE.read_text("utf-8"))
    found = {kind: registered(kind) for kind in REGISTRIES}
    # Other tests may have registered more, behind what the package brings.
    assert {kind: found[kind][: len(listed)] for kind, listed in table.items()} == table
    assert found.keys() == table.keys()


def test_table_of_names_is_complete():
    code = "from bcosvit.cli.names import *; print({k: len(registered(k)) for k in REGISTRIES})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    table = json.loads(TABLE.read_text("utf-8"))
    assert ast.literal_eval(out.stdout) == {kind: len(listed) for kind, listed in table.items()}


def test_help_computes_nothing():
    wanted = [["--version"], *([name, "--help"] for name in typer.main.get_command(app).commands)]
    code = (
        "import sys, contextlib; from bcosvit.cli import app\n"
        "heavy = {'torch', 'numpy', 'PIL', 'lightning', 'gradio', 'matplotlib'}\n"
        f"for arguments in {wanted}:\n"
        "    with contextlib.suppress(SystemExit): app(arguments)\n"
        "    print(arguments[0], sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.count("Usage: ") == len(wanted) - 1
    assert out.stderr.splitlines() == [f"{name} []" for name, *_ in wanted]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("explain --methods ro", "rollout"),
        ("explain --methods inherent,ro", "inherent,rollout"),
        (f"explain --weights {DEFAULT[:-3]}", DEFAULT),
        ("evaluate --metrics loc", "localization"),
        ("evaluate --metrics al", "all"),
        ("train --recipe qu", "quick"),
        ("train --model bcos_vit_b_8", "bcos_vit_b_87"),
        ("info bcos_vit_b_8", "bcos_vit_b_87"),
        ("reproduce accu", "accuracy"),
        ("train scen", "scenes"),
        ("train data --init bcos_vit_ti", "bcos_vit_ti_87_imagenette"),
        ("info bcos_vit_ti_87_", "bcos_vit_ti_87_imagenette"),
    ],
)
def test_completion(words, completed):
    env = {"_BCOSVIT_COMPLETE": "complete_bash", "COMP_WORDS": f"bcosvit {words}"}
    env["COMP_CWORD"] = str(len(words.split()))
    result = CliRunner().invoke(app, env=env, prog_name="bcosvit")
    assert result.output.split() == [completed]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "bcos_vit_ti_39"], "did you mean"),
        (["info", "bcos_vit_ti_38", "--set", "b=0.5"], "B = 0.5"),
        (["info", "bcos_vit_ti_38", "--set", "maxout"], "write key=value"),
        (["export", "--format", "paper", "--out", "o"], "choose from onnx, torch-export, hub"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["bcosvit", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: ") and says in said


def test_mistakes_of_the_installed_command():
    result = bcosvit("info", "bcos_vit_ti_39")
    assert result.returncode == 2
    assert "did you mean" in result.stderr and "Traceback" not in result.stderr

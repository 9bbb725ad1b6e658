"""`bcosvit explain` and `bcosvit evaluate`, as a user runs them."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from bcosvit.cli import app, main
from bcosvit.data.scenes import Scenes
from bcosvit.files import locked_file, locked_folder
from tests.command import bcosvit
from tests.report.support import Page, write_pictures, write_weights

DATA = "scenes?size=32&train=8&val=24"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a user works: weights and three pictures."""
    write_weights(tmp_path / "model.safetensors", classes=Scenes.classes)
    write_pictures(tmp_path / "pictures", 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str):
    """In this process: starting another one takes longer than most commands."""
    return CliRunner().invoke(app, list(arguments))


def test_explain_with_everything(folder):
    result = run(
        *("explain", "pictures", "--weights", "model.safetensors", "--classes", "lemon,sea star"),
        *("--methods", "inherent,rollout", "--joint", "--out", "r/report.html", "--npz", "npz"),
        *("--png", "png", "--json", "all.json", "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    assert "3 pictures explained: r/report.html" in result.stdout
    Page(folder / "r/report.html").assert_self_contained()
    assert len(list((folder / "npz").iterdir())) == 3
    # Two classes with two methods, an overlay and the colors of W(x).
    assert len(list((folder / "png").iterdir())) == 3 * 2 * 4
    assert len(json.loads((folder / "all.json").read_text())["images"]) == 3


@pytest.mark.parametrize(
    ("lock", "out", "command"),
    [
        (locked_file, "r.html", "explain pictures --out"),
        (locked_file, "r.json", "explain pictures --json"),
        (locked_folder, "npz", "explain pictures --npz"),
        (locked_folder, "png", "explain pictures --png"),
        (locked_folder, "e", f"evaluate --data {DATA} --out"),
        (locked_file, "m.pt2", "export --format torch-export --out"),
        (locked_folder, "hub", "export --format hub --out"),
    ],
)
def test_of_two_commands_with_one_output_the_second_is_told(folder, lock, out, command):
    with lock(out):
        result = run(*command.split(), out, "--weights", "model.safetensors")
    assert isinstance(result.exception, ValueError)
    assert f"Another process is writing to {out}" in str(result.exception)
    # What was locked is left as it was, and can be written now.
    with lock(out):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_leaves_nothing(folder, number):
    command = [sys.executable, "-m", "bcosvit", "export", "--weights", "model.safetensors"]
    process = subprocess.Popen(
        [*command, "--out", "out/model.onnx"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    out = folder / "out"
    while process.poll() is None and not (out.exists() and list(out.iterdir())):
        time.sleep(0.01)
    process.send_signal(number)
    errors = process.communicate()[1]
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1].startswith("Error: Stopped by ")
    assert "Traceback" not in errors
    assert list(out.iterdir()) == []


def test_names_cannot_command_the_terminal(folder):
    (folder / "pictures" / "0000.png").rename(folder / "pictures" / "a\x1b[2J[red].png")
    (folder / "pictures" / "b\x1b[2J.png").write_bytes(b"no picture")
    result = run("explain", "pictures", "--weights", "model.safetensors")
    assert result.exit_code == 0, result.output
    assert "a\\x1b[2J[red].png" in result.stdout
    assert "\x1b[2J" not in result.output


def test_errors_cannot_command_the_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bcosvit", "explain", "missing\x1b[2J.png"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "missing\\x1b[2J.png" in said and "\x1b[2J" not in said


def test_explain_by_default(folder):
    result = run("explain", "pictures/0000.png", "--weights", "model.safetensors")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("0000.png") and lines[1].rstrip().endswith("%")
    assert [line for line in lines if "independent sigmoids" in line] == lines[-2:-1]
    assert lines[-1] == "1 picture explained: report.html"
    assert (folder / "report.html").exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors",
        "pictures",
        "report.html",
    ]


def test_explain_opens_its_report(folder, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    run("explain", "pictures", "--weights", "model.safetensors", "--out", "r.html", "--open")
    assert opened == [(folder / "r.html").absolute().as_uri()]


def test_evaluate_prints_a_table(folder):
    result = run(
        *("evaluate", "--weights", "model.safetensors", "--data", DATA, "--out", "results"),
        *("--methods", "inherent,random", "--grids", "2", "--images", "3", "--limit", "20"),
        *("--batch-size", "8", "--seed", "1", "--metrics", "all", "--split", "val"),
    )
    assert result.exit_code == 0, result.output
    assert "Top-1 accuracy" in result.stdout
    assert "random" in result.stdout
    assert "results/report.html" in result.stdout
    Page(folder / "results/report.html").assert_self_contained()


def test_evaluate_prints_json_alone(folder):
    result = run(
        *("evaluate", "--weights", "model.safetensors", "--data", DATA, "--out", "results"),
        *("--metrics", "accuracy", "--json"),
    )
    assert json.loads(result.stdout)["accuracy"]["images"] == 24


def test_the_report_names_its_command(folder):
    options = ["--weights", "model.safetensors", "--classes", "sea star", "--out", "a b.html"]
    result = bcosvit("explain", "pictures/0000.png", *options)
    assert result.returncode == 0, result.stderr
    command = (
        "bcosvit explain pictures/0000.png --weights model.safetensors "
        "--classes 'sea star' --out 'a b.html'"
    )
    assert command in Page(folder / "a b.html").text


def test_a_mistake_is_one_sentence(folder):
    (folder / "[bold].png").write_bytes(b"no picture")
    result = bcosvit("explain", "[bold].png", "--weights", "model.safetensors")
    assert result.returncode == 2
    assert "Error: The file [bold].png is not an image of a known format" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--out", "file/report.html"), "file cannot be used (Not a directory)"),
        (("--out", "pictures"), "pictures cannot be used (Is a directory)"),
        (("--out", ""), ". cannot be used (Is a directory)"),
        (("--npz", "file"), "file cannot be used (Not a directory)"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(folder, monkeypatch, capsys, option, says):
    (folder / "file").touch()
    command = ["bcosvit", "explain", "pictures", "--weights", "model.safetensors", *option]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"Error: {says}; check the path" in capsys.readouterr().err


def test_evaluate_looks_at_its_folder_first(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr("bcosvit.report.evaluate.evaluate", lambda *_, **__: pytest.fail("late"))
    weights = ("--weights", "model.safetensors", "--data", DATA, "--metrics", "accuracy")
    result = run("evaluate", *weights, "--out", "file")
    assert isinstance(result.exception, NotADirectoryError)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "pictures", "--weights", "missing.safetensors"], "no weights file"),
        (["explain", "nowhere", "--weights", "model.safetensors"], "no file or folder nowhere"),
        (
            ["explain", "pictures", "--weights", "model.safetensors", "--classes", "lemmon"],
            "did you mean 'lemon'",
        ),
        (
            ["evaluate", "--weights", "model.safetensors", "--data", "nowhere", "--out", "o"],
            "nowhere is missing",
        ),
    ],
)
def test_mistakes(folder, arguments, says):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)

"""Another package adds a method, a metric, a kind of model and a figure in one file each.

Its modules are announced by entry points, as those of an installed package are, and then stand in
every list: of functions, of the command line, in reports and on the web page. Nothing in bcosvit
knows their names.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parent / "plugins"
ENTRY_POINTS = """\
[bcosvit.explainers]
edges = edge_method
[bcosvit.metrics]
spread = spread_metric
[bcosvit.models]
patches = patch_model
[bcosvit.figures]
width = width_figure
"""
DRIVER = """
import json, warnings
from typer.testing import CliRunner
from bcosvit.cli import app
from bcosvit.cli.names import complete

found = {}

def run(*arguments, **environment):
    done = CliRunner().invoke(app, list(arguments), env=environment, prog_name="bcosvit")
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.output

# First what a terminal asks for: nothing else has loaded the other package yet.
found["help"] = {name: run(name, "--help") for name in ("evaluate", "train", "reproduce")}
asked = (("methods", "inherent,edg"), ("metrics", "spr"), ("figures", "wid"))
found["completed"] = [complete(kind, several=True)(given) for kind, given in asked]
words = "bcosvit explain x.png --methods inherent,ed"
found["shell"] = run(_BCOSVIT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="4")

import torch, bcosvit
from bcosvit.data.scenes import Scenes
from bcosvit.metrics import METRICS

torch.manual_seed(0)
model = bcosvit.create_model("patch_classifier", num_classes=8)
names = json.dumps(list(Scenes.classes))
bcosvit.save(model, "model.safetensors", metadata={"bcosvit.classes": names})
Scenes("val", size=32, length=1)[0].image.save("photo.png")
model = bcosvit.load("model.safetensors")
found["explainers"], found["metrics"] = bcosvit.explainers(model), METRICS.names()
found["models"], found["loaded"] = bcosvit.list_models(), type(model).__name__
found["info"] = run("info")
data = ("--data", "scenes?size=32&train=8&val=16", "--out", "evaluation")
options = ("--methods", "inherent,edges", "--metrics", "accuracy,spread")
run("evaluate", "--weights", "model.safetensors", *data, *options)
run("explain", "photo.png", "--weights", "model.safetensors", "--methods", "all")

warnings.simplefilter("ignore")
from bcosvit.predictor import Predictor
from bcosvit.web.app import build
from bcosvit.web.service import ExplanationService
blocks = build(ExplanationService(predictor=Predictor.load("model.safetensors", "cpu")))
(offered,) = [each for each in blocks.blocks.values() if each.elem_id == "methods"]
found["page"] = str(offered.choices)
with open("found.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What commands write in an environment where the other package is installed, and say there."""
    folder = tmp_path_factory.mktemp("plugins")
    site = folder / "site"
    shutil.copytree(PLUGINS, site, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text())


def test_functions_list_them(found):
    assert "edges" in found["explainers"] and "inherent" in found["explainers"]
    assert "spread" in found["metrics"]
    assert "patch_classifier" in found["models"]
    assert found["loaded"] == "PatchClassifier"


def test_evaluation_and_its_report_have_them(folder):
    page = (folder / "evaluation" / "report.html").read_text()
    for words in ("Brightness edges", "Spread of the map", "Pixels for half", "#123456"):
        assert words in page, words
    assert "edges" in (folder / "evaluation" / "spread.csv").read_text()
    summary = json.loads((folder / "evaluation" / "summary.json").read_text())
    assert set(summary["spread"]["spread"]) == {"inherent", "edges"}


def test_the_report_of_an_explanation_has_them(folder):
    page = (folder / "report.html").read_text()
    assert "Brightness edges" in page
    assert "B-cos patch classifier, 8 classes" in page


def test_help_completion_and_info_list_them(found):
    listed = {
        "evaluate": ("edges", "spread"),
        "train": ("patch_classifier",),
        "reproduce": ("edges", "width"),
    }
    for command, names in listed.items():
        assert [name for name in names if name not in found["help"][command]] == []
    lists = ("edges", "spread", "patch_classifier")
    assert [name for name in lists if name not in found["info"]] == []
    assert found["completed"] == [["inherent,edges"], ["spread"], ["width"]]


def test_the_web_page_offers_them(found):
    assert "('Brightness edges', 'edges')" in found["page"]


def test_the_shell_completes_them(found):
    assert "inherent,edges" in found["shell"].splitlines()

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
WEIGHTS = """
import json, torch, bcosvit
from bcosvit.data.scenes import Scenes
torch.manual_seed(0)
model = bcosvit.create_model("patch_classifier", num_classes=8)
names = json.dumps(list(Scenes.classes))
bcosvit.save(model, "model.safetensors", metadata={"bcosvit.classes": names})
Scenes("val", size=32, length=1)[0].image.save("photo.png")
"""
LISTS = """
import json, bcosvit
from bcosvit.metrics import METRICS
model = bcosvit.load("model.safetensors")
print(json.dumps({
    "explainers": bcosvit.explainers(model),
    "metrics": METRICS.names(),
    "models": bcosvit.list_models(),
    "loaded": type(model).__name__,
}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python in a folder, in an environment where the other package is installed."""
    folder = tmp_path_factory.mktemp("plugins")
    site = folder / "site"
    shutil.copytree(PLUGINS, site, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])

    def call(*arguments: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "dumb", **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call.folder = folder
    call("-c", WEIGHTS)
    return call


def test_functions_list_them(run):
    found = json.loads(run("-c", LISTS))
    assert "edges" in found["explainers"] and "inherent" in found["explainers"]
    assert "spread" in found["metrics"]
    assert "patch_classifier" in found["models"]
    assert found["loaded"] == "PatchClassifier"


def test_evaluation_and_its_report_have_them(run):
    data = ["--data", "scenes?size=32&train=8&val=16", "--out", "evaluation"]
    options = ["--methods", "inherent,edges", "--metrics", "accuracy,spread"]
    run("-m", "bcosvit", "evaluate", "--weights", "model.safetensors", *data, *options)
    page = (run.folder / "evaluation" / "report.html").read_text()
    for words in ("Brightness edges", "Spread of the map", "Pixels for half", "#123456"):
        assert words in page, words
    assert "edges" in (run.folder / "evaluation" / "spread.csv").read_text()
    summary = json.loads((run.folder / "evaluation" / "summary.json").read_text())
    assert set(summary["spread"]["spread"]) == {"inherent", "edges"}


def test_the_report_of_an_explanation_has_them(run):
    options = ["--weights", "model.safetensors", "--methods", "all"]
    run("-m", "bcosvit", "explain", "photo.png", *options)
    page = (run.folder / "report.html").read_text()
    assert "Brightness edges" in page
    assert "B-cos patch classifier, 8 classes" in page


def test_help_completion_and_info_list_them(run):
    listed = {
        "evaluate": ("edges", "spread"),
        "train": ("patch_classifier",),
        "reproduce": ("edges", "width"),
    }
    for command, names in listed.items():
        words = run("-m", "bcosvit", command, "--help")
        assert [name for name in names if name not in words] == []
    lists = run("-m", "bcosvit", "info")
    assert [n for n in ("edges", "spread", "patch_classifier") if n not in lists] == []
    code = "from bcosvit.cli.names import complete; print(complete('{}', several=True)('{}'))"
    assert run("-c", code.format("methods", "inherent,edg")) == "['inherent,edges']\n"
    assert run("-c", code.format("metrics", "spr")) == "['spread']\n"
    assert run("-c", code.format("figures", "wid")) == "['width']\n"


PAGE = """
import warnings; warnings.simplefilter("ignore")
from bcosvit.predictor import Predictor
from bcosvit.web.app import build
from bcosvit.web.service import ExplanationService
blocks = build(ExplanationService(predictor=Predictor.load("model.safetensors", "cpu")))
(offered,) = [each for each in blocks.blocks.values() if each.elem_id == "methods"]
print(offered.choices)
"""


def test_the_web_page_offers_them(run):
    pytest.importorskip("gradio")
    assert "('Brightness edges', 'edges')" in run("-c", PAGE)


def test_the_shell_completes_them(run):
    words = "bcosvit explain x.png --methods inherent,ed"
    variables = {"_BCOSVIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    code = "import sys; sys.argv = ['bcosvit']; from bcosvit.cli import main; main()"
    assert "inherent,edges" in run("-c", code, **variables).splitlines()

"""benchmarks/paper_models.py: what it trains and measures is what `reproduce` finds finished."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from bcosvit.data import open_source
from bcosvit.data.dataset import Split
from bcosvit.data.transforms import EvalTransform
from bcosvit.paper import measure, reproduce
from bcosvit.train.callbacks import History
from tests.paper.support import SETTINGS, small_study, write_squares

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paper_models.py"


@pytest.fixture(autouse=True)
def precision():
    """The script sets how its process multiplies, which here is that of other tests."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_its_runs_and_measurements_are_those_of_reproduce(tmp_path, monkeypatch):
    monkeypatch.setattr(History, "_write_curves", lambda self: None)
    data, out = write_squares(tmp_path / "data"), tmp_path / "out"
    settings = [f"{key}={value}".replace(" ", "") for key, value in SETTINGS.items()]
    shared = [f"--data={data}", f"--out={out}", "--family=bcos", "--set", *settings]
    measuring = ["--models=ti_38", "--methods=inherent,ixg", "--grids=3", "--images=4"]
    plan = tmp_path / "plan.txt"
    plan.write_text(
        " ".join(["measure", *measuring, "--batch-size=8", "--metrics=accuracy,nothing", *shared])
        + "\n\n"
        + " ".join(["measure", *measuring, "--batch-size=8", *shared])
        + "\n"
    )

    def run(*command):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["paper_models.py", *command])
            runpy.run_path(str(SCRIPT), run_name="__main__")

    read = []
    get = Split.__getitem__
    monkeypatch.setattr(Split, "__getitem__", lambda self, at: read.append(at) or get(self, at))
    with pytest.raises(SystemExit, match="is not trained"):
        run("train", "--models=ti_38", *shared)
    run("work", str(plan))
    assert not list(out.rglob("measured"))
    run("backbone", *shared)
    run("train", "--models=ti_38", *shared)
    read.clear()
    run("work", str(plan))
    # Each of 25 images once, for the predictions and all metrics.
    assert sorted(read) == list(range(25))
    # What fails is tried twice and is not in the way of the others.
    assert sum("nothing" in claim.name for claim in (out / "claims").iterdir()) == 2

    lines = []
    monkeypatch.setattr(measure, "_measure", lambda *_: pytest.fail("measured again"))
    options = small_study(data, out, recipe="small", methods=("inherent", "ixg"))
    reproduce("perturbation,localization", options, lines.append)
    assert "2 runs: 2 finished before, 0 to train" in lines
    table = json.loads((out / "perturbation" / "table.json").read_text())
    assert {row["method"] for row in table["rows"]} == {"inherent", "ixg"}


def test_kept_images_are_those_of_the_split(tmp_path):
    kept_split = runpy.run_path(str(SCRIPT))["KeptSplit"]
    split = open_source(str(write_squares(tmp_path, train=2, val=2))).val
    kept = {}
    for size in (16, 32):
        transform = EvalTransform(size)
        plain, held = split.with_transform(transform), kept_split(split, kept)
        held = held.with_transform(transform)
        for _ in range(2):
            (image, *rest), (expected, *others) = held[3], plain[3]
            assert image.equal(expected) and rest == others
    assert held[3][0] is held[3][0]

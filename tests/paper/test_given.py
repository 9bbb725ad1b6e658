"""Figures of weights that are given: measured as they are, and nothing is trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bcosvit
from bcosvit.cli import app
from bcosvit.data import labeled_images, open_source
from bcosvit.metrics import METRICS, PixelPerturbation, configure, evaluate
from bcosvit.metrics.randomization import shuffled_weights
from bcosvit.models.weights import CLASSES_KEY
from bcosvit.paper import FIGURES, StudyOptions, charts, measure, reproduce, runs
from bcosvit.predictor import Predictor
from tests.paper.support import COLORS, write_squares

METHODS = ("inherent", "ixg", "rollout")


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch):
    monkeypatch.setattr(runs, "train_model", None)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A validation split alone."""
    root = write_squares(tmp_path_factory.mktemp("data"), train=0, val=8)
    for folder in (root / "train").iterdir():
        folder.rmdir()
    (root / "train").rmdir()
    return root


def write_weights(path: Path, data: Path, family: str = "bcos") -> Path:
    """A model that has learned the colors of these squares."""
    torch.manual_seed(0)
    config = bcosvit.ModelConfig(
        family=family,
        width=12,
        num_heads=2,
        depth=1,
        image_size=32,
        num_classes=len(COLORS),
        backbone=bcosvit.StemConfig(widths=(8, 8)),
        logit_scale=1.0,
        logit_bias=0.0,
    )
    model = bcosvit.create_model(config).eval()
    images = labeled_images(open_source(data, only_val=True), "val", None, model.transform)
    inputs = torch.stack([image for image, _, _ in images])
    labels = torch.tensor([label for _, label, _ in images])
    with torch.enable_grad():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    bcosvit.save(model, path, metadata={CLASSES_KEY: json.dumps(sorted(COLORS))})
    return path


@pytest.fixture(scope="module")
def weights(data, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "mine.safetensors", data)


def options(data: Path, out: Path, *weights: Path, **changes) -> StudyOptions:
    fields = {"methods": METHODS, "grids": 3, "images": 4, "batch_size": 8, "device": "cpu"}
    given = tuple(str(each) for each in weights)
    settings = {"num_workers": 0}
    return StudyOptions(
        data=str(data), out=out, weights=given, settings=settings, **{**fields, **changes}
    )


def test_what_is_measured_is_what_evaluate_finds(data, weights, tmp_path):
    names = ("localization", "perturbation")
    # One method was measured before, and the others are added to it.
    reproduce(",".join(names), options(data, tmp_path, weights, methods=("rollout",)), log=str)
    made = reproduce(",".join(names), options(data, tmp_path, weights), log=lambda _: None)
    assert made.missing == {}
    predictor = Predictor.load(weights, "cpu")
    images = labeled_images(
        open_source(data, only_val=True), "val", predictor.class_names, predictor.transform
    )
    amounts = {"localization": {"grids": 3}, "perturbation": {"images": 4}}
    metrics = [configure(METRICS.get(name), amounts[name]) for name in names]
    found = evaluate(predictor.model, images, METHODS, metrics=metrics, batch_size=8)
    for name, column in zip(names, ("localization", "ABC"), strict=True):
        rows = [row for row in made.outcomes[name].rows if row["model"] == "mine"]
        mine = {row["method"]: row[column] for row in rows if row.get("output") != "logit"}
        (expected,) = found[name].columns().values()
        assert mine == pytest.approx({method: each.mean for method, each in expected.items()})


def test_a_measurement_that_was_stopped_goes_on_where_it_was(data, weights, tmp_path, monkeypatch):
    study = options(data, tmp_path / "stopped", weights, batch_size=1)
    whole = reproduce("perturbation", replace(study, out=tmp_path / "whole"), log=lambda _: None)
    scored, most = [], 2
    score = PixelPerturbation.score

    def stop_after_two(metric, batch):
        scored.extend(key for key in batch.keys if key not in scored)
        if len(scored) > most:
            raise KeyboardInterrupt
        return score(metric, batch)

    monkeypatch.setattr(PixelPerturbation, "score", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        reproduce("perturbation", study, log=lambda _: None)
    (partial,) = study.out.glob("given/*/measured/*.partial.jsonl")
    first = scored[:2]
    scored.clear()
    made = reproduce("perturbation", study, log=lambda _: None)
    assert len(scored) == 2
    assert set(scored).isdisjoint(first)
    assert made.outcomes["perturbation"].rows == whole.outcomes["perturbation"].rows
    assert not partial.exists()


def test_only_other_weights_are_measured_again(data, weights, tmp_path, monkeypatch):
    study = options(data, tmp_path / "out", weights)
    first = reproduce("localization", study, log=lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "evaluate", None)
        again = reproduce("localization", study, log=lambda _: None)
    assert again.outcomes["localization"].rows == first.outcomes["localization"].rows
    other = tmp_path / "mine.safetensors"
    bcosvit.save(shuffled_weights(bcosvit.load(weights), seed=0), other)
    changed = reproduce("localization", replace(study, weights=(str(other),)), log=lambda _: None)
    assert changed.outcomes["localization"].rows != first.outcomes["localization"].rows
    assert len(list((tmp_path / "out" / "given").iterdir())) == 2


def test_all_are_the_figures_that_do_not_train(data, weights, tmp_path):
    plain = write_weights(tmp_path / "plain.safetensors", data, "conventional")
    made = reproduce("all", options(data, tmp_path, weights, plain), log=lambda _: None)
    able = [name for name, figure in FIGURES.items() if figure.measures_weights]
    assert list(made.outcomes) == able
    families = {row["family"]: row["model"] for row in made.outcomes["conventional"].rows}
    assert set(families) == {"B-cos", "conventional"}
    for name in able:
        summary = json.loads((tmp_path / name / "table.json").read_text())
        assert {run["model"] for run in summary["runs"]} <= {"mine", "plain"}
        assert summary["facts"]["Weights"] == f"{weights}, {plain}"
        assert "Seeds" not in summary["facts"]


def test_one_family_is_enough(data, weights, tmp_path):
    made = reproduce("options,faithfulness", options(data, tmp_path, weights), log=lambda _: None)
    for outcome in made.outcomes.values():
        assert {row["family"] for row in outcome.rows} == {"B-cos"}
        assert outcome.charts


def test_given_models_have_markers_of_their_own():
    models = dict.fromkeys(("Ti-38", "S-38", "mine", "bcos_vit_ti-38"), 0.5)
    drawn = charts.method_markers("a", "b", "c", {"side": {"ixg": models}}).inline
    assert all(name in drawn for name in models)
    assert len(set(charts._looks(list(models)).values())) == 4


@pytest.mark.parametrize(
    ("figure", "changes", "says"),
    [
        ("positional", [], "'positional' is about models that it trains"),
        ("localization", ["--seeds", "2"], "seeds is about training"),
        ("localization", ["--sizes", "ti"], "sizes is about training"),
        ("localization", ["--tune"], "tune is about training"),
        ("localization", ["--set", "epochs=3"], "the setting epochs is about training"),
        ("localization", ["--weights", "MINE"], "Two of the weights are called 'mine'"),
        ("localization", ["--weights", "none.safetensors"], "none.safetensors"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    data, weights, tmp_path, figure, changes, says
):
    out = tmp_path / "out"
    given = [str(weights) if each == "MINE" else each for each in changes]
    common = ["--data", str(data), "--out", str(out), "--device", "cpu", "--weights", str(weights)]
    result = CliRunner().invoke(app, ["reproduce", figure, *common, *given])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert not out.exists()

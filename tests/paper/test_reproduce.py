"""Every figure from nothing to its page, as the command makes it, and again from the cache."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bcosvit.cli import app
from bcosvit.paper import FIGURES, measure, reproduce, runs, tuning
from bcosvit.paper.runs import Cost
from bcosvit.train import Stopped
from bcosvit.train.callbacks import History
from bcosvit.train.task import Task
from tests.paper.support import SETTINGS, small_study, write_squares
from tests.report.support import Page


class PowerCutError(BaseException):
    """As if the process ended here: nothing of ours catches it."""


@pytest.fixture(scope="module", autouse=True)
def _no_curves():
    """Training's own curves, which are tested there and take a third of these runs' time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "_write_curves", lambda self: None)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_squares(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """All figures, and what was said on the way."""
    said: list[str] = []
    study = small_study(data, tmp_path_factory.mktemp("paper"))
    return study, reproduce("all", study, log=said.append), said


def watch(monkeypatch) -> list[tuple[str, bool]]:
    """Every call of training: the run's folder, and whether it resumes."""
    calls: list[tuple[str, bool]] = []
    original = runs.train_model

    def counted(*args, **kwargs):
        calls.append((Path(kwargs["out"]).name, kwargs.get("resume", False)))
        return original(*args, **kwargs)

    monkeypatch.setattr(runs, "train_model", counted)
    return calls


def size_of(path: Path) -> tuple[int, int]:
    """Of a picture that can be read."""
    with Image.open(path) as image:
        image.load()
        return image.size


def test_every_figure_is_drawn_from_shared_runs(whole):
    study, made, said = whole
    assert list(made.outcomes) == list(FIGURES)
    # Not every small model is confident of enough images for a grid.
    assert all("min_confidence=0.5" in name for name in made.missing)
    trained = [line for line in said if line.startswith("Training")]
    # Two backbones, then mul, none, emb, add, standard, B=1, no MaxOut, and the conventional one.
    assert len(trained) == len(set(trained)) == 2 + 8
    assert [line.split()[1] for line in trained[:2]] == ["bcos_densenet121", "densenet121"]
    measured = [line for line in said if line.startswith("Measuring")]
    assert len(measured) == len(set(measured))
    page = Page(study.out / "index.html")
    assert made.page == study.out / "index.html"
    assert {f"{name}/report.html" for name in FIGURES} <= set(page.links)
    for paper in ("2.47", "1.99", "2.32"):
        assert paper in page.text


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_leaves_plots_tables_and_a_page(whole, name):
    study, made, _ = whole
    folder, outcome = study.out / name, made.outcomes[name]
    page = Page(folder / "report.html")
    page.assert_self_contained()
    assert outcome.charts or outcome.panels
    for chart in outcome.charts:
        assert (folder / f"{chart.name}.svg").read_bytes().startswith(b"<?xml")
        assert size_of(folder / f"{chart.name}.png") > (100, 100)
    assert len(page.images) == len(outcome.panels)
    for panel in outcome.panels:
        assert size_of(folder / f"{panel.name}.png") == (panel.picture.width, panel.picture.height)
    if outcome.means:
        # What is to be read first stands by itself.
        assert all(row in outcome.rows for row in outcome.means)
        assert f"All {len(outcome.rows)} rows" in page.text
    summary = json.loads((folder / "table.json").read_text())
    with (folder / "table.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(summary["rows"]) > 0
    text = (folder / "table.md").read_text()
    for line in outcome.headlines:
        assert line.claim in page.text
        assert line.claim in text
        assert line.ours != "not measured"
    for row in summary["runs"]:
        prefix = "backbone." if "densenet" in row["run"] else ""
        assert row["epochs"] == SETTINGS[f"{prefix}epochs"]
        assert row["trained on"].startswith("cpu, ")
        # Backbones are not measured themselves.
        assert row["measured on"] == (None if prefix else row["trained on"])


def test_the_measured_models_are_those_of_the_last_epoch(whole):
    study, _, _ = whole
    folders = list((study.out / "runs").iterdir())
    assert len(folders) == 10
    for folder in folders:
        done = json.loads((folder / "done.json").read_text())
        last = (folder / "metrics.csv").read_text().splitlines()[-1]
        assert str(done["final_top1"]) in last.split(",")
        # Nothing is left to resume from.
        assert not (folder / "last.ckpt").exists()
    measured = [json.loads(p.read_text()) for p in study.out.glob("runs/*/measured/accuracy-*")]
    for each in measured:
        done = json.loads((study.out / "runs" / each["run"] / "done.json").read_text())
        result = each["result"]
        assert result["correct"].count("1") / result["images"] == pytest.approx(
            done["final_top1"], abs=1e-6
        )


def test_what_is_finished_is_neither_trained_nor_measured_again(whole, monkeypatch):
    study, made, _ = whole
    calls = watch(monkeypatch)
    monkeypatch.setattr(measure, "evaluate", None)
    said: list[str] = []
    again = reproduce("conventional", study, log=said.append)
    assert calls == []
    assert said == ["4 runs: 4 finished before, 0 to train"]
    assert again.outcomes["conventional"].rows == made.outcomes["conventional"].rows


def test_plots_are_drawn_where_there_are_no_weights(whole, tmp_path):
    """A folder that another machine has filled."""
    study, made, _ = whole
    for file in (*study.out.glob("runs/*/done.json"), *study.out.glob("runs/*/measured/*")):
        there = tmp_path / file.relative_to(study.out)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    elsewhere = replace(study, out=tmp_path)
    for name in ("accuracy", "conventional", "attention"):
        again = reproduce(name, elsewhere, log=lambda text: None)
        assert again.outcomes[name].rows == made.outcomes[name].rows


def test_a_run_predicts_the_images_once(data, tmp_path, monkeypatch):
    """Odd file names included, which no table can hold."""
    odd = tmp_path / "odd"
    shutil.copytree(data, odd)
    (odd / "val" / "red" / "0.png").rename(odd / "val" / "red" / "\udcff.png")
    study = small_study(odd, tmp_path / "paper", settings={**SETTINGS, "epochs": 1})
    predicted = []
    original = measure.evaluate

    def watched(*args, **kwargs):
        predicted.append(kwargs["known"] is None)
        if kwargs["metrics"][0].name == "perturbation" and len(predicted) == 2:
            raise PowerCutError
        return original(*args, **kwargs)

    monkeypatch.setattr(measure, "evaluate", watched)
    with pytest.raises(PowerCutError):
        reproduce("perturbation", study, log=lambda text: None)
    for figure in ("perturbation", "localization", "accuracy"):
        reproduce(figure, study, log=lambda text: None)
    reproduce("localization", replace(study, grids=2), log=lambda text: None)
    # Those of the conventional model are made for accuracy.
    assert predicted == [True, False, False, False, True, False]
    reproduce("localization", replace(study, limit=20), log=lambda text: None)
    assert predicted[6:] == [True, False]


@pytest.mark.parametrize(
    ("owner", "method", "after", "resumes"),
    [
        # In the third epoch, of 10 steps each.
        (Task, "training_step", 25, True),
        # All steps done, none of it put away.
        (runs, "_save_final", 1, True),
        (runs, "_start", 1, False),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_weights(
    whole, data, tmp_path, monkeypatch, owner, method, after, resumes
):
    study = small_study(data, tmp_path)
    backbone = next((whole[0].out / "runs").glob("bcos_densenet121*"))
    shutil.copytree(backbone, tmp_path / "runs" / backbone.name)
    original, count = getattr(owner, method), 0

    def cut(*args, **kwargs):
        nonlocal count
        count += 1
        if count == after:
            raise PowerCutError
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, cut)
        with pytest.raises(PowerCutError):
            reproduce("normalization", study, log=lambda _: None)
    calls = watch(monkeypatch)
    reproduce("normalization", study, log=lambda _: None)
    (name, resumed) = calls[0]
    assert len(calls) == 1
    assert name.startswith("bcos_vit_ti_38-seed0")
    assert resumed == resumes
    for folder in (tmp_path / "runs").iterdir():
        one = load_file(folder / "final.safetensors")
        other = load_file(whole[0].out / "runs" / folder.name / "final.safetensors")
        assert all(one[key].equal(other[key]) for key in other)


def test_a_figure_is_drawn_from_what_there_was_time_for(whole, monkeypatch):
    study, made, _ = whole
    wider = replace(study, taps=("38", "87"))
    cost = Cost(start_seconds=0.1, seconds_per_image=1e-6)
    monkeypatch.setattr(tuning, "run_cost", lambda study, spec: cost)
    monkeypatch.setattr(
        runs, "remaining_seconds", lambda study, spec: 1e9 if "87" in spec.model else 0.0
    )
    calls = watch(monkeypatch)
    part = reproduce("accuracy", replace(wider, minutes=10), log=lambda _: None)
    assert calls == []
    assert set(part.missing) == {"bcos_vit_ti_87", "vit_ti_87"}
    assert "minutes" in part.missing["vit_ti_87"]
    assert part.outcomes["accuracy"].rows == made.outcomes["accuracy"].rows
    page = Page(study.out / "accuracy" / "report.html")
    assert "Missing" in page.headings
    assert "bcos_vit_ti_87" in page.text


def test_a_given_backbone_is_not_trained_and_seen_once(whole, data, tmp_path, monkeypatch):
    backbone = next((whole[0].out / "runs").glob("bcos_densenet121*")) / "final.safetensors"
    settings = {**SETTINGS, "epochs": 1, "cache_views": 1}
    given = {"bcos_densenet121": str(backbone)}
    study = small_study(data, tmp_path, backbones=given, settings=settings, seeds=2)
    calls = watch(monkeypatch)
    reproduce("localization", study, log=lambda _: None)
    assert [name.split("-")[:2] for name, _ in calls] == [
        ["bcos_vit_ti_38", "seed0"],
        ["bcos_vit_ti_38", "seed1"],
    ]
    # Its features are cached for other transformers on it.
    cached = [path.name for path in (tmp_path / "features" / "runs").iterdir()]
    assert sorted(cached) == ["given-bcos-38-seed0", "given-bcos-38-seed1"]
    trained = load_file(tmp_path / "runs" / calls[0][0] / "final.safetensors")
    key = "features.conv0.weight"
    assert trained["tokenizer.backbone.conv0.weight"].equal(load_file(backbone)[key])


def test_a_given_backbone_that_does_not_fit_is_seen_before_training(data, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.safetensors"
    save_file({"a": torch.zeros(1)}, wrong)
    study = small_study(data, tmp_path / "out", backbones={"densenet121": str(wrong)})
    calls = watch(monkeypatch)
    with pytest.raises(ValueError, match=r"wrong.safetensors holds no DenseNet"):
        reproduce("accuracy", study, log=lambda _: None)
    assert calls == []


def test_the_command_on_drawn_scenes(tmp_path):
    settings = {**SETTINGS, "epochs": 1}
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(
        app,
        [
            *("reproduce", "normalization", "--data", "scenes?size=32&train=16&val=8"),
            *("--out", str(tmp_path), "--sizes", "ti", "--taps", "38", "--recipe", "quick"),
            *("--device", "cpu", "--batch-size", "8", *options),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "2 runs: 0 finished before, 2 to train" in result.output
    assert "13.6" in result.output
    page = tmp_path / "normalization" / "report.html"
    assert str(page) in result.output.replace("\n", "")
    assert "bcos_vit_ti_38-seed0" in Page(page).text


def test_stopped_by_hand_it_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(*args, **kwargs):
        raise Stopped("all is saved")

    monkeypatch.setattr("bcosvit.paper.reproduce", stopped)
    arguments = ["reproduce", "accuracy", "--data", "scenes", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert "give the same command again" in result.output


def test_without_time_there_are_pages_that_say_so(data, tmp_path, monkeypatch):
    cost = Cost(start_seconds=10.0, seconds_per_image=1.0)
    for module in (runs, tuning):
        monkeypatch.setattr(module, "run_cost", lambda study, spec: cost)
    calls = watch(monkeypatch)
    made = reproduce("all", small_study(data, tmp_path, minutes=0.01), log=lambda _: None)
    assert calls == []
    assert len(made.missing) == 10
    for name in FIGURES:
        page = Page(tmp_path / name / "report.html")
        assert "Missing" in page.headings
        assert "not measured" in page.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["qualitativ"], "There is no figure 'qualitativ'"),
        (["accuracy", "--sizes", "ti,xl"], "There is no size 'xl'"),
        (["accuracy", "--recipe", "fast"], "There is no schedule 'fast'"),
        (["accuracy", "--budget", "0"], "budget = 0.0 is not allowed"),
        (["accuracy", "--flavor", "v3"], "flavor = 'v3' is not allowed"),
        (["accuracy", "--set", "epoch=3"], "field 'epoch'"),
        (["accuracy", "--set", "modell.depth=3"], "The setting 'modell.depth' is unknown"),
        (["accuracy", "--set", "seed=3"], "seed is not allowed: give --seeds"),
        (["accuracy", "--set", "model.backbone=v1"], "model.backbone is not allowed"),
        (["accuracy", "--bcos-backbone", "none.pt"], "There is no weights file none.pt"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path, arguments, says):
    out = tmp_path / "out"
    common = ["--data", "scenes?size=32&train=16&val=8", "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, ["reproduce", *arguments, *common])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert not out.exists()

"""What a run leaves behind, starts from and refuses."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from benchmarks.quick import share_on_object
from PIL import Image
from typer.testing import CliRunner

import bcosvit
from bcosvit import create_model, load, save
from bcosvit.cli import app
from bcosvit.data.scenes import Scenes
from bcosvit.data.transforms import EvalTransform
from bcosvit.models.weights import read_metadata
from bcosvit.predictor import Predictor
from bcosvit.train import QUICK_MODEL, Recipe
from bcosvit.train.callbacks import plot_curves
from bcosvit.train.task import Task
from tests.conftest import randomize, small_config, tiny_config
from tests.train.support import DATA, model_config, recipe, rows, train
from tests.train.test_resume import PowerCutError, cut_power

POSITION = DATA.replace("scenes", "scenes:position")
"""Four classes instead of eight."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train(DATA, out=folder, model=model_config(), recipe=recipe(explain_every=2))


def test_it_leaves_everything_behind(run):
    found = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*.*")}
    events = {name for name in found if "tfevents" in name}
    assert events
    assert found - events == {
        "README.md",
        "best.safetensors",
        "curves.png",
        "last.ckpt",
        "metrics.csv",
        "explanations/epoch-0001.png",
        "explanations/epoch-0002.png",
        "explanations/epoch-0003.png",
        "previous.ckpt",
        "run.yaml",
        "tensorboard/hparams.yaml",
    }


def test_the_record_says_everything(run):
    record = yaml.safe_load((run.folder / "run.yaml").read_text())
    assert record["data"]["source"] == DATA
    assert record["data"]["classes"][0] == "ladybird"
    assert (record["data"]["train_images"], record["data"]["val_images"]) == (25, 11)
    assert record["recipe"]["seed"] == 0
    assert record["recipe"]["learning_rate"] == 3e-3
    assert record["model"]["position"] == "mul"
    assert record["trainer"]["devices"] == 1
    assert record["versions"]["bcosvit"] == bcosvit.__version__
    assert record["versions"]["torch"] == torch.__version__


def test_the_curves_are_numbers_and_a_picture(run):
    table = rows(run.folder)
    assert [row["step"] for row in table] == [4, 8, 12]
    assert table == run.rows
    assert max(row["val_top1"] for row in table) == run.accuracy
    with Image.open(run.folder / "curves.png") as curves:
        assert curves.size == (1440, 432)


def test_the_best_model_knows_its_classes(run):
    notes = read_metadata(run.weights)
    assert json.loads(notes["bcosvit.classes"])[:2] == ["ladybird", "lemon"]
    assert json.loads(notes["bcosvit.run"])["accuracy"] == run.accuracy
    assert load(run.weights).config == model_config()
    card = (run.folder / "README.md").read_text()
    assert f"{run.accuracy:.2%}" in card and "bcosvit.load" in card


@pytest.mark.parametrize("crop", [1.0, 0.5])
def test_reports_cut_pictures_as_validation_did(tmp_path, crop):
    ways = recipe(epochs=1, eval_crop=crop)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=ways)
    transform = Predictor.load(run.weights, "cpu").transform
    size = transform.image_size
    assert transform == EvalTransform(size, crop)


def test_a_model_of_any_size_is_shown_pictures_of_the_size_it_was_trained_on(tmp_path):
    backbone = bcosvit.DenseNetConfig(num_classes=8, blocks=(1, 1, 1), growth=4, stem_width=8)
    ways = recipe(epochs=1, image_size=48)
    run = train(DATA, out=tmp_path / "run", model=backbone, recipe=ways)
    assert Predictor.load(run.weights, "cpu").transform.image_size == 48
    save(load(run.weights), tmp_path / "again.safetensors")
    assert load(tmp_path / "again.safetensors").transform.image_size == 48
    # The size of a transformer is in its config alone.
    notes = {"bcosvit.run": json.dumps({"image_size": 48})}
    save(create_model(small_config()), tmp_path / "vit.safetensors", metadata=notes)
    size = load(tmp_path / "vit.safetensors").transform.image_size
    assert size == small_config().image_size[0] != 48


def test_the_picture_shows_photographs_and_contributions(run):
    with Image.open(run.folder / "explanations" / "epoch-0003.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    # Four pairs of columns, four rows of them.
    assert pixels.shape[0] > 4 * 192 and pixels.shape[1] > 4 * 192
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000


def test_conventional_models_have_no_pictures_of_contributions(tmp_path):
    config = model_config(family="conventional")
    ways = recipe(epochs=1, explain_every=1, loss="ce", clip="norm", clip_value=1.0, ema=None)
    folder = train(DATA, out=tmp_path / "run", model=config, recipe=ways).folder
    assert not (folder / "explanations").exists()
    assert "post hoc" in (folder / "README.md").read_text()


def test_a_folder_of_pictures_is_enough(tmp_path):
    generator = np.random.default_rng(0)
    for name, color in {"cat": 200, "dog": 50}.items():
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(9):
            pixels = generator.integers(0, color, (20, 30, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    (tmp_path / "pets" / "cat" / "broken.png").write_bytes(b"not a picture")
    run = train(
        tmp_path / "pets",
        out=tmp_path / "run",
        model=model_config(num_classes=2),
        recipe=recipe(epochs=1, val_fraction=0.3, max_skipped=0.2, batch_size=4),
    )
    assert [line.split("\t")[0] for line in (run.folder / "skipped.txt").read_text().splitlines()]
    assert json.loads(read_metadata(run.weights)["bcosvit.classes"]) == ["cat", "dog"]
    # Among two classes the fifth guess means nothing.
    assert "val_top5" not in run.rows[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_broken_pictures_end_the_run_with_one_sentence(tmp_path, workers):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(9):
            path = tmp_path / "pets" / name / f"{number}.png"
            Image.new("RGB", (20, 20)).save(path)
            if number > 4:
                path.write_bytes(b"broken")
    config, ways = model_config(num_classes=2), recipe(num_workers=workers, val_fraction=0.2)
    with pytest.raises(ValueError, match=r"images cannot be read, a share of 0\.01") as refused:
        train(tmp_path / "pets", out=tmp_path / "run", model=config, recipe=ways)
    assert "\n" not in str(refused.value)


def test_a_run_is_not_overwritten(run, tmp_path):
    with pytest.raises(ValueError, match="already"):
        train(DATA, out=run.folder, model=model_config(), recipe=recipe())
    (tmp_path / "thesis.tex").write_text("…")
    with pytest.raises(ValueError, match="not empty"):
        train(DATA, out=tmp_path, model=model_config(), recipe=recipe())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"settings": {"epochs": 9}}, "epochs was 3 and is 9"),
        ({"recipe": "quick"}, "learning_rate|epochs was 3"),
        ({"model": small_config(depth=2)}, r"model\.depth was 1 and is 2"),
        ({"settings": {"model.num_heads": 6}}, r"model\.num_heads was 3 and is 6"),
        ({"data": POSITION}, "data was 'scenes"),
    ],
)
def test_it_resumes_with_its_own_settings_only(run, asked, says):
    with pytest.raises(ValueError, match=says) as refused:
        train(**asked, out=run.folder, resume=True)
    assert "another folder" in str(refused.value)


def test_what_does_not_change_the_result_may_be_changed(run):
    settings = {"num_workers": 1, "explain_every": 1, "checkpoint_steps": None}
    assert train(out=run.folder, resume=True, settings=settings).rows == run.rows


def test_what_is_measured_from_now_on_has_a_column(tmp_path, monkeypatch):
    ways, folder = recipe(epochs=2, ema=None), tmp_path / "run"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", 6)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=ways)
    train(out=folder, resume=True, settings={"localize_every": 1})
    with (folder / "metrics.csv").open() as file:
        first, last = csv.DictReader(file)
    assert first["val_energy"] == "" and 0 <= float(last["val_energy"]) <= 1
    known = {"train_loss": 1.0, "val_top1": 0.5}
    figure = plot_curves([{"epoch": 1, **known}, {"epoch": 2, **known, "val_energy": 0.5}])
    assert "energy in the mask" in [line.get_label() for line in figure.axes[1].lines]


def test_what_is_not_there_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match=r"no run\.yaml"):
        train(out=tmp_path, resume=True)
    (tmp_path / "run.yaml").write_text("data: 3")
    with pytest.raises(ValueError, match=r"run\.yaml is not the record"):
        train(out=tmp_path, resume=True)


def test_weights_with_other_classes_get_a_new_head(run, tmp_path, capsys):
    tuned = train(
        POSITION, out=tmp_path / "tuned", recipe=recipe(epochs=1, ema=None), init=run.weights
    )
    said = capsys.readouterr().out
    assert "8 classes" in said and "head is replaced" in said
    assert load(tuned.weights).config == model_config(num_classes=4)
    # One epoch at this rate moves weights by hundredths, chance by tenths.
    before, after = load(run.weights).state_dict(), load(tuned.weights).state_dict()
    fresh = create_model(model_config(num_classes=4)).state_dict()
    for key in ("tokenizer.backbone.0.weight", "blocks.0.mlp.0.weight"):
        moved, other = (after[key] - before[key]).norm(), (after[key] - fresh[key]).norm()
        assert moved < other / 3, key
    assert after["head.weight"].shape[0] == 4


def test_weights_with_the_same_classes_keep_their_head(run, tmp_path, capsys):
    ways = recipe(epochs=1, ema=None, learning_rate=1e-9, schedule="step", clip="none")
    again = train(DATA, out=tmp_path / "again", recipe=ways, init=run.weights)
    assert "head" not in capsys.readouterr().out
    for key, tensor in load(run.weights).state_dict().items():
        torch.testing.assert_close(load(again.weights).state_dict()[key], tensor, atol=1e-6, rtol=0)


def test_a_backbone_is_a_start_too(tmp_path, capsys):
    config = tiny_config(num_classes=8)
    backbone = randomize(create_model(dataclasses.replace(config.backbone, num_classes=7)))
    save(backbone, tmp_path / "backbone.safetensors")
    run = train(
        DATA,
        out=tmp_path / "run",
        model=config,
        recipe=recipe(epochs=1),
        init=tmp_path / "backbone.safetensors",
    )
    assert "The backbone starts from" in capsys.readouterr().out
    trained = load(run.weights).tokenizer.backbone.state_dict()
    # It is frozen: averaging over equal numbers rounds, no more.
    for key, tensor in backbone.features.state_dict().items():
        if key in trained:
            torch.testing.assert_close(trained[key], tensor)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"data": None}, "nothing to train on"),
        ({"model": "bcos_vit_xl_38"}, "bcos_vit_xl_38"),
        ({"model": "bcos_vit_ti_38"}, "backbone is frozen"),
        ({"model": None, "recipe": "paper-bcos"}, "no model to train"),
        ({"recipe": "slow"}, "no recipe 'slow'"),
        ({"settings": {"batch": 3}}, "no recipe field 'batch'"),
        ({"settings": {"model.size": 3}}, "option.*'size'"),
        ({"settings": {"model.num_classes": 3}}, "num_classes = 3 is not allowed"),
        ({"settings": {"model.image_size": (16, 32)}}, "square"),
        ({"init": "nowhere.safetensors"}, "There is no weights file"),
        ({"devices": 3}, "batch_size = 8"),
        (
            {"settings": {"precision": "fp16"}, "accelerator": "cpu"},
            "precision = 'fp16' needs a GPU",
        ),
        (
            {"settings": {"cuda_graphs": True}, "accelerator": "cpu"},
            "cuda_graphs = True needs",
        ),
        (
            {"model": "bcos_densenet121", "settings": {"train_backbone": False}},
            "train_backbone is not allowed",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path, asked, says):
    defaults = {"data": DATA, "model": model_config(), "recipe": recipe()}
    with pytest.raises(ValueError, match=says):
        train(**{**defaults, **asked}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_of_another_shape_are_refused(run, tmp_path):
    wide = model_config(width=24)
    with pytest.raises(ValueError, match=r"best\.safetensors.*fit"):
        train(DATA, out=tmp_path / "run", model=wide, recipe=recipe(), init=run.weights)
    assert not (tmp_path / "run").exists()


def test_the_quick_recipes_own_model_is_small():
    model = create_model(QUICK_MODEL)
    assert sum(p.numel() for p in model.parameters()) < 400_000
    assert QUICK_MODEL.grid == (6, 6)


@pytest.mark.slow
def test_the_quick_recipe_learns_and_its_explanations_lie_on_the_object(tmp_path):
    run = train("scenes?size=48", out=tmp_path / "run", settings={"epochs": 4})
    assert run.accuracy >= 0.9
    inside, area = share_on_object(load(run.weights), Scenes("val", size=48, length=80))
    assert inside / area >= 3


def options(ways: Recipe) -> list[str]:
    model = {"width": 12, "num_heads": 3, "depth": 1, "image_size": 24}
    values = {f"model.{key}": value for key, value in model.items()}
    values |= {key: getattr(ways, key) for key in ("epochs", "batch_size", "explain_every")}
    parts = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return [*parts, "--accelerator", "cpu"]


def test_the_command_trains_and_resumes(tmp_path):
    out = str(tmp_path / "run")
    ways = recipe(epochs=2)
    result = CliRunner().invoke(app, ["train", DATA, "--out", out, "--seed", "3", *options(ways)])
    assert result.exit_code == 0, result.output
    assert "epoch 2/2" in result.output and "Best validation accuracy" in result.output
    assert yaml.safe_load(Path(out, "run.yaml").read_text())["recipe"]["seed"] == 3
    again = CliRunner().invoke(app, ["train", "--resume", "--out", out, "--accelerator", "cpu"])
    assert again.exit_code == 0, again.output
    assert "last.ckpt, step 8" in again.output


@pytest.mark.slow
def test_ctrl_c_stops_the_command_cleanly_workers_included(tmp_path):
    out = tmp_path / "run"
    ways = options(recipe(epochs=2000))
    command = [Path(sys.executable).with_name("bcosvit"), "train", DATA, "--out", out, *ways]
    process = subprocess.Popen(
        [*command, "--set", "num_workers=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (out / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    # As a terminal does it: to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 130, complained
    assert f"To continue: bcosvit train --resume --out {out} --accelerator cpu" in said.replace(
        "\n", ""
    )
    assert complained.strip() == "Stopping after this step; again to stop at once, without saving."

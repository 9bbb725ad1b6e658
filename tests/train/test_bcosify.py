"""The recipe that makes a B-cos network of a converted one."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from bcosvit import bcosify, explain, load, save
from bcosvit.data.scenes import Scenes
from bcosvit.models.network import Network
from bcosvit.models.weights import CLASSES_KEY, read_metadata
from bcosvit.train import get_recipe
from bcosvit.train.data import Batch
from bcosvit.train.losses import Distillation
from bcosvit.train.task import Task, mix
from tests.train.support import assert_same_run, recipe, train
from tests.train.test_resume import PowerCutError, cut_power

DATA = "scenes?size=32&train=25&val=11"


def network(classes: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "model.safetensors"
    save(bcosify(network(), image_size=16, b=1.0), path)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    scenes = Scenes("train", size=32, length=20)
    for number in range(20):
        scenes[number].image.save(folder / f"{number}.png")
    return folder


def ways(**changes):
    """The registered recipe, as a run of three epochs of four steps."""
    fields = {"epochs": 3, "batch_size": 8, "num_workers": 0, "explain_every": 0, "ema": 0.9}
    return get_recipe("bcosify", **{**fields, "checkpoint_steps": 2, **changes})


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(converted, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(DATA, out=folder, init=converted, recipe=ways())
    return folder


def test_it_ends_as_a_bcos_network_and_says_how_alignment_emerges(whole, converted):
    model = load(whole / "best.safetensors")
    assert (model.fade, model.b) == (0, 2)
    found = explain(model, torch.rand(2, 3, 16, 16))
    assert (found.residual == 0).all()
    assert load(converted).fade == 1
    rows = table(whole)
    # λ and B at the end of each epoch; the ramp is over 35 % of the run.
    moved = (1 - math.cos(math.pi * (4 / 12) / 0.35)) / 2
    assert [float(row["fade"]) for row in rows] == pytest.approx([1 - moved, 0, 0], abs=1e-6)
    assert [float(row["b"]) for row in rows] == pytest.approx([1 + moved, 2, 2])
    assert all(0 <= float(row["val_energy"]) <= 1 for row in rows)
    assert all("val_localization" in row for row in rows)


def test_the_best_epoch_is_one_after_the_constants_have_faded(converted, pictures, tmp_path):
    slow = ways(epochs=2, fade_until=1.0, learning_rate=1e-9, final_lr=0.0, ema=None)
    run = train(f"unlabeled:{pictures}", out=tmp_path / "run", init=converted, recipe=slow)
    agreement = [row["val_top1"] for row in run.rows]
    assert agreement[0] >= agreement[1] == run.accuracy
    assert load(run.weights).fade == 0


@pytest.mark.parametrize("step", [2, 4, 7, 11])
def test_it_resumes_to_the_same_bits(whole, converted, tmp_path, monkeypatch, step):
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", step)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, init=converted, recipe=ways())
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


def test_a_vit_on_a_converted_trunk_fades_as_a_whole(converted, tmp_path):
    fields = {"model.tap": 2, "model.width": 4, "model.num_heads": 2, "model.depth": 1}
    settings = {"epochs": 2, "batch_size": 8, "num_workers": 0, "explain_every": 0, **fields}
    init = tmp_path / "strided.safetensors"
    original = network()
    original[0] = nn.Conv2d(3, 8, 3, 2, 1)
    save(bcosify(original, image_size=16, b=1.0), init)
    given = {"model": "bcos_vit_ti", "init": init, "recipe": "bcosify"}
    with pytest.raises(ValueError, match="frozen backbone"):
        train(DATA, out=tmp_path / "frozen", settings=settings, **given)
    run = train(DATA, out=tmp_path / "run", settings={**settings, "train_backbone": True}, **given)
    model = load(run.weights)
    moved = [(m.fade.item(), m.b.item()) for m in model.modules() if isinstance(m, Network)]
    assert moved == [(0, 2)] * 2  # in front of the blocks and behind them
    assert (explain(model, torch.rand(2, 3, 16, 16)).residual == 0).all()
    assert run.rows[-1]["fade"] == 0
    with pytest.raises(ValueError, match="needs a network with B-cos layers"):
        train(DATA, out=tmp_path / "other", model="bcos_vit_ti_38", recipe="bcosify", init=init)


def test_at_the_start_the_student_is_the_teacher(converted):
    task = Task(load(converted), ways(teacher=str(converted)), 4)
    task.loss.setup(task.model, torch.device("cpu"))
    batch = Batch(torch.rand(4, 3, 16, 16), torch.tensor([0, 1, -1, -1]), torch.ones(4))
    prepared = task.loss.prepare(batch)
    logits = task(batch.inputs)
    assert torch.equal(prepared.taught, logits)
    assert prepared.labels.tolist() == [0, 1, *logits.argmax(1)[2:].tolist()]
    least = task.loss(logits, prepared)
    assert (task.loss(logits + torch.randn(4, 8), prepared) > least).all()


def test_the_loss_against_numbers():
    loss = Distillation()
    loss.recipe = recipe(loss="distillation", label_weight=0.5)
    logits, taught = torch.randn(2, 3, dtype=torch.float64).tolist()
    batch = Batch(torch.empty(1), torch.tensor([2]), torch.ones(1), taught=torch.tensor([taught]))
    found = loss(torch.tensor([logits]), batch).item()

    def softmax(values):
        return [math.exp(v) / sum(map(math.exp, values)) for v in values]

    expected = 0.0
    for k, (p, q, z) in enumerate(zip(softmax(taught), softmax(logits), logits, strict=True)):
        s = 1 / (1 + math.exp(-(z - math.log(2))))
        expected += p * math.log(p / q) - p * math.log(s) - (1 - p) * math.log(1 - s)
        expected -= 0.5 * (math.log(s) if k == 2 else math.log(1 - s))
    assert found == pytest.approx(expected, rel=1e-5)


def test_mixing():
    batch = Batch(torch.rand(64, 3, 4, 4), torch.arange(64) % 5, torch.ones(64))
    mixed = mix(batch, 0.5, 5, (0, 1))
    part = (mixed.inputs - batch.inputs).flatten(1) / (
        batch.inputs.roll(1, 0) - batch.inputs
    ).flatten(1)
    torch.testing.assert_close(part, part[:, :1].expand_as(part), rtol=1e-3, atol=1e-3)
    assert 10 < (part[:, 0] > 1e-3).sum() < 54
    assert part.max() <= 0.501
    assert (mixed.targets.argmax(1) == batch.labels).all()
    torch.testing.assert_close(
        mixed.targets.gather(1, batch.labels.roll(1)[:, None]), part[:, :1], rtol=1e-3, atol=1e-3
    )
    assert torch.equal(mixed.inputs, mix(batch, 0.5, 5, (0, 1)).inputs)
    assert not torch.equal(mixed.inputs, mix(batch, 0.5, 5, (0, 2)).inputs)
    assert torch.equal(mix(batch, 0.0, 5, (0, 1)).inputs, batch.inputs)


def test_images_without_labels(converted, pictures, tmp_path):
    named = tmp_path / "named.safetensors"
    names = [f"class {k}" for k in range(8)]
    save(load(converted), named, metadata={CLASSES_KEY: json.dumps(names)})
    data = f"unlabeled:{pictures}"
    drawn = ways(epochs=2, learning_rate=1e-4, explain_every=1)
    run = train(data, out=tmp_path / "run", init=named, recipe=drawn)
    # Of the class that the teacher sees.
    assert len([*(run.folder / "explanations").iterdir()]) == 2
    assert json.loads(read_metadata(run.weights)[CLASSES_KEY]) == names
    assert "val_energy" not in run.rows[0]
    with pytest.raises(ValueError, match=r"label_weight.*no labels"):
        train(data, out=tmp_path / "a", init=named, recipe=ways(label_weight=1))
    with pytest.raises(ValueError, match="no labels"):
        train(data, out=tmp_path / "b", init=named, recipe=recipe())


def test_what_cannot_be_taught_is_refused(converted, tmp_path):
    other = tmp_path / "other.safetensors"
    save(bcosify(network(classes=3), image_size=16, b=1.0), other)
    plain = tmp_path / "plain.safetensors"
    save(bcosify(network(), image_size=16), plain)
    for init, settings, message in [
        (None, {}, "no teacher"),
        (other, {}, "teacher knows 3"),
        (plain, {}, "B-cos layers"),
        (converted, {"cache_views": 1}, "cache_views"),
        (converted, {"b": 0.5}, "b = 0.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(DATA, out=tmp_path / "run", init=init, recipe="bcosify", settings=settings)


def test_another_model_may_teach(converted, tmp_path):
    teacher = tmp_path / "teacher.safetensors"
    model = load(converted)
    with torch.no_grad():
        model.get_classifier().weight.zero_()
        model.get_classifier().bias.copy_(torch.arange(8) * 2.0)
    save(model, teacher)
    run = train(
        DATA,
        out=tmp_path / "run",
        init=converted,
        recipe=ways(teacher=str(teacher), epochs=1, fade_until=None),
    )
    assert torch.isfinite(torch.tensor(run.rows[0]["val_loss"]))
    again = ways(teacher=str(converted), epochs=1, fade_until=None)
    other = train(DATA, out=tmp_path / "other", init=converted, recipe=again)
    assert other.rows[0]["val_loss"] != run.rows[0]["val_loss"]
    assert load(run.weights).fade == 1

"""What a run takes is measured before it begins; what is left open is chosen, and told."""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml

from bcosvit import create_model
from bcosvit.data.transforms import TrainTransform
from bcosvit.train import resources
from bcosvit.train.data import ImageDataset
from bcosvit.train.devices import Devices
from bcosvit.train.plan import resolve
from bcosvit.train.recipe import Recipe, get_recipe
from bcosvit.train.resources import choose_parts, choose_workers, fit_to_machine
from tests.data.support import folder as image_folder
from tests.train.support import DATA, assert_same_run, model_config, recipe, train

OPEN = {"accumulate_grad_batches": None, "num_workers": None}


def recorded(run):
    return yaml.safe_load((run.folder / "run.yaml").read_text())["recipe"]


def short_of_memory(monkeypatch, images: float):
    """Makes a machine on which so many images of a batch fit, and nothing else."""
    real = resources._measure

    def measure(*arguments):
        measured = real(*arguments)
        free = (measured.fixed + images * measured.stored) / resources.MEMORY_SHARE
        monkeypatch.setattr(resources, "choose_parts", lambda *a: choose_parts(*a[:3], int(free)))
        return measured

    monkeypatch.setattr(resources, "_measure", measure)


def test_what_is_left_open_is_chosen_told_and_recorded(tmp_path, capsys):
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe(epochs=1, **OPEN))
    assert recorded(run)["accumulate_grad_batches"] == 1
    assert recorded(run)["num_workers"] == 0
    printed = capsys.readouterr().out
    assert re.search(r"This machine: \d+ processor cores, [\d.]+ .iB of memory free; a", printed)
    assert "Batches: 8 images at once" in printed
    assert "Workers: 0, because drawn images are in memory" in printed
    assert re.search(r"Prediction by these steps: about .* s, and [\d.]+ .iB", printed)


def test_measuring_changes_nothing(tmp_path, monkeypatch):
    # A backbone with norms of batches, whose statistics a step would change.
    ways = {"model": model_config(family="conventional"), "recipe": recipe(loss="ce", **OPEN)}
    measured = train(DATA, out=tmp_path / "measured", **ways)
    chosen = {"accumulate_grad_batches": 1, "num_workers": 0}

    def unmeasured(plan, *_):
        return resources.dataclasses.replace(plan, recipe=plan.recipe.change(**chosen))

    monkeypatch.setattr("bcosvit.train.run.fit_to_machine", unmeasured)
    plain = train(DATA, out=tmp_path / "plain", **ways)
    assert_same_run(measured.folder, plain.folder)


def test_a_batch_that_does_not_fit_is_divided(tmp_path, monkeypatch, capsys):
    short_of_memory(monkeypatch, images=3)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe(epochs=1, **OPEN))
    assert recorded(run)["accumulate_grad_batches"] == 4
    assert "8 images in 4 parts of 2" in capsys.readouterr().out
    whole = train(
        DATA,
        out=tmp_path / "whole",
        model=model_config(),
        recipe=recipe(epochs=1, accumulate_grad_batches=1),
    )
    assert run.rows[0]["train_loss"] == pytest.approx(whole.rows[0]["train_loss"], rel=1e-4)


def fitted(folder, ways, config, data=DATA):
    """The recipe as it was fitted to the machine, and what was told."""
    plan, source = resolve(data, config, ways, {}, None, None)
    images = ImageDataset(source.train.with_transform(TrainTransform(plan.image_size)), 0)
    lines: list[str] = []
    where = Devices(accelerator="cpu")
    plan = fit_to_machine(plan, create_model(plan.model), images, where, folder, lines.append)
    return plan.recipe, "\n".join(lines)


def test_what_is_set_wins_and_a_warning_says_so(tmp_path, monkeypatch):
    short_of_memory(monkeypatch, images=3)
    ways = recipe(accumulate_grad_batches=2, num_workers=0)
    found, told = fitted(tmp_path, ways, model_config())
    assert found == ways
    assert "in 2 parts of 4, as set; 4 parts would fit" in told
    assert "Workers: 0, as set" in told


def test_norms_of_batches_are_not_divided(tmp_path, monkeypatch):
    short_of_memory(monkeypatch, images=3)
    config = model_config(family="conventional", train_backbone=True)
    found, told = fitted(tmp_path, recipe(loss="ce", **OPEN), config)
    assert found.accumulate_grad_batches == 1
    assert "norms are of whole batches; they may not fit" in told


def test_views_by_the_room_on_disk(tmp_path, monkeypatch):
    config, ways = model_config(train_backbone=False), recipe(cache_views=None)
    found, told = fitted(tmp_path, ways, config)
    assert found.cache_views == 3
    assert "Feature cache: 3 views of each image" in told

    def disk_with_room_for(views):
        # 25 images and 11 of validation, half precision, label, scale, mark, two descriptions.
        part = resources.frozen_part(create_model(config), head_only=False)
        record = 2 * torch.Size(part.shape).numel() + 8 + 4 + 1
        needed = (25 * views + 11) * record + 2 * 4096
        usage = resources.shutil._ntuple_diskusage(0, 0, needed / resources.DISK_SHARE)
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: usage)

    disk_with_room_for(2.9)
    found, told = fitted(tmp_path, ways, config)
    assert found.cache_views == 2 and "3 views would need" in told
    disk_with_room_for(0.5)
    # The cache refuses it, and says how much is missing.
    assert fitted(tmp_path, ways, config)[0].cache_views == 1
    assert fitted(tmp_path, recipe(cache_views=3), config)[0].cache_views == 3


def test_a_cache_that_would_save_much_is_recommended(tmp_path, monkeypatch):
    measured = resources._measure

    def backbone_first(*arguments):
        found = measured(*arguments)
        return resources.dataclasses.replace(found, features=0.9 * found.step, read=0.0)

    monkeypatch.setattr(resources, "_measure", backbone_first)
    config = model_config(train_backbone=False)
    found, told = fitted(tmp_path, recipe(epochs=40), config)
    assert found.cache_views == 0
    assert "none, as set; --set cache_views=3 would save about" in told
    assert "would save" not in fitted(tmp_path, recipe(epochs=2, warmup_epochs=0), config)[1]
    assert "none, because all parts" in fitted(tmp_path, recipe(epochs=40), model_config())[1]


def test_a_resumed_run_keeps_what_was_chosen(tmp_path, monkeypatch, capsys):
    ways = recipe(epochs=1, **OPEN)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=ways)
    capsys.readouterr()
    short_of_memory(monkeypatch, images=3)
    train(out=run.folder, resume=True)
    # By the same call as before, too.
    train(DATA, out=run.folder, model=model_config(), recipe=ways, resume=True)
    assert recorded(run)["accumulate_grad_batches"] == 1
    assert "Prediction" not in capsys.readouterr().out


def test_workers_by_cores(tmp_path, monkeypatch):
    for cores, expected in {1: 1, 2: 2, 64: 4}.items():
        monkeypatch.setattr(resources, "cpu_cores", lambda cores=cores: cores)
        assert choose_workers(torch.device("cpu")) == expected
    assert choose_workers(torch.device("cuda"), devices=8) == 8
    photos = image_folder(tmp_path / "photos", {"cat": 8, "dog": 8})
    monkeypatch.setattr(resources, "cpu_cores", lambda: 1)
    ways = recipe(batch_size=4, **OPEN)
    found, told = fitted(tmp_path, ways, model_config(num_classes=2), photos)
    assert found.num_workers == 1 and "Workers: 1, one per core" in told


def test_time_and_memory_grow_with_what_there_is_to_do():
    cost = {"step": 2.0, "predict": 1.0, "read": 0.5, "features": 0.75}
    measured = resources.Measured(**cost, stored=1000, explained=0, fixed=10)
    plan = SimpleNamespace(train_images=100, val_images=10)
    ways = recipe(epochs=4, num_workers=2)
    # Two cores read beside the computation, which uses both.
    assert resources._seconds(plan, ways, measured, 2) == 4 * (210 + 110 * 0.25)
    # A GPU waits for the slower of the two.
    assert resources._seconds(plan, ways, measured, None) == 4 * 210
    cached = ways.change(cache_views=3)
    assert resources._seconds(plan, cached, measured, 2) == 310 * (0.75 + 0.25) + 4 * 210
    gpu = torch.device("cuda")
    assert resources._memory(ways.change(batch_size=8), measured, gpu) == 8010
    halves = ways.change(batch_size=8, accumulate_grad_batches=2)
    assert resources._memory(halves, measured, gpu) == 4010


@pytest.mark.parametrize(("free", "parts"), [(100, 1), (99, 2), (58, 2), (57, 3), (1, 12)])
def test_the_fewest_parts_that_fit(free, parts):
    # Twelve images of 5 bytes beside 10 bytes, in 70 % of the memory.
    assert choose_parts(12, each=5, fixed=10, free=free) == parts


def test_recipes_leave_open_what_depends_on_the_machine():
    assert Recipe().accumulate_grad_batches is None and Recipe().num_workers is None
    assert get_recipe("transfer").cache_views is None
    # The paper's augmentations never repeat.
    assert get_recipe("paper-bcos").cache_views == 0

"""Pictures on the device: what they are made of, and runs that resume and refuse as others do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bcosvit.data.dataset import Split
from bcosvit.data.sources import open_source
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.train import device_images, devices
from bcosvit.train.data import GlobalBatchSampler, ImageDataset, ResumableDataLoader, SampleRequest
from bcosvit.train.device_images import DeviceImageDataset
from bcosvit.train.task import Task
from tests.train.support import DATA, assert_same_run, model_config, recipe, train
from tests.train.test_crops import by_worker
from tests.train.test_resume import PowerCutError, cut_power

SIZE = 16
TRAIN = TrainTransform(SIZE, rand_augment=(0, 0), scale=(0.3, 1.0))
EVAL = EvalTransform(SIZE)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Pictures of many sizes, the first ones small; read three at a time."""
    monkeypatch.setattr(device_images, "READ_BATCH", 3)
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(8):
            sides = generator.integers(12, 20 + 3 * number, 2)
            pixels = generator.integers(0, 256, (*sides, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


def whole(folder: Path, transform, **options) -> Split:
    return open_source(folder, val_fraction=0.3, seed=0, **options).train.with_transform(transform)


def batches(samples, *, epochs: int = 2, start: int = 0, **options) -> list:
    """What a loader hands out, resumed in the first epoch."""
    sampler = GlobalBatchSampler(len(samples), 4, **{"seed": 0, **options})
    loader = ResumableDataLoader(samples, sampler, num_workers=0)
    loader.load_state_dict({"done": start})
    found = []
    for epoch in range(epochs):
        iterator = iter(loader)
        loader.batches.set_epoch(epoch)
        found += list(iterator)
    return found


def all_of(samples: DeviceImageDataset, epoch: int = 0) -> list[SampleRequest]:
    return [SampleRequest(epoch, position, 1.0) for position in range(len(samples))]


def assert_same(found: list, expected: list) -> None:
    assert len(found) == len(expected) > 1
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if other is None:
                assert one is None
                continue
            assert one.dtype == other.dtype and one.stride() == other.stride()
            assert torch.equal(one, other)


@pytest.mark.parametrize("workers", [0, 1])
def test_validation_has_the_batches_of_workers_to_the_last_bit(folder, workers):
    (folder / "cat" / "3.png").write_bytes(b"broken")
    split = whole(folder, EVAL, max_skipped=0.1)
    before = torch.get_rng_state()
    held = DeviceImageDataset(split, 0, "cpu", num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)
    assert held.pixels.dtype == torch.uint8
    for options in ({"seed": None}, {}, {"rank": 1, "world_size": 2}):
        assert_same(batches(held, **options), batches(ImageDataset(split, 0), **options))
    # Seen by another process, perhaps.
    assert [skipped.key for skipped in split.skipped()] == ["cat/3.png"]


def test_training_keeps_pictures_whole_up_to_the_canvas(folder):
    split = whole(folder, TRAIN, max_skipped=0.1)
    last = split.labels().index(1) - 1
    (folder / split.key(last)).write_bytes(b"broken")
    held, read = DeviceImageDataset(split, 0, "cpu"), split.with_transform(None)
    sizes = [read[position][0].size for position in range(len(split))]
    assert held.sizes.tolist() == [list(size) for size in sizes]
    # A dog stands in for the broken cat, and is called one.
    assert split.label(last) == 0 and read[last][1] == 1
    assert held.labels.tolist() == [read[position][1] for position in range(len(split))]
    widest, tallest = held.sizes.clamp(max=2 * SIZE).max(0).values.tolist()
    assert held.pixels.shape[1:] == (tallest, 3, widest)
    # It had to grow on the way.
    first = held.sizes[: device_images.READ_BATCH].max(0).values
    assert first[0] < widest and first[1] < tallest
    kept = 0
    for position, (width, height) in enumerate(sizes):
        if max(width, height) <= 2 * SIZE:
            kept += 1
            pixels = torch.from_numpy(np.array(read[position][0])).transpose(1, 2)
            assert torch.equal(held.pixels[position, :height, :, :width], pixels)
            assert held.pixels[position].count_nonzero() == pixels.count_nonzero()
    assert 2 < kept < len(split)


def test_small_pictures_take_no_more_room_than_they_have(folder):
    split = Split(whole(folder, None).reader, range(2), transform=TRAIN)
    held = DeviceImageDataset(split, 0, "cpu")
    width, height = held.sizes.max(0).values.tolist()
    assert held.pixels.shape[1:] == (height, 3, width) and max(width, height) < 2 * SIZE


def gradient(width: int, height: int) -> Image.Image:
    """Red rises to the right, green downwards: a crop shows where it was cut."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width).round()[None]
    pixels[..., 1] = np.linspace(0, 255, height).round()[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("width", "height"), [(20, 30), (128, 30), (30, 128), (256, 128)])
def test_crops_are_those_of_workers_in_the_pictures_own_geometry(tmp_path, width, height):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            gradient(width, height).save(tmp_path / name / f"{number}.png")
    split = whole(tmp_path, TRAIN)
    held = DeviceImageDataset(split, 3, "cpu")
    kept = torch.tensor([min(width, 2 * SIZE) / width, min(height, 2 * SIZE) / height])
    boxes = held._crops(0) / kept.repeat_interleave(2)
    assert torch.allclose(boxes, boxes.round(), atol=1e-3)
    picture = torch.from_numpy(np.array(gradient(width, height))).transpose(1, 2)
    batch = held[all_of(held)]
    levels = (batch.inputs * 255).round().transpose(1, 2)
    mirrored = 0
    for found, box in zip(levels, boxes.round().int().tolist(), strict=True):
        left, right, top, bottom = box
        flip = left > right
        mirrored += flip
        box = [min(left, right), max(left, right), top, bottom]
        difference = (found - by_worker(picture, box, SIZE, flip=flip)).abs()
        # A pixel of the canvas is eight levels; at a crop's edges half of one is missing.
        shrunk = max(width, height) > 2 * SIZE
        assert difference.max() <= (5 if shrunk else 1)
        assert difference.mean() < (1.5 if shrunk else 0.3)
    assert 0 < mirrored < len(split)


def test_a_crop_depends_on_seed_epoch_and_place_alone(folder):
    held = DeviceImageDataset(whole(folder, TRAIN), 5, "cpu")
    expected = batches(held)
    assert_same(batches(held, start=2), expected[2:])
    # From fresh memory, as another process has it, and in another order of epochs.
    again = DeviceImageDataset(whole(folder, TRAIN), 5, "cpu", num_workers=1)
    again[all_of(again, epoch=1)]
    assert_same(batches(again), expected)
    shares = [batches(held, rank=rank, world_size=2) for rank in range(2)]
    for batch, one, other in zip(expected, *shares, strict=True):
        assert torch.equal(batch.inputs[::2], one.inputs)
        if len(batch.inputs) > 1:
            assert torch.equal(batch.inputs[1::2], other.inputs)
    # Every epoch has its own, as has every seed.
    first = held[all_of(held)].inputs
    assert not torch.equal(held[all_of(held, epoch=1)].inputs, first)
    assert torch.equal(held[all_of(held)].inputs, first)
    other = DeviceImageDataset(whole(folder, TRAIN), 6, "cpu")
    assert not torch.equal(other[all_of(other)].inputs, first)


def test_it_has_no_workers(folder):
    held = DeviceImageDataset(whole(folder, EVAL), 0, "cpu")
    assert (
        ResumableDataLoader(
            held, GlobalBatchSampler(len(held), 4, seed=0), num_workers=1
        ).num_workers
        == 0
    )


def run(folder: Path, **changes) -> Path:
    ways = recipe(**{"epochs": 2, "rand_augment": None, "images_on_device": True, **changes})
    train(DATA, out=folder, model=model_config(), recipe=ways)
    return folder


def test_a_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    accumulate = 2
    never_cut = run(tmp_path / "whole", accumulate_grad_batches=accumulate)
    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        # After a checkpoint in the middle of the second epoch.
        cut_power(patch, Task, "training_step", 7 * accumulate)
        with pytest.raises(PowerCutError):
            run(cut, accumulate_grad_batches=accumulate)
    assert (cut / "last.ckpt").exists()
    with pytest.raises(ValueError, match="images_on_device was True and is False"):
        train(out=cut, resume=True, settings={"images_on_device": False})
    train(out=cut, resume=True)
    assert_same_run(never_cut, cut)


def test_broken_pictures_are_listed_and_too_many_end_the_run(folder, tmp_path):
    (folder / "cat" / "3.png").write_bytes(b"broken")
    ways = recipe(epochs=1, rand_augment=None, images_on_device=True, batch_size=4, num_workers=1)
    config = model_config(num_classes=2)
    ran = train(folder, out=tmp_path / "run", model=config, recipe=ways)
    assert (ran.folder / "skipped.txt").read_text().startswith("cat/3.png\t")
    for number in range(6):
        (folder / "dog" / f"{number}.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"images cannot be read, a share of 0\.01") as refused:
        train(folder, out=tmp_path / "other", model=config, recipe=ways)
    assert "\n" not in str(refused.value)


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"images_on_device = True .*1000\.0 bytes"):
        run(tmp_path / "run")


@pytest.mark.parametrize("changes", [{"rand_augment": (2, 9)}, {"cache_views": 2}], ids=str)
def test_what_workers_must_do_is_refused(changes):
    ways = recipe(rand_augment=None, images_on_device=True)
    with pytest.raises(ValueError, match="rand_augment=None"):
        ways.change(**changes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# torch warns of the mode itself.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_makes_the_same_batches_without_being_waited_for(folder):
    gpu = torch.device("cuda", 0)
    for transform, levels in ((EVAL, 0), (TRAIN, 1)):
        split = whole(folder, transform)
        here, there = (DeviceImageDataset(split, 0, device) for device in ("cpu", gpu))
        expected = batches(here)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = batches(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.inputs.device == gpu and torch.equal(mine.labels.cpu(), theirs.labels)
            assert torch.equal(mine.weights.cpu(), theirs.weights)
            # Both are whole levels divided by 255.
            apart = (mine.inputs.cpu() * 255).round() - (theirs.inputs * 255).round()
            assert apart.abs().max() <= levels
            same = apart == 0
            assert torch.equal(mine.inputs.cpu()[same], theirs.inputs[same])

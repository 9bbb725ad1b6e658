"""Features on the device give the batches and the runs that features on disk do."""

from pathlib import Path

import pytest
import torch

from bcosvit.train import devices, feature_cache, feature_datasets
from bcosvit.train.data import GlobalBatchSampler, ResumableDataLoader
from bcosvit.train.feature_cache import FeatureCache
from bcosvit.train.feature_datasets import DeviceFeatureDataset, FeatureDataset, fits_on_device
from bcosvit.train.feature_files import CacheFolder, Layout
from bcosvit.train.task import Task
from tests.train.support import DATA, assert_same_run, model_config, recipe, train
from tests.train.test_feature_cache import build, contents
from tests.train.test_resume import PowerCutError, cut_power

IMAGES, VIEWS, SHAPE = 13, 3, (2, 3, 5)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cache(tmp_path) -> FeatureCache:
    """Features over many orders of magnitude, so that scales differ."""
    kept = CacheFolder.create(tmp_path, Layout(images=IMAGES, views=VIEWS, shape=SHAPE), {})
    records = list(range(IMAGES * VIEWS))
    features = torch.randn(len(records), *SHAPE, generator=torch.Generator().manual_seed(0))
    features *= 10.0 ** torch.linspace(-20, 20, len(records)).view(-1, 1, 1, 1)
    kept.write(records, [record // VIEWS % 5 for record in records], features)
    return FeatureCache(tmp_path)


def batches(samples: FeatureDataset | DeviceFeatureDataset, *, start: int = 0, **options) -> list:
    """What a loader hands out in three epochs, resumed in the first."""
    sampler = GlobalBatchSampler(len(samples), 4, **{"seed": 0, **options})
    loader = ResumableDataLoader(samples, sampler, num_workers=0)
    loader.load_state_dict({"done": start})
    found = []
    for epoch in range(3):
        iterator = iter(loader)
        loader.batches.set_epoch(epoch)
        for batch in iterator:
            found.append((*batch, loader.state_dict()["done"]))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"start": 2}, {"rank": 2, "world_size": 3}, {"accumulate": 2, "start": 3}, {"seed": None}],
    ids=str,
)
def test_batches_are_those_from_disk(cache, options, monkeypatch):
    # Several chunks, the last one smaller.
    monkeypatch.setattr(feature_datasets, "CHUNK", 7 * 2 * 30)
    seen = []
    held = DeviceFeatureDataset(cache, 7, "cpu", lambda *numbers: seen.append(numbers))
    assert seen == [(done, 39) for done in (7, 14, 21, 28, 35, 39)]
    expected, found = batches(FeatureDataset(cache, 7), **options), batches(held, **options)
    assert len(found) == len(expected) > 6
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[3] == theirs[3]
        for one, other in zip(mine[:3], theirs[:3], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_it_holds_what_the_disk_holds_and_has_no_workers(cache):
    held = DeviceFeatureDataset(cache, 0, "cpu")
    assert held.features.dtype == torch.float16
    assert (
        ResumableDataLoader(held, GlobalBatchSampler(IMAGES, 4, seed=0), num_workers=1).num_workers
        == 0
    )
    assert (
        ResumableDataLoader(
            FeatureDataset(cache, 0), GlobalBatchSampler(IMAGES, 4, seed=0), num_workers=1
        ).num_workers
        == 1
    )


def run(folder: Path, **changes) -> Path:
    """Two epochs on two views, in a cache that all of a test's runs share."""
    ways = recipe(epochs=2, cache_views=2, cache_folder=str(folder.parent / "features"), **changes)
    train(DATA, out=folder, model=model_config(train_backbone=False), recipe=ways)
    return folder


def test_a_run_is_that_from_disk_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    changes = {"accumulate_grad_batches": 2}
    from_disk = run(tmp_path / "disk", cache_on_device=False, **changes)
    assert_same_run(from_disk, run(tmp_path / "device", cache_on_device=True, **changes))
    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        # After a checkpoint in the middle of the second epoch.
        cut_power(patch, Task, "training_step", 7 * 2)
        with pytest.raises(PowerCutError):
            run(cut, cache_on_device=True, **changes)
    assert (cut / "last.ckpt").exists()
    train(out=cut, resume=True)
    assert_same_run(from_disk, cut)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"cache_on_device = True .*1000\.0 bytes"):
        run(tmp_path / "run", cache_on_device=True)
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize(
    ("wanted", "device", "needed", "kept"),
    [
        (None, GPU, 600, True),
        (None, GPU, 601, False),
        (None, CPU, 1, False),
        (True, GPU, 900, True),
        (True, CPU, 900, True),
        (False, GPU, 1, False),
    ],
)
def test_features_are_kept_where_they_fit(monkeypatch, wanted, device, needed, kept):
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    said = []
    assert fits_on_device(wanted, needed, device, said.append) is kept
    # What one might have hoped for is explained.
    assert len(said) == (wanted is None and device == GPU and not kept)


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_a_demand_that_cannot_be_met_is_refused(monkeypatch, device):
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=f"{device}.*fewer cache_views"):
        fits_on_device(True, 901, device, print)


def test_a_machine_has_memory():
    assert devices.free_memory(CPU) > 2**28


def test_a_cache_written_behind_the_gpu_is_the_same(tmp_path, monkeypatch):
    told = []
    build(tmp_path / "in turn", progress=lambda *numbers: told.append(numbers))
    monkeypatch.setattr(feature_cache, "_overlaps", lambda device: True)
    told_behind = []
    build(tmp_path / "behind", progress=lambda *numbers: told_behind.append(numbers))
    assert contents(tmp_path / "behind") == contents(tmp_path / "in turn")
    assert told_behind == told == [(done, 20) for done in (4, 8, 12, 16, 20)]

    write, calls = CacheFolder.write, []

    def fail_last(self, records, *rest):
        calls.append(records)
        if len(calls) == 5:
            raise OSError("no more")
        write(self, records, *rest)

    monkeypatch.setattr(CacheFolder, "write", fail_last)
    with pytest.raises(OSError, match="no more"):
        build(tmp_path / "failed")
    assert CacheFolder(tmp_path / "failed").done().sum() == 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_batches(cache):
    assert 0 < devices.free_memory(GPU) <= torch.cuda.get_device_properties(GPU).total_memory
    held = DeviceFeatureDataset(cache, 7, GPU)
    for mine, theirs in zip(batches(held), batches(FeatureDataset(cache, 7)), strict=True):
        for one, other in zip(mine[:3], theirs[:3], strict=True):
            assert one.device == GPU and torch.equal(one.cpu(), other)

"""Which samples come when: the same for any number of workers and processes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from bcosvit.data.sources import open_source
from bcosvit.data.transforms import TrainTransform
from bcosvit.train.data import (
    DataModule,
    GlobalBatchSampler,
    ImageDataset,
    ResumableDataLoader,
    cache_drawn_images,
)
from tests.train.support import DATA


def batches(length=25, size=8, *, seed=0, epoch=0, **options) -> list[list]:
    sampler = GlobalBatchSampler(length, size, seed=seed, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.fixture(scope="module")
def pictures() -> ImageDataset:
    split = cache_drawn_images(open_source(DATA).train)
    return ImageDataset(split.with_transform(TrainTransform(16)), seed=0)


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own():
    orders = [
        [ticket.position for batch in batches(epoch=epoch, seed=seed) for ticket in batch]
        for epoch, seed in itertools.product(range(3), range(2))
    ]
    assert all(sorted(order) == list(range(25)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(2, 1), (1, 2), (2, 2), (3, 1), (4, 2)], ids=str
)
@pytest.mark.parametrize("length", [16, 17, 23, 25])
def test_processes_share_out_the_same_global_batches(length, world_size, accumulate):
    """The average over processes of weighted sums is the mean over each global batch."""
    values = torch.randn(length, dtype=torch.float64)
    alone = batches(length)
    shares = [
        batches(length, rank=rank, world_size=world_size, accumulate=accumulate)
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {len(alone) * accumulate}
    for step, whole in enumerate(alone):
        turns = slice(step * accumulate, (step + 1) * accumulate)
        parts = [ticket for share in shares for part in share[turns] for ticket in part]
        counted = [ticket.position for ticket in parts if ticket.weight > 0]
        assert sorted(counted) == sorted(ticket.position for ticket in whole)
        # Lightning divides by the accumulated batches, the processes' gradients are averaged.
        weighted = sum(ticket.weight * values[ticket.position] for ticket in parts)
        mean = values[[ticket.position for ticket in whole]].mean()
        torch.testing.assert_close(weighted / (world_size * accumulate), mean)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_counts_every_sample_once(world_size):
    shares = [
        batches(11, 8, seed=None, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    tickets = [ticket for share in shares for batch in share for ticket in batch]
    assert sorted(ticket.position for ticket in tickets if ticket.weight) == list(range(11))
    assert {ticket.weight for ticket in tickets} <= {0.0, 1.0}


def loaded(pictures: ImageDataset, workers: int, *, epochs=(0, 1), start=0) -> list[torch.Tensor]:
    loader = ResumableDataLoader(pictures, GlobalBatchSampler(len(pictures), 8, seed=0), workers)
    loader.load_state_dict({"done": start})
    found = []
    for epoch in epochs:
        iterator = iter(loader)
        # As Lightning does it when a run resumes: the iterator is there first.
        loader.batches.set_epoch(epoch)
        found += [batch.inputs for batch in iterator]
    return found


def test_augmentation_depends_on_seed_epoch_and_sample_alone(pictures):
    state = torch.get_rng_state()
    alone = loaded(pictures, 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    for one, other in zip(alone, loaded(pictures, 2), strict=True):
        assert torch.equal(one, other)
    ticket = batches(epoch=1)[0][0]
    torch.testing.assert_close(pictures[[ticket]].inputs[0], alone[4][0])
    again = pictures[[ticket._replace(epoch=2)]].inputs
    assert not torch.equal(again[0], alone[4][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_resumes_in_the_middle_and_only_once(pictures, workers):
    whole = loaded(pictures, 0)
    resumed = loaded(pictures, workers, start=3)
    for one, other in zip(whole[3:], resumed, strict=True):
        assert torch.equal(one, other)


def test_the_state_is_what_was_handed_out_not_what_was_read_ahead(pictures):
    loader = ResumableDataLoader(pictures, GlobalBatchSampler(len(pictures), 8, seed=0), 1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.state_dict() == {"done": 2}


def test_drawn_pictures_are_drawn_once(pictures):
    source = open_source(DATA).train
    kept = cache_drawn_images(source)
    assert kept.reader.image(3, None) == source.reader.image(3, None)
    assert kept.key(3) == source.key(3) and kept.label(3) == source.label(3)
    assert cache_drawn_images(kept).reader.image(3, None) == source.reader.image(3, None)


@pytest.mark.parametrize("pins", [False, True])
def test_a_thread_pins_memory_only_where_it_is_asked_to(pictures, monkeypatch, pins):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = DataModule(pictures, pictures, batch_size=8, seed=0, pin_memory=pins)
    data.trainer = SimpleNamespace(global_rank=0, world_size=1)
    assert data.train_dataloader().pin_memory is pins

"""Two processes find what one finds."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bcosvit.metrics import Bootstrap, PixelPerturbation, evaluate
from bcosvit.metrics.loader import Ranks
from tests.metrics.fakes import Contributions, Patches, Uniform, color_model


def measured():
    """Neither images, grids nor chosen images divide by two."""
    data = Patches(each=3, wrong=2)
    return evaluate(
        color_model(),
        data,
        (Contributions(), Uniform()),
        metrics=["localization", PixelPerturbation(images=7), "masks"],
        masks=lambda index: data.mask(index) if index % 3 else None,
        bootstrap=Bootstrap(samples=50),
        batch_size=3,
    )


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = measured()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(plain(found), file)
    dist.destroy_process_group()


def plain(found):
    parts = (found.accuracy, found["localization"], found["perturbation"], found["masks"])
    return [found.summary(), *(list(part.rows()) for part in parts)]


def flat(value):
    if isinstance(value, dict):
        value = list(value.items())
    return [x for each in value for x in flat(each)] if isinstance(value, list | tuple) else [value]


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=2)
    alone = json.loads(json.dumps(plain(measured())))
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert both[0] == both[1]
    # Smaller batches round otherwise.
    for ours, theirs in zip(flat(alone), flat(both[0]), strict=True):
        if isinstance(theirs, float):
            theirs = pytest.approx(theirs, rel=1e-5, abs=1e-9)
        assert ours == theirs


@pytest.mark.parametrize(("items", "count"), [(7, 3), (2, 4), (0, 2), (6, 2)])
def test_results_come_back_in_order(items, count, monkeypatch):
    all_ = list(range(items))
    shares = [[10 * item for item in Ranks(rank, count).share(all_)] for rank in range(count)]

    def exchange(into, mine):
        into[:] = shares

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    for rank in range(count):
        assert Ranks(rank, count).gather(shares[rank]) == [10 * item for item in all_]


def test_alone():
    assert Ranks.current() == Ranks(0, 1)
    assert Ranks().gather([1, 2]) == [1, 2]

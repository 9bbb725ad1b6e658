"""What is removed from pictures, what is copied, and what a control is, on a model made up."""

from types import SimpleNamespace

import numpy as np
import torch

from bcosvit.auditing.copies import Copy
from bcosvit.auditing.cues import Bench, Cells, Color, Copied, Edge
from bcosvit.auditing.looks import colors
from tests.auditing.test_copies import GRID, SIDE, Store
from tests.auditing.test_repeats import noise


def bench_of(logits, count=5):
    """Pictures, and a model that sees them as they are."""
    evidence = Store(
        label=np.zeros(count, np.int64),
        index=np.arange(count),
        cells=np.random.default_rng(0).random((count, 2, GRID, GRID)).astype(np.float32),
        settings=SimpleNamespace(grid=GRID),
    )
    model = SimpleNamespace(
        encoding=lambda images: images,
        from_encoded=logits,
        parameters=lambda: iter([torch.zeros(1)]),
    )
    return Bench(
        model=model,
        pictures=[(image, 0, "") for image in noise(count, SIDE)],
        evidence=evidence,
        batch_size=2,
        known={},
        means={"color": torch.tensor([[0.3, 0.35, 0.4], [0.5, 0.55, 0.6]])},
    )


def test_each_picture_loses_its_own_pixels():
    bench, numbers = bench_of(lambda images: images.flatten(2).sum(2)), np.arange(5)
    images = bench.images(numbers)
    gone = torch.rand(5, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = (images * ~gone[:, None]).flatten(2).sum(2)
    torch.testing.assert_close(bench.logits(images, gone), expected)
    copy = Copy(
        label=0,
        number=1,
        where={n: torch.tensor([[0.0, 0.0, 0.1 * (n + 1), 0.5]]) for n in range(5)},
    )
    cue = Copied(label=0, copy=copy)
    masks = torch.stack([copy.mask(n, (SIDE, SIDE)) for n in range(5)])
    expected = (images * ~masks[:, None]).flatten(2).sum(2)
    torch.testing.assert_close(cue.without(bench, numbers), expected)


def test_an_edge_is_removed_and_has_a_share():
    bench, numbers = bench_of(lambda images: images[:, 0].flatten(1)), np.arange(5)
    left = Edge(label=0).without(bench, numbers).unflatten(1, (SIDE, SIDE))
    assert torch.equal(left[:, 3:-3, 3:-3], bench.images(numbers)[:, 0, 3:-3, 3:-3])
    assert not left[:, :3].any() and not left[:, :, -3:].any()
    bench.evidence.cells[:] = 1
    assert Edge(label=0).share(bench.evidence) == 20 / 36


def test_a_cast_is_replaced_by_the_mean_one():
    bench = bench_of(lambda images: colors(images).flatten(1))
    found = Color(label=0).without(bench, np.arange(5))
    torch.testing.assert_close(found, bench.means["color"].flatten().expand(5, 6))


def test_the_control_of_a_copy_is_not_beside_it():
    bench = bench_of(None)
    box = torch.tensor([[2 / GRID, 2 / GRID, 3 / GRID, 3 / GRID]])
    cue = Copied(label=0, copy=Copy(label=0, number=1, where={0: box}))
    bench.evidence.cells[0, 0, 1:4, 1:4] = 9
    bench.evidence.cells[0, 0, 4, 5] = 8
    _, control = cue.pixels(bench, np.array([0]), bench.images(np.array([0])))
    wide = SIDE // GRID
    assert control[0].sum() == wide**2
    assert control[0, 4 * wide : 5 * wide, 5 * wide :].all()


def test_cells_beside_a_cluster_that_repeats_are_no_control():
    bench, number = bench_of(None), np.array([0])
    cluster = SimpleNamespace(cells_of=lambda evidence, picture: np.array([2 * GRID + 2]))
    bench.evidence.cells[0, 0, 2, 3] = 9
    bench.evidence.cells[0, 0, 4, 5] = 8
    cue = Cells(label=0, cluster=cluster)
    for repeats, strongest in ((0.1, (2, 3)), (0.3, (4, 5))):
        _, control = cue.measured(repeats).chosen(bench.evidence, number)
        assert np.argwhere(control[0].numpy()).tolist() == [list(strongest)]

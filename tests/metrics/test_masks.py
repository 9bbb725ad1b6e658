"""Energy and pointing, against cases worked out by hand and the reference."""

import pytest
import torch

from bcosvit.metrics import energy_inside, pointing
from tests.reference import metrics as reference

MASK = torch.tensor([[True, True, False], [False, False, False]])


def case(*rows):
    return torch.tensor([rows], dtype=torch.float32)


@pytest.mark.parametrize(
    ("maps", "energy", "points"),
    [
        (case([3, 0, 1], [0, 0, -9]), 0.75, 1),
        (case([1, 0, 3], [0, 0, -9]), 0.25, 0),
        (case([-3, -1, -2], [-4, -5, -6]), 0, 1),  # nothing positive, yet the least bad is inside
        (case([2, 0, 2], [2, 2, 0]), 0.25, 0.25),  # one of four equally strong ones
        (case([0, 0, 0], [0, 0, 0]), 0, 1 / 3),
    ],
)
def test_worked_out_by_hand(maps, energy, points):
    assert energy_inside(maps, MASK[None]).item() == pytest.approx(energy)
    assert pointing(maps, MASK[None]).item() == pytest.approx(points)


def test_mask_scores_one_uniform_chance_and_negated_nothing():
    masks = torch.rand(6, 9, 7) < 0.3
    for score in (energy_inside, pointing):
        assert score(masks.float(), masks).tolist() == [1] * 6
        uniform = score(torch.full((6, 9, 7), 0.7), masks)
        torch.testing.assert_close(uniform, masks.double().mean((1, 2)))
        assert score(-masks.float(), masks).tolist() == [0] * 6


def test_rounding_errors_do_not_point():
    maps = torch.full((50, 2, 3), 0.3) * (1 + 2e-7 * torch.randn(50, 2, 3))
    assert len(maps.unique()) > 1
    torch.testing.assert_close(
        pointing(maps, MASK.expand(50, -1, -1)), torch.full((50,), 1 / 3, dtype=torch.float64)
    )


def test_energy_agrees_with_the_reference():
    maps, masks = torch.randn(5, 6, 7), torch.rand(5, 6, 7) < 0.5
    for i, energy in enumerate(energy_inside(maps, masks).tolist()):
        assert energy == pytest.approx(reference.positive_share(maps[i].numpy(), masks[i].numpy()))

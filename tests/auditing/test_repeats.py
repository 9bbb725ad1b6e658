"""What repeats in pictures: copies do, parts of objects do not."""

import numpy as np
import pytest
import torch

from bcosvit.auditing.cues import anchors
from bcosvit.auditing.repeats import (
    AGAIN,
    at_most_alike,
    details,
    edges_alike,
    found_again,
    likeness,
)

CELL = 6


def noise(count, side, seed=0):
    """Smooth noise: neighboring pixels are alike, as in photographs."""
    values = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(values, 3, 1, 1, count_include_pad=False)


def centered(rows, columns):
    sides = torch.full((len(rows), 2), float(CELL))
    return torch.cat([torch.tensor([rows, columns]).T + 0.0, sides], 1)


def correlation(images, places, one, other):
    """The best correlation of details, shift by shift."""

    def details(image):
        found = np.zeros((6, *image.shape[1:]))
        found[:3, :, :-1] = image[:, :, 1:] - image[:, :, :-1]
        found[3:, :-1] = image[:, 1:] - image[:, :-1]
        return found

    def cut(image, row, column):
        top, left = row - CELL // 2, column - CELL // 2
        return details(image)[:, top : top + CELL, left : left + CELL].ravel()

    patch, best = cut(images[one], *places[one]), -1.0
    for down in range(-CELL, CELL + 1):
        for right in range(-CELL, CELL + 1):
            row, column = places[other]
            there = cut(images[other], row + down, column + right)
            size = np.linalg.norm(patch) * np.linalg.norm(there)
            best = max(best, float(patch @ there / size))
    return best


def test_patches_are_found_again_as_in_a_slow_search():
    images = noise(6, 30)
    for number in range(3):
        # A copy that covers more and more of the patch.
        images[number, :, 12:18, 12 : 14 + 2 * number] = images[5, :, :6, : 2 + 2 * number]
    places = [(15, 15), (14, 16), (15, 14), (13, 15), (15, 15), (16, 14)]
    expected = np.mean(
        [
            correlation(images.numpy(), places, one, other) >= AGAIN
            for one in range(6)
            for other in range(6)
            if one != other
        ]
    )
    assert 0 < expected < 1
    found = found_again(images, centered(*zip(*places, strict=True)))
    assert found == pytest.approx(expected)


def test_copies_are_found_again_wherever_they_are():
    images, random = noise(12, 40), np.random.default_rng(0)
    tag = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(1))
    centers = []
    for image in images:
        row, column = random.integers(4, 28, 2)
        image[:, row : row + 8, column : column + 8] = tag
        centers.append((int(row) + 4 + int(random.integers(-2, 3)), int(column) + 4))
    assert found_again(images, centered(*zip(*centers, strict=True))) == 1
    # The same places of pictures without it, and smooth surfaces.
    there = centered(*zip(*centers, strict=True))
    assert found_again(noise(12, 40), there) < 0.2
    assert found_again(torch.full((12, 3, 40, 40), 0.5), there) == 0
    assert found_again(images[:1], there[:1]) == 0


def test_the_patch_is_that_with_the_most_details_of_the_cells():
    images, cells = torch.zeros(1, 3, 24, 36), torch.zeros(1, 4, 4, dtype=torch.bool)
    images[..., 13:16, 20:25] = 1
    cells[0, 2, 1:] = True
    assert anchors(cells, images).tolist() == [[15, 22.5, 6, 9]]
    cells[0, 2, 2] = False
    assert anchors(cells, images)[0, 1] != 22.5


def test_borders_are_alike_and_backgrounds_are_not():
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    framed = images.clone()
    framed[..., 0, :] = framed[..., -1, :] = framed[..., :, 0] = framed[..., :, -1] = 0.4
    assert edges_alike(framed[:4], images[4:]) == pytest.approx(1)
    assert edges_alike(images[4:], images[4:]) == pytest.approx(0)


@pytest.mark.parametrize("color", [0.0, 0.2, 1.0])
def test_what_is_alike_at_most_by_its_brightness(color):
    images = noise(30, 16)
    images[:, :, :, 12:] = 0.5  # without details
    images = color * images + (1 - color) * images.mean(1, keepdim=True)
    windows = details(images)
    patches = windows[:12, :, 4:10, 5:11]
    found, most = likeness(windows, patches)[0], at_most_alike(windows, patches)
    assert torch.allclose(found[torch.arange(12), torch.arange(12)], torch.ones(12))
    if color == 0:
        assert torch.allclose(found, most, atol=1e-5)
    else:
        assert (most >= found - 1e-5).all() and (most > found + 0.005).float().mean() > 0.5
    if color < 1:
        # It tells most of them apart.
        assert (most < AGAIN).float().mean() > 0.5

"""Copies are found where few pictures have them, and by nothing that other classes have, too."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bcosvit.auditing import copies
from bcosvit.auditing.copies import (
    Copies,
    Copy,
    _elsewhere,
    _merged,
    cell_windows,
    find_patches,
    reduced,
    rows_of,
    same_pixels,
)
from bcosvit.auditing.cues import Copied
from bcosvit.auditing.repeats import details, likeness
from tests.auditing.test_repeats import noise

GRID, SIDE, TAG = 6, 48, 10


@pytest.fixture(autouse=True)
def few_cells(monkeypatch, request):
    """Half of the cells is enough where the model sees the tag, in a quarter of the time."""
    if "all_cells" not in request.fixturenames:
        monkeypatch.setattr(copies, "STRONGEST", GRID * GRID // 2)


@pytest.fixture
def all_cells():
    assert copies.STRONGEST >= GRID * GRID


class Store(SimpleNamespace):
    """Evidence that was made up."""

    def __len__(self):
        return len(self.label)


def scene(having, *, elsewhere=(), count=40, classes=2, seed=0):
    """Pictures, labels and evidence; some of class 0 have a tag somewhere, and some of class 1."""
    images, random = noise(count * classes, SIDE, seed), np.random.default_rng(seed)
    # Of squares that are large enough to be seen at a reduced size.
    tag = torch.rand(3, TAG // 5, TAG // 5, generator=torch.Generator().manual_seed(9)).round()
    tag = tag.repeat_interleave(5, 1).repeat_interleave(5, 2)
    corners = {}
    for number in [*having, *(count + other for other in elsewhere)]:
        top, left = random.integers(0, SIDE - TAG, 2).tolist()
        images[number, :, top : top + TAG, left : left + TAG] = tag
        corners[number] = (top, left)
    cells = random.random((len(images), 2, GRID, GRID)).astype(np.float32)
    for number, (top, left) in corners.items():
        # The model sees it, but not most of all.
        at = [(2 * corner + TAG) * GRID // (2 * SIDE) for corner in (top, left)]
        cells[number, :, at[0], at[1]] = 0.7
    evidence = Store(
        label=np.repeat(np.arange(classes), count),
        index=np.arange(len(images)),
        cells=cells,
        settings=SimpleNamespace(grid=GRID),
    )
    return images, evidence, corners


def found(images, evidence, label=0):
    return Copies(evidence, [(image, 0, "") for image in images]).find(label)


def test_a_tag_in_few_pictures_is_found_in_all_of_them_and_where_it_is():
    images, evidence, corners = scene(having=(3, 8, 20, 31, 39))
    (copy,) = found(images, evidence)
    assert copy.pictures.tolist() == [3, 8, 20, 31, 39]
    covered = []
    for number, (top, left) in corners.items():
        mask = copy.mask(number, (SIDE, SIDE))
        covered.append(mask[top : top + TAG, left : left + TAG].float().mean())
        # Its parts are cells, and may stick out by less than one.
        wide = SIDE // GRID
        mask[max(0, top - wide) : top + TAG + wide, max(0, left - wide) : left + TAG + wide] = False
        assert not mask.any()
        sides = copy.boxes(number)[:, 2:] - copy.boxes(number)[:, :2]
        assert sides.max() <= 1 / GRID + 1e-6
    assert min(covered) > 0.6 and np.mean(covered) > 0.8
    assert found(images, evidence, label=1) == []
    assert found(*scene(having=())[:2]) == []


def test_a_tag_that_counts_little_itself_is_found(all_cells):
    having = (3, 8, 20, 31, 39)
    images, evidence, corners = scene(having=having)
    for number, (top, left) in corners.items():
        at = [(2 * corner + TAG) * GRID // (2 * SIDE) for corner in (top, left)]
        evidence.cells[number, :, at[0], at[1]] = 0
    (copy,) = found(images, evidence)
    assert copy.pictures.tolist() == list(having)


def test_a_tag_that_decides_against_the_next_class_is_found():
    having = (3, 8, 20, 31, 39)
    images, evidence, corners = scene(having=having)
    rivals = evidence.cells[:, 0].copy()
    for number, (top, left) in corners.items():
        at = [(2 * corner + TAG) * GRID // (2 * SIDE) for corner in (top, left)]
        # The object speaks for both classes; the tag for one, and less.
        evidence.cells[number, 0, at[0], at[1]], rivals[number, at[0], at[1]] = 0.05, -0.05
    asked = []

    def of(pictures, numbers):
        asked.extend(numbers.tolist())
        assert torch.equal(pictures, images[numbers])
        return rivals[numbers]

    assert found(images, evidence) == []
    pictures = [(image, 0, "") for image in images]
    (copy,) = Copies(evidence, pictures, rivals=of).find(0)
    assert copy.pictures.tolist() == list(having)
    assert asked == list(range(40))  # those of the class


def test_stripes_of_a_pixel_are_found_on_photographs():
    """At the smaller size they fade."""
    images, evidence, _ = scene(having=())
    having, random = (3, 8, 20, 31, 39), np.random.default_rng(1)
    stripes = torch.zeros(9, 16)
    stripes[::2] = stripes[:, ::4] = 1
    for number in having:
        top, left = random.integers(0, SIDE - 16, 2).tolist()
        part = images[number, :, top : top + 9, left : left + 16]
        images[number, :, top : top + 9, left : left + 16] = part + 0.7 * stripes * (1 - part)
        evidence.cells[number, :, (top + 4) * GRID // SIDE, (left + 8) * GRID // SIDE] = 2
    (copy,) = found(images, evidence)
    assert copy.pictures.tolist() == list(having)


def test_pictures_may_lie_in_another_order_than_their_evidence():
    images, evidence, corners = scene(having=(3, 8, 20, 31, 39))
    evidence.index = evidence.index[::-1].copy()
    (copy,) = found(images.flip(0), evidence)
    assert copy.pictures.tolist() == sorted(corners)


def test_a_part_is_found_once():
    windows = details(noise(12, 18))
    windows[:5] = windows[0]
    (patch,) = find_patches(windows[:8], torch.arange(8), windows[8:], torch.arange(4))
    assert torch.equal(patch, windows[0, :, 6:12, 6:12])


def test_the_share_elsewhere_is_exact_up_to_what_is_allowed():
    windows = details(noise(40, 18))
    patch = windows[0, :, 6:12, 6:12].clone()
    # Two windows of each of 20 pictures; the patch is in three pictures.
    for number in (5, 20, 21, 33):
        windows[number, :, 6:12, 6:12] = patch
    pictures = torch.arange(40) // 2
    several = torch.stack([patch, windows[7, :, 6:12, 6:12]])
    found = _elsewhere(several, windows, pictures, 0.9, torch.tensor([0.15, 0.15]))
    assert found[0] == pytest.approx(4 / 20) and found[1] == pytest.approx(1 / 20)
    # With less allowed it ends when it is more.
    less = _elsewhere(several, windows, pictures, 0.9, torch.tensor([0.06, 0.04]))
    assert (less > torch.tensor([0.06, 0.04])).all() and (less <= found).all() and less[0] < 0.2


def test_parts_of_the_same_pictures_are_one_copy():
    box = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    wide = torch.cat([box, box + 0.1])
    many = dict.fromkeys((4, 1, 2, 3, 5), (box, wide))
    few = dict.fromkeys((1, 7), (box + 0.5, box + 0.5))
    (one, parts), (other, _) = _merged([many, dict.fromkeys((6, 8), (box, box)), few])
    assert list(one) == list(parts) == [1, 2, 3, 4, 5, 7] and list(other) == [6, 8]
    assert torch.equal(one[1], torch.cat([box, box + 0.5])) and len(one[7]) == 1
    assert torch.equal(parts[1], torch.cat([wide, box + 0.5]))


def test_all_that_is_the_same_around_a_patch_belongs_to_it():
    images = noise(8, 48)
    mark = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(9)).round()
    mark = mark.repeat_interleave(3, 1).repeat_interleave(3, 2)
    mask = torch.zeros(48, 48, dtype=torch.bool)
    mask[20:30, 14:40] = True
    mask[2:12, 2:12] = True  # the same, but not joined to the middle
    images[:, :, mask] = mark[:, mask]
    same = same_pixels(images, torch.ones(8, 1, 48, 48), 8)
    inside = torch.zeros_like(mask)
    inside[21:29, 15:39] = True
    assert same[inside].all()
    # Squares that lie half on it, and no others.
    same[18:32, 12:42] = False
    assert not same.any()
    # Of one picture that lacks it, the others still agree, and of four they do not.
    for lacking, agree in ((1, True), (4, False)):
        images[:lacking] = noise(lacking, 48, 7)
        same = same_pixels(images, torch.ones(8, 1, 48, 48), 8)
        assert bool(same[24, 27]) == agree


def test_a_part_of_one_color_belongs_to_a_copy_that_it_touches():
    images = noise(8, 48)
    images[:, :, 16:32, 10:40] = torch.tensor([0.9, 0.1, 0.4])[:, None, None]
    images[:, :, 2:6, 2:6] = 0.5  # not joined to the middle
    same = same_pixels(images, torch.ones(8, 1, 48, 48), 8)
    assert same[17:31, 11:39].all() and not same[:10].any()
    images[:, :, 16:32, 30:40] += 0.3 * torch.arange(8)[:, None, None, None] / 8
    assert not same_pixels(images, torch.ones(8, 1, 48, 48), 8)[20:28, 34:38].any()


def test_what_is_in_too_few_pictures_is_not_the_same():
    images = noise(1, 24).repeat(5, 1, 1, 1)
    inside = torch.ones(5, 1, 24, 24)
    inside[:2, :, :, 14:] = images[:2, :, :, 14:] = 0
    same = same_pixels(images, inside, 8)
    assert same[:, :12].all() and not same[:, 14:].any()


def test_a_copy_of_which_a_picture_has_the_patch_alone():
    images, evidence, _ = scene(having=())
    pictures = [(image, 0, "") for image in images]
    stripe = torch.zeros(3, 16, 4)
    stripe[:, ::4] = stripe[:, 1::4] = 1
    corners = {}
    for number in range(6):
        # At the right of the patch; in one picture, that is outside.
        left = SIDE - 4 if number == 5 else 16
        corners[number] = torch.tensor([16, left])
        if number < 5:
            images[number, :, 12:28, left + 7 : left + 11] = stripe
    place = Copies(evidence, pictures)._whole(corners, images[:6], 8)
    assert torch.allclose(place[5][1], torch.tensor([[16, SIDE - 4, 24, SIDE]]) / SIDE)
    assert place[0][1].shape[0] > 1 and (place[0][1][:, 3] > 23 / SIDE).all()


def test_rows_of_pixels():
    pixels = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    rows = rows_of(pixels).tolist()
    assert sorted(rows) == [[0, 1, 1, 3], [2, 0, 3, 1], [2, 2, 3, 4]]
    assert rows_of(pixels[1:2]).shape == (0, 4)


def test_what_other_classes_have_is_no_copy():
    having = (3, 8, 20, 31, 39)
    images, evidence, _ = scene(having=having, elsewhere=(1, 2))
    assert found(images, evidence) == []
    # Three pictures are too few.
    images, evidence, _ = scene(having=having[:3])
    assert found(images, evidence) == []


def test_simple_edges_are_no_copies():
    images, evidence, _ = scene(having=())
    images[:20, :, :, 24:] = 0.2
    images[50, :, 24:, :] = 0.2
    images[60:, :, :, 24:] = 0.4
    assert found(images, evidence) == []


def test_likeness_tells_where():
    images = noise(2, 24)
    images[1, :, 7:13, 11:17] = images[0, :, 9:15, 9:15]
    (corner,), (patch,) = cell_windows(reduced(images[:1], 4, 6), torch.tensor([[5]]), 4)
    assert corner.tolist() == [0, 0]  # the cell at row 1, column 1 has its corner at 6, 6
    assert patch.shape == (6, 18, 18)
    like, where = likeness(details(images[1:]), details(images[:1])[..., 9:14, 9:14])
    assert like.item() == pytest.approx(1)
    assert where.tolist() == [[[7, 11]]]


def test_nothing_to_compare_with():
    windows, none = torch.rand(5, 6, 18, 18), torch.zeros(0, 6, 18, 18)
    numbers = torch.arange(5)
    assert find_patches(windows, numbers, none, numbers[:0]) == []
    assert find_patches(none, numbers[:0], windows, numbers) == []


def test_the_cue_is_its_pixels_and_the_control_as_many_elsewhere():
    images, evidence, _ = scene(having=(3, 8, 20, 31, 39))
    (copy,) = found(images, evidence)
    cue = Copied(label=0, copy=copy)
    assert cue.name == "0.copy1" and cue.members(evidence).tolist() == copy.pictures.tolist()
    numbers = copy.pictures
    bench = SimpleNamespace(evidence=evidence, images=lambda which: images[which])
    mine, control = cue.pixels(bench, numbers, images[numbers])
    for row, number in enumerate(numbers.tolist()):
        assert torch.equal(mine[row], copy.mask(number, (SIDE, SIDE)))
        assert not (mine[row] & control[row]).any()
        # Whole cells.
        assert abs(int(mine[row].sum()) - int(control[row].sum())) <= (SIDE // GRID) ** 2
    onto = np.array([41, 42, 43, 44, 45])
    compare = np.array([46, 47, 48, 49, 50])
    copied, other = cue.transfer(bench, numbers, onto, compare)
    assert torch.equal(copied[0][:, mine[0]], images[numbers[0]][:, mine[0]])
    assert torch.equal(copied[0][:, ~mine[0]], images[41][:, ~mine[0]])
    # The same pixels of pictures of another class.
    assert torch.equal(other[0][:, mine[0]], images[46][:, mine[0]])
    assert torch.equal(other[0][:, ~mine[0]], images[41][:, ~mine[0]])
    assert cue.repeats(bench, numbers, onto) > 0.5
    share = cue.share(evidence)
    assert 0 < share < 0.1


def test_a_copy_that_sticks_out_of_pictures():
    """Of its cell, a sixth is left in the first picture, at the right between two rows of cells."""
    images, evidence, _ = scene(having=())
    tag = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(9)).round()
    images[0, :, 12:28, -10:] = tag[:, :, :10]
    images[1:6, :, 12:28, 12:28] = tag
    cell = 1 / GRID
    there = torch.tensor([[2.5 * cell, 2.5 * cell, 3.5 * cell, 3.5 * cell]])
    outside = torch.tensor([[2.5 * cell, 1 - cell / 6, 3.5 * cell, 1.0]])
    where = {0: outside, **dict.fromkeys(range(1, 6), there)}
    cue = Copied(label=0, copy=Copy(label=0, number=1, where=where))
    assert cue.cells_of(evidence, 0).tolist() == [2 * GRID + 5, 3 * GRID + 5]
    assert cue.cells_of(evidence, 1).tolist() == [
        2 * GRID + 2,
        2 * GRID + 3,
        3 * GRID + 2,
        3 * GRID + 3,
    ]
    bench = SimpleNamespace(evidence=evidence, images=lambda which: images[which])
    mine, control = cue.pixels(bench, cue.members(evidence), images[:6])
    assert mine.flatten(1).any(1).all() and not (mine & control).any()
    # The five that are whole are found again in each other.
    assert cue.repeats(bench, cue.members(evidence), np.array([41])) >= 20 / 30
    # A stripe as wide as what is left in the first picture is no copy of a cell.
    images[1:6] = noise(5, SIDE)
    images[1:6, :, 12:28, 23:26] = images[20, :, 12:28, 23:26]
    assert cue.repeats(bench, cue.members(evidence), np.array([41])) < 0.2

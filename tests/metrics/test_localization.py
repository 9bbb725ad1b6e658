"""The grid pointing game, against cases worked out by hand and a slow reference."""

import collections

import numpy as np
import pytest
import torch

from bcosvit.metrics import Bootstrap, ExplainedBatch, GridPointingGame, localization_score
from bcosvit.metrics.grid_pointing import cell_shares, grid_images
from tests.metrics.fakes import Contributions, Patches, Uniform, color_model
from tests.metrics.test_accuracy import row
from tests.reference import metrics as reference


def test_scores_worked_out_by_hand():
    maps = torch.tensor(
        [
            [[3.0, 1.0], [0.0, -8.0]],  # 3 of 4 in the first cell
            [[3.0, 1.0], [0.0, -8.0]],  # none in the last
            [[-1.0, -2.0], [0.0, -3.0]],  # nothing positive at all
            [[1.0, 1.0], [1.0, 1.0]],  # equal
        ]
    )
    scores = localization_score(maps, torch.tensor([0, 3, 2, 1]))
    assert scores.tolist() == [0.75, 0.0, 0.0, 0.25]


@pytest.mark.parametrize("size", [(8, 8), (6, 10)])
def test_scores_agree_with_the_reference(size):
    maps = torch.randn(8, *size)
    cells = torch.arange(8) % 4
    for each, cell, score in zip(maps, cells, localization_score(maps, cells), strict=True):
        assert float(score) == pytest.approx(reference.cell_score(each.numpy(), int(cell)))


@pytest.mark.parametrize("size", [(8, 8), (5, 7)])
def test_grids_agree_with_the_reference(size):
    cells = torch.rand(2, 4, 3, *size, dtype=torch.float64)
    for grid, images in zip(grid_images(cells), cells, strict=True):
        np.testing.assert_allclose(grid, reference.shrunk_grid(images.numpy()))


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (224, 224)])
def test_right_cell_scores_one_uniform_chance_and_negated_nothing(size):
    cells = torch.arange(4)
    right = cell_shares(*size)
    assert right.sum(0).unique().tolist() == [1.0]
    even = size[0] % 2 == 0
    # Pixels across the border of odd-sided cells belong to neither alone.
    torch.testing.assert_close(
        localization_score(right, cells),
        torch.ones(4, dtype=torch.float64) if even else (right**2).sum((1, 2)) * 4 / 35,
    )
    assert localization_score(torch.ones(4, *size), cells).tolist() == [0.25] * 4
    assert localization_score(-right, cells).tolist() == [0] * 4


def images_of(*counts: int):
    """So many correct images a class, the later the surer."""
    return [
        row(f"{label}/{number}", float(number), label=label)
        for label, count in enumerate(counts)
        for number in range(count)
    ]


def test_the_surest_unused_image_of_each_class():
    grids = GridPointingGame().select(images_of(3, 3, 3, 3, 3, 3))
    taken = collections.defaultdict(list)
    for grid in grids:
        assert len({image.label for image in grid}) == 4
        for image in grid:
            taken[image.label].append(image.log_odds)
    assert all(odds == [2.0, 1.0, 0.0][: len(odds)] for odds in taken.values())
    assert 3 <= len(grids) <= 18 // 4


def test_exactly_four_classes():
    grids = GridPointingGame().select(images_of(3, 5, 3, 4))
    assert len(grids) == 3
    assert all({image.label for image in grid} == {0, 1, 2, 3} for grid in grids)
    # Neither classes nor their places in the grid follow the labels' order.
    assert len({tuple(image.label for image in grid) for grid in grids}) > 1


def test_no_more_grids_than_asked_for_and_wrong_images_never_show():
    predictions = images_of(9, 9, 9, 9, 9)
    predictions += [row("wrong", 99.0, label=2, place=1)]
    grids = GridPointingGame(grids=5).select(predictions)
    assert len(grids) == 5
    assert all(image.correct for grid in grids for image in grid)


def test_grids_are_seeded_and_do_not_depend_on_the_order_of_images():
    predictions = images_of(9, 9, 9, 9, 9, 9)
    game = GridPointingGame(grids=8, seed=3)
    assert game.select(predictions) == game.select(predictions[::-1])
    assert game.select(predictions) != GridPointingGame(grids=8, seed=4).select(predictions)


def test_classes_are_drawn_evenly():
    grids = GridPointingGame(grids=400).select(images_of(*[400] * 8))
    counts = collections.Counter(image.label for grid in grids for image in grid)
    # 1,600 draws over 8 classes; 40 is about three standard deviations.
    assert all(abs(count - 200) < 40 for count in counts.values())


def test_fewer_than_four_classes_are_refused_but_a_bad_model_is_not():
    with pytest.raises(ValueError, match="hold 3 classes, but a grid shows 4"):
        GridPointingGame().select(images_of(5, 5, 5))
    wrong = [row(str(label), 0.0, label=label, place=1) for label in range(4)]
    assert GridPointingGame().select(wrong) == []
    with pytest.raises(ValueError, match="grids = 0"):
        GridPointingGame(grids=0)


def test_every_class_of_a_grid_is_explained():
    data, model = Patches(size=8), color_model()
    labels = torch.tensor([[3, 0, 4, 1], [2, 1, 0, 3]])
    cells = torch.stack([data[i][0] for i in labels.flatten()]).unflatten(0, (2, 4))

    def explain(images, targets):
        methods = (Contributions(), Contributions(-1), Uniform())
        return {repr(m): m(model, images, targets).map for m in methods}

    pictures, targets = GridPointingGame().compose(cells, labels)
    assert len(pictures) == 2 and targets.tolist() == labels.tolist()
    # `evaluate` hands each picture to `score` once per class.
    pictures, targets = pictures.repeat_interleave(4, 0), targets.flatten()
    batch = ExplainedBatch(
        model=model,
        images=pictures,
        labels=targets,
        keys=["a", "b"],
        maps=explain(pictures, targets),
        masks=None,
        batch_size=8,
        from_encoded=model.from_encoded,
    )
    scores = GridPointingGame().score(batch)
    assert scores["Contributions(sign=1.0)"].min() > 0.999
    assert scores["Contributions(sign=-1)"].max() < 0.34
    assert scores["Uniform(value=1.0)"].tolist() == [[0.25] * 4] * 2


def test_means_resample_grids():
    grids = GridPointingGame().select(images_of(9, 9, 9, 9))
    # All of a grid's four scores are alike, so resampling cells would halve the interval.
    scores = torch.rand(9, 1, dtype=torch.float64).expand(9, 4)
    found = GridPointingGame().result(grids, {"m": scores}, Bootstrap())
    assert found.means["m"] == Bootstrap().mean(scores[:, 0])
    rows = list(found.rows())
    assert len(rows) == 36
    assert rows[5]["score"] == float(scores[1, 1])
    assert found.summary()["grids"] == 9
    assert found.summary()["asked"] == 250

"""Edges and looks are tested on the pictures where they turn others, and not where they were
found."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bcosvit.auditing import screening as screened
from bcosvit.auditing import suspicions
from bcosvit.auditing.cues import Bench, Color, Edge
from bcosvit.auditing.looks import colors
from bcosvit.auditing.screening import Screening, _by_turns, _most, _smoothed
from bcosvit.auditing.suspicions import Suspicion
from tests.auditing.test_copies import GRID, SIDE, Store
from tests.auditing.test_repeats import noise

COUNT, CLASSES = 40, 3
HAVING = (3, 8, 20, 27, 31, 39)
"""Pictures of class 0 that have a cue."""


def bench_of(images, first):
    """A model whose first logit is made up; the others are the same for all."""
    evidence = Store(
        label=np.repeat(np.arange(CLASSES), COUNT),
        correct=np.ones(CLASSES * COUNT, bool),
        index=np.arange(len(images)),
        settings=SimpleNamespace(grid=GRID),
    )
    model = SimpleNamespace(
        encoding=lambda images: images,
        from_encoded=lambda images: torch.stack(
            [first(images), *(torch.zeros(len(images)) + each for each in range(1, CLASSES))], 1
        ),
        parameters=lambda: iter([torch.zeros(1)]),
    )
    pictures = [(image, 0, "") for image in images]
    return Bench(
        model=model, pictures=pictures, evidence=evidence, batch_size=16, known={}, means={}
    )


def blueness(images):
    points = colors(images)[:, 1]
    return 9 * (points[:, 2] - points[:, 0])


def bluish():
    """Pictures of which some have a cast, one of the class is bluer, and others are natural."""
    images = noise(CLASSES * COUNT, SIDE)
    for number in HAVING:
        images[number, 0] *= 0.6
    images[12, 0] *= 0.5
    images[12, 1] *= 0.3
    return images


def test_pictures_whose_color_turns_others_are_chosen():
    bench = bench_of(bluish(), blueness)
    sources = np.random.default_rng(1).permutation(COUNT)
    own, other = Screening(bench, np.random.default_rng(0)).choose(Color(label=0), sources)
    assert set(own.tolist()) == set(HAVING) | ({12} & set(own.tolist()))
    assert set(other.tolist()) <= set(range(COUNT, CLASSES * COUNT))
    # Chosen in the same way: those of other classes are bluer than most of them.
    rest = np.setdiff1d(np.arange(COUNT, CLASSES * COUNT), other)
    assert blueness(bench.images(other)).mean() > blueness(bench.images(rest)).mean()


def test_pictures_with_a_border_are_chosen():
    images = noise(CLASSES * COUNT, SIDE)
    for number in HAVING:
        images[number, 1, :2] = images[number, 1, -2:] = 1.0
    bench = bench_of(images, lambda images: images[:, 1, :2].mean((1, 2)))
    own, _ = Screening(bench, np.random.default_rng(0)).choose(Edge(label=0), np.arange(COUNT))
    assert set(own.tolist()) == set(HAVING)


def test_one_picture_alone_is_less_than_several_that_agree():
    looks = np.concatenate([np.zeros((6, 2)), np.arange(2, 50).reshape(24, 2) * 1.0])
    moved = np.full(30, 0.1)
    moved[:6], moved[20] = 1.0, 3.0
    assert moved.argmax() == 20
    assert _smoothed(moved, looks).argmax() < 6
    assert set(_most(moved, looks).tolist()) == set(range(6))


def test_pictures_that_move_half_as_far_are_not_chosen():
    moved = np.array([1.0] * 7 + [0.6] * 2 + [0.4] * 90)
    # All are their own neighbors.
    looks = np.zeros((99, 2))
    looks[:7, 0], looks[7:9, 0], looks[9:, 0] = 50, 51, np.arange(90) / 100
    assert set(_most(moved, looks).tolist()) == set(range(7))
    looks[7:9, 0] = 50
    assert set(_most(moved, looks).tolist()) == set(range(9))
    # Of the same look, those that move little are not.
    looks = np.concatenate([50 + np.arange(7) / 10, 50.8 + np.arange(5) / 50, np.zeros(20)])
    moved = np.array([1.0] * 7 + [0.4] * 5 + [0.0] * 20)
    assert set(_most(moved, looks[:, None]).tolist()) == set(range(7))
    # A few at least.
    looks = np.arange(31.0)[:, None]
    assert len(_most(np.array([1.0, *[-1.0] * 30]), looks)) == screened.NEIGHBORS


def test_of_two_looks_that_move_others_one_is_chosen():
    looks = np.concatenate([np.zeros((8, 2)), np.full((8, 2), 9.0), np.arange(60).reshape(30, 2)])
    looks[:16] += np.random.default_rng(0).normal(0, 0.1, (16, 2))
    moved = np.concatenate([np.full(8, 1.0), np.full(8, 0.9), np.zeros(30)])
    assert set(_most(moved, looks).tolist()) <= set(range(8))
    assert len(_most(moved, looks)) >= 5


def test_classes_take_turns():
    evidence = SimpleNamespace(
        correct=np.array([True] * 20 + [False] * 5), label=np.array([0] * 15 + [1] * 4 + [2] * 6)
    )
    order = _by_turns(evidence, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(20))
    assert set(evidence.label[order[:3]]) == {0, 1, 2}
    assert set(evidence.label[order[3:5]]) == set(evidence.label[order[5:7]]) == {0, 1}


def test_too_few_pictures_are_not_screened():
    bench = bench_of(bluish(), blueness)
    bench.evidence.correct[COUNT + 3 :] = False
    screening = Screening(bench, np.random.default_rng(0))
    assert [len(each) for each in screening.choose(Color(label=0), np.arange(COUNT))] == [0, 0]


def test_the_test_uses_other_pictures_than_the_screening(monkeypatch):
    bench = bench_of(bluish(), blueness)
    screening = Screening(bench, np.random.default_rng(0))
    bench.means["color"] = torch.full((2, 3), 0.5)
    bench.evidence.cells = np.random.default_rng(0).random((len(bench.evidence), 2, GRID, GRID))
    bench.evidence.settings.classes = ("a", "b", "c")
    seen = []

    def transfer(bench, cue, sources, compare, from_, onto):
        seen.append((set(sources.tolist()), set(compare.tolist()), set(onto.tolist())))
        return np.arange(len(onto)) + 1.0, np.zeros(len(onto))

    monkeypatch.setattr(suspicions, "_transfer", transfer)
    own = SimpleNamespace(name="a")
    random = np.random.default_rng(0)
    found = suspicions._measure(bench, screening, Color(label=0), own, 48, random)
    assert found.transfers == 48
    for sources, compare, onto in seen:
        assert sources <= set(range(COUNT)) and not compare & set(range(COUNT))
        assert not onto & set(screening.onto.tolist())


@pytest.mark.parametrize(
    ("kind", "repeats", "weight"),
    [("edge", 0.2, 1 / 4), ("edge", 0.9, 0.9), ("copy", 0.9, 3.6), ("color", 1.0, 1.0)],
)
def test_the_effect_counts_as_much_as_the_cue_repeats(kind, repeats, weight):
    from bcosvit.auditing.cues import Cells, Copied, Cue

    cue = {each.kind: each for each in (Cells, Copied, Edge, Color)}[kind]
    assert Cue.large == (0.4, 0.3)

    def score(effect, low):
        made = {"turned": 0.5, "turned_control": 0.1, "effect": effect, "low": low}
        return Suspicion.score.fget(SimpleNamespace(**made, repeats=repeats, cue=cue))

    assert score(0.3, 0.3) == pytest.approx(weight)
    # Copies are ranked by what their effect is likely to be, others by what it is at least.
    doubted = kind != "copy"
    assert score(0.6, 0.3) == pytest.approx(weight * (1 if doubted else 1.5))
    assert score(0.6, -0.3) == pytest.approx(weight * (0 if doubted else 1.5), abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "turned", "low", "removals", "strong"),
    [
        ("edge", 0.41, 0.31, 5, True),
        ("edge", 0.39, 0.31, 5, False),
        ("edge", 0.41, 0.29, 5, False),
        ("color", 0.86, 0.61, 10, True),
        ("color", 0.84, 0.61, 10, False),
        ("color", 0.86, 0.59, 10, False),
        # Of fewer pictures, the colors agree by chance.
        ("color", 0.86, 0.61, 9, False),
        ("sharpness", 0.41, 0.31, 10, True),
        ("sharpness", 0.41, 0.31, 9, False),
    ],
)
def test_large_effects_of_enough_pictures_are_strong(kind, turned, low, removals, strong):
    from bcosvit.auditing.cues import Sharpness

    cue = {each.kind: each for each in (Edge, Color, Sharpness)}[kind]
    made = SimpleNamespace(
        turned=turned, turned_control=0.0, low=low, removals=removals, p_corrected=0.01, cue=cue
    )
    made.large = Suspicion.large.fget(made)
    assert made.large == (strong or removals == 9)
    assert Suspicion.strong.fget(made) == strong
    made.p_corrected = 0.06
    assert not Suspicion.strong.fget(made)

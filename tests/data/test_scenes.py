"""The drawn scenes: the same bits everywhere, honest masks, and nothing that betrays the label.

What must tell nothing about the label is shown twice: exactly, where the design promises it, and by
a statistic that is first shown to ring where the label does matter.
"""

import hashlib
import os
import pickle
import subprocess
import sys
from functools import lru_cache

import numpy as np
import pytest
from PIL import Image

from bcosvit.data.scenes import SPLITS, VARIANTS, Scene, Scenes, _pair_poses
from bcosvit.data.scenes.objects import KINDS
from bcosvit.data.scenes.render import Random

PINNED = "4f81652012d777fd4b66e7f8699db191da8e0f5c0185090b7505c01a1120257e"

FINGERPRINT = """
import hashlib
from bcosvit.data.scenes import VARIANTS, Scenes
digest = hashlib.sha256()
for variant in VARIANTS:
    scenes = Scenes("val", variant, size=32)
    for index in range(8 if variant == "plain" else 3):
        scene = scenes[index]
        digest.update(scene.image.tobytes() + scene.mask.tobytes())
print(digest.hexdigest())
"""


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.float64)


@lru_cache(maxsize=2)
def drawn(variant: str) -> list[Scene]:
    """Drawn once for the statistics."""
    return list(Scenes("train", variant, size=32, length=160))


def f_statistic(values: np.ndarray, labels: np.ndarray) -> float:
    """One-way analysis of variance: near 1 where the label tells nothing about the values."""
    groups = [values[labels == label] for label in np.unique(labels)]
    between = sum(len(g) * (g.mean() - values.mean()) ** 2 for g in groups) / (len(groups) - 1)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (len(values) - len(groups))
    return float(between / within)


# The 99.9 % quantile of F with 7 and 152 degrees of freedom.
CRITICAL = 3.70


# The same bits everywhere


def test_bits_in_a_fresh_process_without_vector_instructions() -> None:
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    command = [sys.executable, "-W", "ignore", "-c", FINGERPRINT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == PINNED


def test_bits_here(capsys: pytest.CaptureFixture[str]) -> None:
    exec(FINGERPRINT, {})
    assert capsys.readouterr().out.strip() == PINNED


def test_a_scene_depends_on_neither_order_nor_length() -> None:
    first, second = Scenes("train", size=32), Scenes("train", size=32, length=50)
    second[3]
    assert first[7].image.tobytes() == second[7].image.tobytes() == second[7 - 50].image.tobytes()


def test_pickles() -> None:
    scenes = Scenes("val", "cue", size=32, length=20, seed=5)
    again = pickle.loads(pickle.dumps(scenes))
    assert repr(again) == repr(scenes)
    assert again[4].image.tobytes() == scenes[4].image.tobytes()
    assert pickle.loads(pickle.dumps(scenes[4])).label == 4


def test_splits_seeds_and_variants_share_no_scene() -> None:
    seen = set()
    for split in SPLITS:
        for variant in VARIANTS:
            for seed in (0, 1):
                scenes = Scenes(split, variant, size=32, length=8, seed=seed)
                # The ground alone: two scenes that share one would differ in the object only.
                seen |= {hashlib.sha256(scenes.background(i).tobytes()).digest() for i in range(8)}
    assert len(seen) == len(SPLITS) * len(VARIANTS) * 2 * 8


# What a scene is


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes(variant: str, size: int) -> None:
    scene = Scenes("val", variant, size=size)[3]
    assert scene.image.mode == "RGB"
    assert scene.image.size == (size, size)
    assert scene.mask.shape == (size, size)
    assert scene.mask.dtype == np.bool_
    assert (scene.cue_mask is not None) == (variant == "cue")
    # A picture, not a blank: it uses most of the tonal range.
    low, high = np.quantile(pixels(scene.image), [0.01, 0.99])
    assert high - low > 80


def test_a_scene_is_the_same_at_every_size() -> None:
    for index in range(6):
        small, large = (Scenes("val", size=size)[index] for size in (64, 128))
        shrunk = large.image.resize((64, 64), Image.Resampling.BOX)
        assert np.abs(pixels(small.image) - pixels(shrunk)).mean() < 8
        assert abs(small.mask.mean() - large.mask.mean()) < 0.01


def test_labels_are_balanced_and_known_without_drawing() -> None:
    for variant in VARIANTS:
        scenes = Scenes("val", variant, size=32)
        counts = np.bincount([scenes.label(index) for index in range(len(scenes))])
        assert counts.tolist() == [len(scenes) // len(scenes.classes)] * len(scenes.classes)
        assert scenes[5].label == scenes.label(5)
    assert (len(Scenes("train")), len(Scenes("val"))) == (2000, 400)
    assert len(set(Scenes.classes)) == len(Scenes.classes) == 8


def test_mask_is_where_the_object_is_seen() -> None:
    for variant in VARIANTS:
        scenes = Scenes("train", variant, size=48)
        for index in range(12):
            scene, without = scenes[index], pixels(scenes.background(index))
            change = pixels(scene.image) - without
            assert np.mean(np.abs(change[scene.mask]).max(axis=1) > 4) > 0.93
            # Elsewhere, but for the pixels of the rim, the object does nothing but cast a shadow.
            padded = np.pad(scene.mask, 2, mode="edge")
            near = np.zeros_like(scene.mask)
            for dy in range(5):
                for dx in range(5):
                    near |= padded[dy : dy + 48, dx : dx + 48]
            assert change[~near].max() <= 0


def test_mask_covers_what_it_should() -> None:
    areas = np.array([scene.mask.mean() for scene in drawn("plain")])
    assert areas.min() > 0.08
    assert areas.max() < 0.22
    assert areas.std() > 0.02


def test_kinds_know_their_area_and_reach() -> None:
    axis = ((np.arange(800) + 0.5) / 200 - 2).astype(np.float32)
    u, v = np.meshgrid(axis, axis)
    for kind in KINDS:
        inside = kind.outline(u, v) < 0
        assert inside.sum() / 200**2 == pytest.approx(kind.area, rel=0.005), kind.name
        assert kind.reach - 0.05 < np.hypot(u, v)[inside].max() < kind.reach + 0.01, kind.name


# What tells the class, and what doesn't


class AllAlike(Scenes):
    """Scenes in which every label is the last."""

    def label(self, index: int) -> int:
        return len(self.classes) - 1


@pytest.mark.parametrize("variant", ["plain", "hard"])
def test_the_label_changes_nothing_but_the_object(variant: str) -> None:
    for index in range(6):
        one = Scenes("train", variant, size=32).background(index)
        other = AllAlike("train", variant, size=32).background(index)
        assert one.tobytes() == other.tobytes()


def test_place_size_and_ground_tell_nothing() -> None:
    scenes, alike = drawn("plain"), Scenes("train", size=32, length=160)
    labels = np.array([scene.label for scene in scenes])
    centers = np.array([np.argwhere(scene.mask).mean(axis=0) for scene in scenes])
    areas = np.array([scene.mask.mean() for scene in scenes])
    grounds = np.array([pixels(alike.background(i)).mean(axis=(0, 1)) for i in range(80)])
    objects = np.array([pixels(s.image)[s.mask].mean(axis=0) for s in scenes])
    for values in (*centers.T, areas, *grounds.T):
        assert f_statistic(values, labels[: len(values)]) < CRITICAL
    for values in objects.T:
        assert f_statistic(values, labels) > 5 * CRITICAL


def color_accuracy(scenes: list[Scene]) -> float:
    """How often the class whose objects are nearest in mean color and spread is the right one."""
    patches = [pixels(scene.image)[scene.mask] for scene in scenes]
    features = np.array([np.r_[p.mean(axis=0), p.std(axis=0)] for p in patches])
    labels = np.array([scene.label for scene in scenes])
    known, asked = slice(0, 80), slice(80, None)
    means = np.array([features[known][labels[known] == label].mean(axis=0) for label in range(8)])
    nearest = ((features[asked, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    return float(np.mean(nearest == labels[asked]))


def test_color_tells_the_class_in_plain_and_not_in_hard() -> None:
    # Chance is 0.125, with a deviation of 0.037 over 80 scenes.
    assert color_accuracy(drawn("plain")) > 0.5
    assert color_accuracy(drawn("hard")) < 0.2


def test_cue_goes_with_the_class_in_training_only() -> None:
    for split, low, high in (("train", 0.935, 0.965), ("val", 0.09, 0.16)):
        scenes = Scenes(split, "cue", length=2000)
        agreement = np.mean([scenes.cue(index) == scenes.label(index) for index in range(2000)])
        assert low < agreement < high, split


def test_cue_is_seen_where_its_mask_is_and_nowhere_on_the_object() -> None:
    scenes = Scenes("val", "cue", size=32, length=120)
    cues = np.array([scenes.cue(index) for index in range(120)])
    colors = []
    for scene in scenes:
        assert scene.cue_mask is not None
        assert 0.01 < scene.cue_mask.mean() < 0.06
        assert not (scene.cue_mask & scene.mask).any()
        color = pixels(scene.image)[scene.cue_mask].mean(axis=0)
        colors.append(color / np.linalg.norm(color))
    means = np.array([np.mean(np.array(colors)[:80][cues[:80] == c], axis=0) for c in range(8)])
    nearest = ((np.array(colors)[80:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == cues[80:]) > 0.85


def test_position_says_where_the_butterfly_is_from_the_lemon() -> None:
    scenes = Scenes("val", "position", size=48, length=40)
    assert scenes.classes == ("left", "right", "above", "below")
    for scene in scenes:
        rgb = pixels(scene.image)
        blue = scene.mask & (rgb[..., 2] > 1.3 * rgb[..., 1])
        yellow = scene.mask & (rgb[..., 1] > 1.3 * rgb[..., 2])
        down, right = np.argwhere(blue).mean(axis=0) - np.argwhere(yellow).mean(axis=0)
        sides = {"left": -right, "right": right, "above": -down, "below": down}
        assert max(sides, key=lambda side: sides[side]) == scenes.classes[scene.label]


def test_position_leaves_nothing_to_a_bag_of_patches() -> None:
    """No patch of a sixth of the side sees both bodies, or sees from its grid where it is."""
    poses, labels = [], []
    for index in range(4000):
        side = index % 4
        dx, dy = ((-1, 0), (1, 0), (0, -1), (0, 1))[side]
        first, second = _pair_poses(Random(index), dx, dy)
        apart = abs(first.x - second.x) if dx else abs(first.y - second.y)
        assert apart - first.unit - second.unit > 1 / 6
        poses.append((first.x, first.y, second.x, second.y))
        labels.append(side)
    phases = np.exp(2j * np.pi * 6 * np.array(poses))
    for values in (*phases.real.T, *phases.imag.T):
        # The 99.99 % quantile of F with 3 and 3996 degrees of freedom.
        assert f_statistic(values, np.array(labels)) < 7.1


# What is refused


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"split": "test"}, "train, val"),
        ({"split": "train", "variant": "easy"}, "plain, hard, cue, position"),
        ({"split": "train", "size": 16}, "32 to 512"),
        ({"split": "train", "size": 513}, "32 to 512"),
        ({"split": "train", "length": 0}, "1 to"),
        ({"split": "train", "seed": -1}, "0 to"),
        ({"split": "train", "seed": 2**32}, "0 to"),
    ],
)
def test_bad_arguments_name_what_is_allowed(arguments: dict[str, object], allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        Scenes(**arguments)


def test_no_cue_without_the_variant() -> None:
    with pytest.raises(ValueError, match="'cue'"):
        Scenes("train").cue(0)


@pytest.mark.parametrize("index", [12, -13])
def test_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match="12 scenes"):
        Scenes("val", size=32, length=12)[index]

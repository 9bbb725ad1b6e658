"""Drawn scenes: a data set without a download, on which every claim can be checked to the pixel.

Each scene shows one object among clutter on a textured ground, lit by a sun, with the object's
visible pixels as ground truth. Ground, light, clutter, place, size and angle come from a stream of
chance that never sees the label, so that they can tell nothing about it; the object's dress comes
from a second one. Both are keyed by (seed, split, variant, index): a scene needs no state, no
order and no files, and is the same bits everywhere. How things are drawn is `data.scenery`.

Four variants ask four questions:

- ``plain``: color, texture and shape all tell the class. Does it learn?
- ``hard``: color and texture come from one distribution for all. Does it see shape?
- ``cue``: the objects are plaster casts, told by shape alone, and an enamel tag lies beside them;
  in training its color goes with the class 19 times in 20, in validation it means nothing. Does
  the explanation betray the shortcut?
- ``position``: every scene holds a butterfly and a lemon; the class is where the first is as seen
  from the second. Does it know where things are?
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from bcosvit.data.dataset import (
    Source,
    SourceError,
    SourceOptions,
    Split,
    parse_query,
    register_source,
)
from bcosvit.data.scenery.clutter import litter, overlay
from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.grounds import CALM, GROUNDS
from bcosvit.data.scenery.materials import any_material
from bcosvit.data.scenery.objects import KINDS, Kind
from bcosvit.data.scenery.stage import Light, Pose, Stage
from bcosvit.data.scenery.tag import lay_tag

__all__ = ["SPLITS", "VARIANTS", "Scene", "Scenes"]

SPLITS = {"train": 2000, "val": 400}
"""Each split with its default length."""

VARIANTS = ("plain", "hard", "cue", "position")

SIZES = (32, 512)

# The share of the picture that an object covers before anything lies over it.
AREA = (0.10, 0.20)

# The farthest point of any outline, for an object that covers as much as a disc of radius 1. One
# margin for all kinds, lest the place of an object tell what it is.
REACH = 1.49

CUE_AGREEMENT = 0.95

# The pair of `position`: as unlike in color as two kinds can be. The class is where the first is,
# as seen from the second; here as steps along x and y.
_PAIR = tuple(kind for name in ("butterfly", "lemon") for kind in KINDS if kind.name == name)
_SIDES = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}


@dataclass(frozen=True, eq=False)
class Scene:
    """One picture and the truth about it."""

    image: Image.Image
    label: int
    mask: NDArray[np.bool_]
    """[H,W], where the object (in `position`: either object) is what one sees."""
    cue_mask: NDArray[np.bool_] | None = None
    """[H,W], where one sees the tag; only in `cue`."""


class Scenes(Dataset[Scene]):
    """A map-style data set of drawn scenes.

    Labels go round, `index % len(classes)`, so that every stretch of the data set is balanced;
    nothing else about a scene depends on its index, and a loader that shuffles undoes the order.
    """

    classes: tuple[str, ...] = tuple(kind.name for kind in KINDS)

    def __init__(
        self,
        split: str,
        variant: str = "plain",
        size: int = 64,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}.")
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r} is unknown: use one of {', '.join(VARIANTS)}.")
        if not SIZES[0] <= size <= SIZES[1]:
            raise ValueError(
                f"size {size} is out of range: use {SIZES[0]} to {SIZES[1]} pixels a side."
            )
        if length is not None and not 1 <= length < 2**32:
            raise ValueError(
                f"length {length} is out of range: use 1 to 2**32 − 1, or None for the default."
            )
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} is out of range: use 0 to 2**32 − 1.")
        self.split, self.variant, self.size, self.seed = split, variant, size, seed
        self.length = SPLITS[split] if length is None else length
        if variant == "position":
            self.classes = tuple(_SIDES)

    def __repr__(self) -> str:
        return (
            f"Scenes({self.split!r}, variant={self.variant!r}, size={self.size}, "
            f"length={self.length}, seed={self.seed})"
        )

    def __len__(self) -> int:
        return self.length

    def label(self, index: int) -> int:
        """The label of a scene, without drawing it."""
        return self._wrap(index) % len(self.classes)

    def cue(self, index: int) -> int:
        """The class that the tag's color stands for: in training mostly the label's, else any."""
        if self.variant != "cue":
            raise ValueError(f"variant {self.variant!r} has no cue: use the variant 'cue'.")
        dice, count, label = self._dice(index, stream=2), len(self.classes), self.label(index)
        if self.split != "train":
            return dice.below(count)
        other = (label + 1 + dice.below(count - 1)) % count
        return label if dice.chance(CUE_AGREEMENT) else other

    def __getitem__(self, index: int) -> Scene:
        return self._draw(index, objects=True)

    def background(self, index: int) -> Image.Image:
        """The same scene without its object and its object's shadow."""
        return self._draw(index, objects=False).image

    def _wrap(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} scenes")
        return int(index) % self.length

    def _dice(self, index: int, stream: int) -> Dice:
        split, variant = list(SPLITS).index(self.split), VARIANTS.index(self.variant)
        return Dice(self.seed, split, variant, self._wrap(index), stream)

    def _draw(self, index: int, objects: bool) -> Scene:
        label = self.label(index)
        # The setting never sees the label (but for where things are in `position`).
        setting, dressing = self._dice(index, stream=0), self._dice(index, stream=1)
        stage = Stage(self.size, Light.roll(setting), setting.table(64, 64))
        # Relating two things is hard enough: in `position` they are easily found.
        setting.choice(CALM if self.variant == "position" else GROUNDS)(stage, setting)
        litter(stage, setting)

        placed = [(KINDS[label], _pose(setting))]
        if self.variant == "position":
            sides = _SIDES[self.classes[label]]
            placed = list(zip(_PAIR, _pair_poses(setting, *sides), strict=True))
        if self.variant == "cue":
            pose = placed[0][1]
            lay_tag(stage, setting, self.cue(index), avoid=(pose.x, pose.y))
        if objects:
            for kind, pose in placed:
                self._put(stage, kind, pose, dressing)
        overlay(stage, setting)

        # Dark corners would tell a patch of the picture where it is.
        vignette = 0.0 if self.variant == "position" else setting.between(0.06, 0.2)
        pixels = stage.finish(vignette, setting.between(0.05, 0.25), setting.between(0, 60))
        seen = [stage.seen(number) for number in range(len(stage.coverages))]
        cue_mask = seen.pop(0) if self.variant == "cue" else None
        mask = np.zeros((self.size, self.size), dtype=np.bool_)
        for visible in seen:
            mask |= visible
        return Scene(Image.fromarray(pixels), label, mask, cue_mask)

    def _put(self, stage: Stage, kind: Kind, pose: Pose, dice: Dice) -> None:
        if self.variant == "hard":
            dress = any_material(dice)
        elif self.variant == "cue":
            # Plaster casts: a class told by its colors leaves no reason to look at the tag.
            dress = any_material(dice, vivid=0.12)
        else:
            dress = kind.roll(dice)
        # A pose is given for a disc of radius 1; each kind's own units differ from that.
        pose = Pose(pose.x, pose.y, pose.unit * math.sqrt(math.pi / kind.area), pose.turn)
        # Beyond `plain` nothing but the outline may differ, so the shadows are equally long.
        lift = kind.lift if self.variant == "plain" else 0.4
        stage.place(kind.outline, dress, pose, kind.reach, lift, track=True)


def _pose(dice: Dice) -> Pose:
    radius = math.sqrt(dice.between(*AREA) / math.pi)
    margin = radius * REACH
    x, y = dice.between(margin, 1 - margin), dice.between(margin, 1 - margin)
    return Pose(x, y, radius, dice.between(0, 1))


def _pair_poses(dice: Dice, dx: int, dy: int) -> tuple[Pose, Pose]:
    """Two places a good way apart along (dx, dy), and a little, either way, across it.

    The gap is about as wide as a patch of 1/6 of the side, lest one look at it tell the class. The
    pair's middle roams over just such a patch, so that where an object falls in a grid of patches
    tells nothing either: a bag of patches stays at chance.
    """
    apart, across = dice.between(0.46, 0.49) / 2, dice.between(-0.12, 0.12) / 2
    along_middle, across_middle = dice.between(5 / 12, 7 / 12), dice.between(0.25, 0.75)
    poses = []
    for sign in (1, -1):
        along, beside = sign * apart, sign * across
        if dx:
            x, y = along_middle + dx * along, across_middle + beside
        else:
            x, y = across_middle + beside, along_middle + dy * along
        poses.append(Pose(x, y, dice.between(0.13, 0.145), dice.between(0, 1)))
    return poses[0], poses[1]


class SceneReader:
    """Drawn scenes with the masks of their objects."""

    drawn = True

    def __init__(self, scenes: Scenes, name: str) -> None:
        self._scenes = scenes
        self._name = name

    def __len__(self) -> int:
        return len(self._scenes)

    def key(self, index: int) -> str:
        return f"{self._name}/{index}"

    def label(self, index: int) -> int:
        return self._scenes.label(index)

    def image(self, index: int, at_least: int | None) -> Image.Image:
        return self._scenes[index].image

    def mask(self, index: int) -> NDArray[np.bool_]:
        return self._scenes[index].mask


@register_source("scenes", syntax="scenes[:VARIANT][?size=64&train=2000&val=400&seed=0]")
def open_scenes(data: str, options: SourceOptions) -> Source:
    """Opens the drawn scenes of a variant."""
    address, query = parse_query(data, "size", "train", "val", "seed")
    for option, value in query.items():
        if not value.isdecimal():
            raise SourceError(f"The option {option} of {address} is {value!r}: give a number.")
    numbers = {"seed": options.seed, "size": 64} | {name: int(v) for name, v in query.items()}
    variant = address.partition(":")[2] or "plain"

    def scenes(split: str) -> Scenes:
        return Scenes(split, variant, numbers["size"], numbers.get(split), numbers["seed"])

    splits = {name: Split(SceneReader(scenes(name), f"{address}/{name}")) for name in SPLITS}
    return Source(name=data, classes=scenes("train").classes, **splits)

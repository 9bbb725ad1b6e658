"""Drawn scenes: a data set without a download, on which explanations can be checked to the pixel.

Each scene shows an object among clutter on a textured background, with the visible pixels of the
object as ground truth. Background, light, clutter, position, size and angle come from random
numbers that never see the label, so that they say nothing about it; the object's texture comes from
a second stream. Both are determined by (seed, split, variant, index): a scene needs no state and no
files, and has the same bits on every machine.

There are four variants:

- ``plain``: Color, texture and shape all tell the class.
- ``hard``: Color and texture have the same distribution for all classes, so that only the shape
  tells them apart.
- ``cue``: The objects are gray plaster casts, and a small tag lies beside them. In training, its
  color agrees with the class in 19 of 20 scenes; in validation, it means nothing. Explanations show
  whether a model has learned this shortcut.
- ``position``: Every scene has a butterfly and a lemon, and the class is where the butterfly is as
  seen from the lemon.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.scenes.backgrounds import BACKGROUNDS, PALE_BACKGROUNDS
from bcosvit.data.scenes.objects import (
    CLUTTER,
    KINDS,
    THIN_CLUTTER,
    Kind,
    any_texture,
    place_tag,
)
from bcosvit.data.scenes.render import Canvas, Pose, Random, Window
from bcosvit.data.sources import Source, SourceOptions, parse_query, register_source

__all__ = ["SPLITS", "VARIANTS", "Scene", "Scenes", "open_scenes"]

SPLITS = {"train": 2000, "val": 400}
"""Each split with its default length."""

VARIANTS = ("plain", "hard", "cue", "position")

# The share of the image that an object covers before anything lies over it.
AREA = (0.10, 0.20)

# The farthest point of any outline, for an object that covers as much as a disc of radius 1. The
# margin is the same for all kinds, so that an object's position does not tell its class.
REACH = 1.49

CUE_AGREEMENT = 0.95

# The objects of `position`, as different in color as two kinds can be, and its classes as steps
# along x and y from the second object to the first.
_PAIR = tuple(kind for name in ("butterfly", "lemon") for kind in KINDS if kind.name == name)
_SIDES = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and what is known about it."""

    image: Image.Image
    label: int
    mask: NDArray[np.bool_]
    """[H,W], where the object is visible (in ``position``, either of the two)."""
    cue_mask: NDArray[np.bool_] | None = None
    """[H,W], where the tag is visible; only in ``cue``."""


class Scenes(Dataset[Scene]):
    """A map-style dataset of drawn scenes, and a `Reader` of their images and masks.

    Labels repeat, ``index % len(classes)``, so that every stretch of the dataset is balanced.

    Args:
        split: ``"train"`` or ``"val"``.
        variant: ``"plain"``, ``"hard"``, ``"cue"`` or ``"position"``.
        size: The side of the images in pixels, 32 to 512.
        length: The number of scenes; 2000 for training and 400 for validation by default.
        seed: Another seed draws other scenes.

    Raises:
        ValueError: If an argument is not allowed.

    Examples:
        >>> scene = Scenes("val", "hard", size=64)[3]
        >>> scene.image.size, scene.mask.shape, Scenes.classes[scene.label]
        ((64, 64), (64, 64), 'gemstone')
    """

    classes: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    drawn = True

    def __init__(
        self,
        split: str,
        variant: str = "plain",
        size: int = 64,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, choice, choices in (
            ("split", split, tuple(SPLITS)),
            ("variant", variant, VARIANTS),
        ):
            if choice not in choices:
                raise ValueError(f"{name} is {choice!r}: choose one of {', '.join(choices)}.")
        self.length = SPLITS[split] if length is None else length
        for name, value, low, high in (
            ("size", size, 32, 512),
            ("length", self.length, 1, 2**32 - 1),
            ("seed", seed, 0, 2**32 - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}: give an integer from {low} to {high}.")
        self.split, self.variant, self.size, self.seed = split, variant, size, seed
        if variant == "position":
            self.classes = tuple(_SIDES)

    def __repr__(self) -> str:
        return (
            f"Scenes({self.split!r}, variant={self.variant!r}, size={self.size}, "
            f"length={self.length}, seed={self.seed})"
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        return self._draw(index, objects=True)

    def label(self, index: int) -> int:
        """Returns the label of a scene without drawing it."""
        return self._wrap(index) % len(self.classes)

    def key(self, index: int) -> str:
        """Returns the name of a scene."""
        variant = "" if self.variant == "plain" else f":{self.variant}"
        return f"scenes{variant}/{self.split}/{self._wrap(index)}"

    def image(self, index: int, at_least: int | None = None) -> Image.Image:
        """Returns the image of a scene."""
        return self[index].image

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Returns the mask of a scene."""
        return self[index].mask

    def cue(self, index: int) -> int:
        """Returns the class for which the color of the tag stands.

        Raises:
            ValueError: If the variant is not ``cue``.
        """
        if self.variant != "cue":
            raise ValueError(f"variant {self.variant!r} has no cue: use the variant 'cue'.")
        random, count, label = self._random(index, stream=2), len(self.classes), self.label(index)
        if self.split != "train":
            return random.integer(count)
        other = (label + 1 + random.integer(count - 1)) % count
        return label if random() < CUE_AGREEMENT else other

    def background(self, index: int) -> Image.Image:
        """Returns the image of the same scene without the object and its shadow."""
        return self._draw(index, objects=False).image

    def _wrap(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} scenes")
        return int(index) % self.length

    def _random(self, index: int, stream: int) -> Random:
        split, variant = list(SPLITS).index(self.split), VARIANTS.index(self.variant)
        return Random(self.seed, split, variant, self._wrap(index), stream)

    def _draw(self, index: int, objects: bool) -> Scene:
        label, is_position = self.label(index), self.variant == "position"
        # These never see the label, except for the two positions in `position`.
        random, texture_random = self._random(index, stream=0), self._random(index, stream=1)
        canvas = Canvas(self.size, random)
        # Relating two objects is hard enough: in `position`, they are easily found.
        background = random.choice(PALE_BACKGROUNDS if is_position else BACKGROUNDS)
        canvas.fill(*background(canvas, random))
        for _ in range(6 + random.integer(7)):
            random.choice(CLUTTER)(canvas, random, random(), random())

        placed = [(KINDS[label], _pose(random))]
        if is_position:
            sides = _SIDES[self.classes[label]]
            placed = list(zip(_PAIR, _pair_poses(random, *sides), strict=True))
        if self.variant == "cue":
            pose = placed[0][1]
            place_tag(canvas, random, self.cue(index), avoid=(pose.x, pose.y))
        if objects:
            for kind, pose in placed:
                self._place(canvas, kind, pose, texture_random)
        for _ in range(random.integer(3)):
            random.choice(THIN_CLUTTER)(canvas, random, random(0.1, 0.9), random(0.1, 0.9))

        # Dark corners would tell a patch of the image where it is.
        vignette = 0.0 if is_position else random(0.06, 0.2)
        image = Image.fromarray(canvas.finish(vignette, random(0.05, 0.25), random(0, 60)))
        visible = canvas.visible()
        cue_mask = visible.pop(0) if self.variant == "cue" else None
        nothing = np.zeros((self.size, self.size), dtype=np.bool_)
        return Scene(image, label, np.logical_or.reduce([nothing, *visible]), cue_mask)

    def _place(self, canvas: Canvas, kind: Kind, pose: Pose, random: Random) -> None:
        texture, lift = kind.texture, 0.4
        if self.variant == "plain":
            lift = kind.lift
        elif self.variant == "hard":
            texture = any_texture
        elif self.variant == "cue":
            # Plaster casts: with colors of their own, nothing would be learned from the tag.
            texture = partial(any_texture, saturation=0.12)
        # A pose is given for a disc of radius 1; the units of each kind differ from that.
        pose = pose._replace(unit=pose.unit * math.sqrt(math.pi / kind.area))
        at = Window(canvas, pose, kind.reach, lift, track=True)
        texture(random, at, at.cut(kind.outline(at.u, at.v)))


def _pose(random: Random) -> Pose:
    radius = math.sqrt(random(*AREA) / math.pi)
    margin = radius * REACH
    return Pose(random(margin, 1 - margin), random(margin, 1 - margin), radius, random())


def _pair_poses(random: Random, dx: int, dy: int) -> tuple[Pose, Pose]:
    """Two positions that are far apart along (dx, dy) and a little, either way, across it.

    The gap is about as wide as a patch of 1/6 of the side, so that no single patch shows both. The
    middle of the pair is uniform over such a patch, so that the position of an object in a grid of
    patches says nothing either: a bag of patches stays at chance.
    """
    apart, across = random(0.46, 0.49) / 2, random(-0.12, 0.12) / 2
    along_middle, across_middle = random(5 / 12, 7 / 12), random(0.25, 0.75)
    poses = []
    for sign in (1, -1):
        along, beside = along_middle + (dx or dy) * (sign * apart), across_middle + sign * across
        x, y = (along, beside) if dx else (beside, along)
        poses.append(Pose(x, y, random(0.13, 0.145), random()))
    return poses[0], poses[1]


@register_source(
    "scenes", syntax="scenes[:VARIANT][?size=64&train=2000&val=400&seed=0]", drawn=True
)
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

    train, val = scenes("train"), scenes("val")
    return Source(name=data, classes=train.classes, train=Split(train), val=Split(val))

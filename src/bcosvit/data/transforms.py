"""From an image to the model's input: PIL image in, float32 tensor [3, size, size] out.

Two frozen dataclasses, one for training and one for evaluation, whose fields are their settings.
They use torchvision's v2 transforms for what is drawn at random (the crop's
geometry, RandAugment), and do the resizing themselves, because that is where the time goes:

* A crop is cut from the PIL image first, so that only its pixels are ever touched again.
* It is resized as bytes in channels-last order by torch's antialiased bilinear kernel, three times
  faster than Pillow's; the two differ by at most one level in 255.
* RandAugment then works on the small PIL image, with nearest-neighbor lookup as its authors have
  it and as is torchvision's default.
* Of a long image, evaluation takes the middle first, since the rest is never seen: what a resize
  costs then depends on the sizes alone, not on the proportions.
* Each transform has `at_least`, to be passed to `read_image`: the smallest size at which a JPEG
  may be decoded without the result being resized upwards where the whole file would not have been.
  In training that holds for the smallest crop that can be drawn; in evaluation twice the target is
  kept, past which an antialiased resize cannot be told apart by eye.

All randomness comes from torch's global generator. Values lie in [0, 1] by construction, being
bytes divided by 255, as the 6-channel encoding of the models needs them; there is no mean or
standard deviation to subtract.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bcosvit.data.images import to_bytes, to_tensor

__all__ = ["EvalTransform", "TrainTransform"]

SLIMMEST = 3 / 4
"""Width over height of a crop, at least; at most its inverse."""

LONGEST = 4
"""How many times the short side an image may be long before evaluation takes its middle first."""


@dataclass(frozen=True)
class TrainTransform:
    """Random resized crop, horizontal flip and RandAugment.

    Args:
        image_size: The side of the square that comes out, in pixels.
        rand_augment: How many operations RandAugment applies to an image, and their magnitude from
            0 to 30; with 0 operations, it is left out.
        flip: The probability of a horizontal flip.
        scale: The smallest and the largest share of the image's area that a crop may have.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> TrainTransform(224, scale=(0.5, 1.0))(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 224, 224])
    """

    image_size: int
    rand_augment: tuple[int, int] = (2, 9)
    flip: float = 0.5
    scale: tuple[float, float] = (0.08, 1.0)

    def __post_init__(self) -> None:
        _check_size(self.image_size)
        number, strength = self.rand_augment
        if number < 0 or not 0 <= strength <= 30:
            raise ValueError(
                f"rand_augment is {self.rand_augment}, a pair of a count from 0 and a strength "
                "from 0 to 30 is allowed: the paper takes (2, 9)."
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}: give a probability between 0 and 1.")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"scale is {self.scale}: give the smallest and the largest share of the area, "
                "above 0 and up to 1."
            )

    @property
    def at_least(self) -> int:
        """The short side at which the smallest crop still has `image_size` pixels."""
        return math.ceil(self.image_size / math.sqrt(self.scale[0] * SLIMMEST))

    def __call__(self, image: Image.Image) -> Tensor:
        box = self._crop.make_params([image])
        left, top = box["left"], box["top"]
        image = image.crop((left, top, left + box["width"], top + box["height"]))
        image = _resize(image, self.image_size, self.image_size)
        if torch.rand(()) < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.rand_augment[0]:
            image = self._augment(image)
        return to_tensor(image)

    @cached_property
    def _crop(self) -> Any:
        ratio = (SLIMMEST, 1 / SLIMMEST)
        return _v2().RandomResizedCrop(self.image_size, scale=self.scale, ratio=ratio)

    @cached_property
    def _augment(self) -> Any:
        number, strength = self.rand_augment
        return _v2().RandAugment(number, strength)


@dataclass(frozen=True)
class EvalTransform:
    """Resizes the short side and crops the center; nothing is random.

    Args:
        image_size: The side of the square that comes out, in pixels.
        crop_fraction: The share of the short side that the crop keeps. The default resizes to 256
            pixels before it crops 224, and keeps this proportion at other sizes.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> EvalTransform(224)(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 224, 224])
    """

    image_size: int
    crop_fraction: float = 224 / 256

    def __post_init__(self) -> None:
        _check_size(self.image_size)
        if not 0 < self.crop_fraction <= 1:
            raise ValueError(
                f"crop_fraction is {self.crop_fraction}: give a share above 0 and up to 1."
            )

    @property
    def resize(self) -> int:
        """The short side before the crop."""
        return round(self.image_size / self.crop_fraction)

    @property
    def at_least(self) -> int:
        """Twice the target: what an antialiased resize needs to look the same."""
        return 2 * self.resize

    def __call__(self, image: Image.Image) -> Tensor:
        image = _middle(image)
        width, height = image.size
        short = min(width, height)
        width, height = (self.resize * width // short, self.resize * height // short)
        image = _resize(image, width, height)
        left, top = round((width - self.image_size) / 2), round((height - self.image_size) / 2)
        return to_tensor(image.crop((left, top, left + self.image_size, top + self.image_size)))


def _middle(image: Image.Image) -> Image.Image:
    """The middle of an image that is longer than `LONGEST` times its short side.

    The rest is cut off evenly, so that the center stays where it is, and in whole pixels. What is
    left is at least three times as long as the short side, hence longer than any crop.
    """
    width, height = image.size
    over = max(width, height) - LONGEST * min(width, height)
    if over <= 0:
        return image
    cut = (over + 1) // 2
    return image.crop(
        (cut, 0, width - cut, height) if width > height else (0, cut, width, height - cut)
    )


def _v2() -> ModuleType:
    """torchvision's v2 transforms, imported when first needed: that takes seconds."""
    from bcosvit._torchvision import torchvision

    return importlib.import_module(f"{torchvision.__name__}.transforms.v2")


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"image_size is {size}: give a positive number of pixels.")


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    if image.size == (width, height):
        return image
    # The batch dimension must come first for torch to see channels-last memory and keep to it.
    pixels = to_bytes(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return Image.fromarray(resized[0].permute(1, 2, 0).numpy())

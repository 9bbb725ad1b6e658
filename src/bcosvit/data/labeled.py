"""The images of an evaluation: those of a source with the labels of a model, and masks.

Data and model have class names of their own, which `match_classes` brings together.
"""

from __future__ import annotations

import copy
import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bcosvit.data.dataset import MaskReader, Skipped, SourceError, Split, Transform
from bcosvit.data.masks import MaskFiles
from bcosvit.data.sources import Source
from bcosvit.messages import and_more

__all__ = ["LabeledImages", "labeled_images", "match_classes"]


class LabeledImages(Dataset[tuple[Tensor, int, str]]):
    """The images of an evaluation as (image [3, H, W], label of the model, key).

    `labeled_images` makes one.

    Args:
        splits: Where the images come from, one after the other.
        labels: The label of the model for each label of the data.
        transform: Turns an image into the model's input.
    """

    def __init__(
        self, splits: Sequence[Split], labels: Sequence[int], transform: Transform
    ) -> None:
        self.splits = [split.with_transform(transform) for split in splits]
        self.labels, self.transform = list(labels), transform
        self._places = [(n, at) for n, split in enumerate(splits) for at in range(len(split))]
        self._given: list[int] | None = None
        self._mask_files: MaskFiles | None = None
        self._masked: frozenset[str] = frozenset()
        self._classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        number, position = self._places[index]
        image, label, key = self.splits[number][position]
        assert isinstance(image, Tensor)
        return image, self.labels[label] if self._given is None else self._given[index], key

    def limit(self, count: int, seed: int = 0) -> LabeledImages:
        """Keeps ``count`` images that are chosen at random, in their old order.

        Raises:
            ValueError: If ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"limit is {count}: give an integer of at least 1.")
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self), generator=generator)[:count]
        self._places = [self._places[at] for at in sorted(chosen.tolist())]
        return self

    def relabeled(self, labels: Sequence[int]) -> LabeledImages:
        """Returns the same images with other labels, one per image in order."""
        other = copy.copy(self)
        other._given = list(labels)
        return other

    def num_classes(self) -> int:
        """Returns how many different classes the images have."""
        if self._given is not None:
            return len(set(self._given))
        return len({self.splits[number].label(at) for number, at in self._places})

    def fingerprint(self) -> str:
        """Returns a hash of keys and labels in order; pixels do not enter."""
        digest = hashlib.sha256()
        for index, (number, at) in enumerate(self._places):
            split = self.splits[number]
            label = self.labels[split.label(at)] if self._given is None else self._given[index]
            digest.update(f"{label}\0{split.key(at)}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def masks(self) -> Callable[[int], Tensor | None] | None:
        """Returns a function from an index to the object's pixels, or None if the data have none.

        The function returns a bool tensor [H, W], cropped as the image is, or None if the object is
        unknown or lies outside of the crop.
        """
        if self._mask_files is not None:
            return self._mask
        if all(isinstance(split.reader, MaskReader) for split in self.splits):
            return self._mask
        return None

    def with_masks(self, files: MaskFiles, classes: Sequence[str] = ()) -> LabeledImages:
        """Returns the same images with masks from files.

        Args:
            files: The masks by the images' keys.
            classes: The names of the data's classes, to choose objects by.

        Raises:
            SourceError: If none of the images has a mask, or one mask fits several images.
        """
        keys = [self.splits[number].key(at) for number, at in self._places]
        # Also those that `limit` has left out, which may be the ones that a mask belongs to.
        every = (split.key(at) for split in self.splits for at in range(len(split)))
        masked = frozenset(files.match(every))
        if masked.isdisjoint(keys):
            raise SourceError(
                f"None of {len(keys)} images has a mask of its name, e.g. {keys[0]!r}: name masks "
                "like the images."
            )
        other = copy.copy(self)
        other._mask_files, other._masked, other._classes = files, masked, tuple(classes)
        return other

    def skipped(self) -> tuple[Skipped, ...]:
        """Returns the images that could not be read so far."""
        return tuple(item for split in self.splits for item in split.skipped())

    def _mask(self, index: int) -> Tensor | None:
        number, position = self._places[index]
        split = self.splits[number]
        if self._mask_files is not None or not split.reader.drawn:
            # Of the image that stands in, where this one cannot be read.
            position, image = split.readable(position)
        if self._mask_files is not None:
            key, label = split.key(position), split.label(position)
            if key not in self._masked:
                return None
            name = self._classes[label] if 0 <= label < len(self._classes) else None
            mask = self._mask_files.mask(key, name)
            if mask is not None:
                _check_proportions(key, mask, image)
        else:
            assert isinstance(split.reader, MaskReader)
            mask = split.reader.mask(int(split.indices[position]))
        if mask is None:
            return None
        shown = self.transform(Image.fromarray(mask.astype(np.uint8) * 255).convert("RGB"))
        inside = shown[0] > 0.5
        return inside if inside.any() else None


def _check_proportions(key: str, mask: NDArray[np.bool_], image: Image.Image) -> None:
    """A file may have been decoded at a smaller size, but with the same proportions."""
    (height, width), (wide, high) = mask.shape, image.size
    if abs(width * high - height * wide) > 2 * max(width, height):
        raise SourceError(
            f"The mask of {key!r} has {width}×{height} pixels, which are not the proportions of "
            f"its image ({wide}×{high}): give masks of the images' sizes."
        )


def labeled_images(
    source: Source,
    split: str,
    class_names: Sequence[str] | None,
    transform: Transform,
    *,
    num_classes: int | None = None,
    class_ids: Sequence[str] | None = None,
) -> LabeledImages:
    """Returns the images of a source with the labels of a model.

    Data and model have class names of their own. Labels are matched by name (`match_classes`), so
    that a model can be evaluated on some of its classes or on data in another order. If the model
    has no names, labels are positions.

    Args:
        source: The data set.
        split: ``"val"``, ``"train"`` or ``"all"``.
        class_names: The names of the model's classes, or None if it has none.
        transform: Turns an image into the model's input.
        num_classes: The number of the model's classes, to be checked where it has no names.
        class_ids: Short names of the model's classes, such as WordNet IDs, that data may use.

    Raises:
        ValueError: If the split is unknown or if the data have classes that the model does not.

    Examples:
        >>> source = open_source("scenes?size=32&train=8&val=16")
        >>> images = labeled_images(source, "val", source.classes, EvalTransform(32))
        >>> len(images), images.num_classes()
        (16, 8)
    """
    splits = {"val": [source.val], "train": [source.train], "all": [source.train, source.val]}
    if split not in splits:
        raise ValueError(f"split is {split!r}: choose one of {', '.join(splits)}.")
    if not source.classes:
        raise ValueError(
            f"The images of {source.name} have no labels: sort them into one folder per class."
        )
    if class_names is None:
        count = len(source.classes)
        if num_classes is not None and count > num_classes:
            raise ValueError(
                f"{source.name} has {count} classes but the model knows {num_classes}: use data "
                "with the classes that it was trained on."
            )
        return LabeledImages(splits[split], range(count), transform)
    try:
        labels = match_classes(source.classes, class_names, class_ids)
    except ValueError as error:
        raise ValueError(f"{source.name} does not fit the model: {error}") from error
    return LabeledImages(splits[split], labels, transform)


def match_classes(
    names: Sequence[str], class_names: Sequence[str], class_ids: Sequence[str] | None = None
) -> list[int]:
    """Finds the classes of a model that the class folders of a data set mean.

    All folders are named in the same way, the first of these that fits all of them: as the model
    names its classes; the same without regard to case, with ``_`` or ``-`` for spaces
    (``golf_ball``); by the model's IDs (``n03445777``); by numbers from 0 (``574``); or by a number
    followed by one of the others (``574_n03445777``, ``574-golf ball``).

    Args:
        names: The names of the data set's classes.
        class_names: The names of the model's classes.
        class_ids: IDs of the model's classes, such as WordNet IDs, in the same order.

    Returns:
        The model's class for each name.

    Raises:
        ValueError: If a name fits no class, or two fit the same one.

    Examples:
        >>> match_classes(["n02", "n01"], ["tench", "golf ball"], ["n01", "n02"])
        [1, 0]
        >>> match_classes(["Golf_ball"], ["tench", "golf ball"])
        [1]
        >>> match_classes(["001_n02", "000_n01"], ["tench", "golf ball"], ["n01", "n02"])
        [1, 0]
    """
    exact = {name: label for label, name in reversed([*enumerate(class_names)])}
    plain = {_plain_name(name): label for name, label in exact.items()}
    by_id = {name.casefold(): label for label, name in enumerate(class_ids or ())}

    def number(name: str) -> int | None:
        found = int(name) if name.isascii() and name.isdecimal() else -1
        return found if 0 <= found < len(class_names) else None

    def numbered(name: str) -> int | None:
        first, rest = re.fullmatch(r"(\d*)[-_. ]?(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        means = {by_id.get(rest.casefold()), plain.get(_plain_name(rest))} - {None}
        found = number(first)
        # Data that count from 1 would otherwise be off by one class silently.
        return found if found in means else None

    ways = (
        exact.get,
        lambda name: plain.get(_plain_name(name)),
        lambda name: by_id.get(name.casefold()),
        number,
        numbered,
    )
    misses: list[tuple[int, str]] = []
    for way in ways:
        labels = [way(name) for name in names]
        found = [label for label in labels if label is not None]
        if len({*found}) == len(names):
            return found
        missing = next((n for n, label in zip(names, labels, strict=True) if label is None), None)
        misses.append((len(found), missing or names[0]))
    _, example = max(misses, key=lambda miss: miss[0])
    ids = f"by IDs such as {class_ids[0]!r}, " if class_ids else ""
    raise ValueError(
        f"the class {example!r} is none that the model knows ({and_more(class_names, 10)}); name "
        f"the class folders as the model does, {ids}or by numbers from 0 to "
        f"{len(class_names) - 1}."
    )


def _plain_name(name: str) -> str:
    """A class name as it is compared: without case, and with spaces between words."""
    return " ".join(re.split(r"[\s_-]+", unicodedata.normalize("NFC", name).casefold().strip()))

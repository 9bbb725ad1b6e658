"""Data sets of labeled images: readers, splits, sources, and the registry of kinds of data.

A `Reader` knows where images are stored (a folder, tar shards, a Hugging Face dataset, a drawing
function). A `Split` is a map-style dataset over some of a reader's images. A `Source` is a training
split, a validation split and the class names, and `open_source` makes one from a text. The kinds of
data that it understands register themselves with `register_source`.

Every split is random-access, also over shards. The order of a run is then a function of the seed
and the epoch alone, and a run that resumes in the middle of an epoch sees exactly the images that
it would have seen.

Unreadable files are handled twice. `check_source` reads everything before training and returns a
source without them. During training, an image that has become unreadable is replaced by the next
readable one of its split, which depends on the files alone and not on the number of workers or on a
restart. Unreadable positions are marked in shared memory, because data loaders read in worker
processes while the training process counts them and stops above the limit.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bcosvit.data.images import ImageError
from bcosvit.files import atomic
from bcosvit.messages import and_more
from bcosvit.registry import Registry

__all__ = [
    "LabeledImages",
    "MaskFinder",
    "MaskReader",
    "Reader",
    "Skipped",
    "Source",
    "SourceError",
    "SourceKind",
    "SourceOptions",
    "Split",
    "build_source",
    "check_source",
    "hold_out",
    "labeled_images",
    "match_classes",
    "open_source",
    "register_source",
    "source_syntax",
    "write_skipped",
]

Sample: TypeAlias = tuple[Image.Image | Tensor, int, str]
Transform: TypeAlias = Callable[[Image.Image], Tensor]

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test")
"""Names of splits, in the order in which they are looked for: beside a val, a test is unused."""

_CHUNK = 1024


class SourceError(ValueError):
    """A data set cannot be used; the message is one sentence that says why."""


class Reader(Protocol):
    """Random access to stored images. It must work from several threads and after a fork."""

    @property
    def drawn(self) -> bool:
        """Whether images are drawn instead of read, so that none can be unreadable."""

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """Returns a name of the image that is unique within the reader."""

    def label(self, index: int) -> int:
        """Returns the class of the image without reading it."""

    def image(self, index: int, at_least: int | None) -> Image.Image:
        """Returns the image in RGB or raises `ImageError`; see `read_image` for ``at_least``."""


@runtime_checkable
class MaskReader(Protocol):
    """A reader that also knows where the objects are."""

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """Returns the pixels [H, W] of the object in an image, or None if they are unknown."""


class MaskFinder(Protocol):
    """Masks of objects by the keys of images, e.g. `bcosvit.data.masks.MaskFiles`."""

    def find(self, key: str) -> str | None:
        """Returns the name of the mask of an image, or None if there is none."""

    def mask(self, key: str, class_name: str | None = None) -> NDArray[np.bool_] | None:
        """Returns the pixels [H, W] of the object, or None if they are unknown."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """An image that was left out, and why."""

    key: str
    reason: str


class Split(Dataset[Sample]):
    """A map-style dataset of (image, label, key) over some images of a reader.

    An item may be a position, or a pair of a position and a seed. With a seed, torch's CPU
    generator is seeded for this one sample and restored afterwards, so that random augmentation
    depends on the pair alone, however many workers there are and wherever a run resumes.

    Args:
        reader: Where the images are stored.
        indices: The images of the reader that belong to the split; all by default.
        transform: Applied to each image; without one, items hold PIL images.
        max_skipped: The share of the split that may be unreadable before an error is raised.

    Raises:
        SourceError: If ``max_skipped`` is not between 0 and 1.

    Examples:
        >>> split = open_source("scenes?train=8&val=8").train
        >>> image, label, key = split[3]
        >>> key
        'scenes/train/3'
    """

    def __init__(
        self,
        reader: Reader,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        transform: Transform | None = None,
        max_skipped: float = 0.01,
    ) -> None:
        _check_skipped(max_skipped)
        self.reader = reader
        self.indices = np.asarray(range(len(reader)) if indices is None else indices, np.int64)
        self.transform = transform
        self.max_skipped = max_skipped
        self._bad = torch.zeros(len(self.indices), dtype=torch.uint8).share_memory_()

    def __repr__(self) -> str:
        return f"Split({len(self)} images, transform={self.transform})"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int | tuple[int, int]) -> Sample:
        if isinstance(position, tuple):
            position, seed = position
            with _seeded(seed):
                return self[position]
        found, image = self._readable(range(len(self))[position])
        label, key = self.label(found), self.key(found)
        return (image if self.transform is None else self.transform(image)), label, key

    def key(self, position: int) -> str:
        """Returns the name of an image without reading it."""
        return self.reader.key(int(self.indices[position]))

    def label(self, position: int) -> int:
        """Returns the class of an image without reading it."""
        return self.reader.label(int(self.indices[position]))

    def labels(self) -> list[int]:
        """Returns the classes of all images in order."""
        return [self.label(position) for position in range(len(self))]

    def select(self, positions: Sequence[int] | np.ndarray) -> Split:
        """Returns a split of the images at these positions."""
        indices = self.indices[np.asarray(positions, np.int64)]
        return Split(self.reader, indices, transform=self.transform, max_skipped=self.max_skipped)

    def with_transform(self, transform: Transform | None) -> Split:
        """Returns the same images with another transform; both know the same unreadable ones."""
        other = Split(self.reader, self.indices, transform=transform, max_skipped=self.max_skipped)
        other._bad = self._bad
        return other

    def skipped(self) -> tuple[Skipped, ...]:
        """Returns the unreadable images found so far by any worker."""
        return tuple(
            Skipped(key=self.key(position), reason=self.reason(position) or "readable again")
            for position in self._bad.nonzero().flatten().tolist()
        )

    def reason(self, position: int) -> str | None:
        """Reads an image and returns why it is unreadable, or None if it can be read."""
        try:
            # The smallest decoding still runs through all of the file's data.
            self.reader.image(int(self.indices[position]), at_least=1)
        except ImageError as error:
            return str(error)
        return None

    def unreadable(
        self, *, progress: Callable[[int], None] | None = None, num_workers: int | None = None
    ) -> dict[int, str]:
        """Reads every image and returns the unreadable positions with their reasons.

        Args:
            progress: Called on this thread with the number of images read since the last call.
            num_workers: Number of threads; decoding runs outside of Python's global lock.
        """
        bad: dict[int, str] = {}
        if self.reader.drawn:
            return bad
        with ThreadPoolExecutor(num_workers or min(32, (os.cpu_count() or 1) + 4)) as pool:
            # In chunks: one future per image of a large data set would fill the memory.
            for start in range(0, len(self), _CHUNK):
                chunk = range(start, min(start + _CHUNK, len(self)))
                reasons = zip(chunk, pool.map(self.reason, chunk), strict=True)
                bad |= {position: reason for position, reason in reasons if reason is not None}
                if progress is not None:
                    progress(len(chunk))
        return bad

    def enforce_limit(self, bad: int, example: str) -> None:
        """Raises `SourceError` if more images are unreadable than ``max_skipped`` allows.

        In a small split, a single file is more than any sensible share: one unreadable image is
        always allowed unless ``max_skipped`` is 0.
        """
        allowed = max(1.0, self.max_skipped * len(self)) if self.max_skipped else 0.0
        if bad > allowed:
            raise SourceError(
                f"{bad} of {len(self)} images cannot be read, a share of {self.max_skipped:g} is "
                f"allowed (the last one: {example.rstrip('.')}): repair the data or raise "
                "max_skipped."
            )

    def _readable(self, position: int) -> tuple[int, Image.Image]:
        at_least = getattr(self.transform, "at_least", None)
        for step in range(len(self)):
            found = (position + step) % len(self)
            if self._bad[found]:
                continue
            try:
                return found, self.reader.image(int(self.indices[found]), at_least)
            except ImageError as error:
                self._bad[found] = 1
                self.enforce_limit(int(self._bad.sum()), str(error))
        raise SourceError(f"None of {len(self)} images can be read: check the data.")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # torch.manual_seed would also reseed the accelerators, which the training step uses meanwhile.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that is ready for training; `open_source` makes one."""

    name: str
    """The text that was given to `open_source`."""
    classes: tuple[str, ...]
    """The class names; a label is a position in this tuple."""
    train: Split
    """The images to train on."""
    val: Split
    """The images to validate on."""

    def fingerprint(self) -> str:
        """Returns a hash of classes, keys and labels in order; pixels do not enter.

        A run that resumes compares it to find out whether its images are still the same.
        """
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogatepass"))
        for split in (self.train, self.val):
            digest.update(b"\n\n")
            for position in range(len(split)):
                line = f"{split.label(position)}\0{split.key(position)}\n"
                digest.update(line.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options of `open_source`, which each kind of data receives."""

    val_fraction: float = 0.1
    seed: int = 0
    max_skipped: float = 0.01
    cache: Path | None = None
    only_val: bool = False
    """Whether images of a validation split alone will do; there are then none to train on."""

    def __post_init__(self) -> None:
        _check_fraction(self.val_fraction)
        _check_skipped(self.max_skipped)


Opener: TypeAlias = Callable[[str, SourceOptions], Source]


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """A registered kind of data."""

    syntax: str
    """How the text looks, for help and error messages."""
    matches: Callable[[str | Path], bool]
    """Whether a text or a path is of this kind."""
    open: Opener
    drawn: bool = False
    """Whether images are drawn instead of read."""


SOURCES: Registry[SourceKind] = Registry(kind="kind of data", group="bcosvit.sources")


def register_source(
    name: str,
    *,
    syntax: str,
    matches: Callable[[str | Path], bool] | None = None,
    drawn: bool = False,
) -> Callable[[Opener], Opener]:
    """Registers a function that opens a kind of data, so that `open_source` understands it.

    Args:
        name: The name of the kind. Without ``matches``, it is also the scheme: the kind then opens
            the texts ``name`` and ``name:...`` but no `pathlib.Path`.
        syntax: How the text looks, for help and error messages.
        matches: Whether a text or a path is of this kind. The kind that was registered last is
            asked first.
        drawn: Whether images are drawn instead of read.

    Returns:
        A decorator for a function of the text and the `SourceOptions` that returns a `Source`.

    Raises:
        ValueError: If the name is taken.

    Examples:
        >>> @register_source("few", syntax="few:DATA")
        ... def open_few(data: str, options: SourceOptions) -> Source:
        ...     source = open_source(data.removeprefix("few:"), seed=options.seed)
        ...     return replace(source, train=source.train.select(range(20)))
        >>> len(open_source("few:scenes").train)
        20
    """

    def by_scheme(data: str | Path) -> bool:
        address = str(data).partition("?")[0]
        has_scheme = address.partition(":")[0] == name and not address.startswith(f"{name}://")
        return isinstance(data, str) and has_scheme

    def decorator(function: Opener) -> Opener:
        kind = SourceKind(syntax=syntax, matches=matches or by_scheme, open=function, drawn=drawn)
        SOURCES.register(name, origin=function)(kind)
        return function

    return decorator


def source_syntax() -> str:
    """Returns how the text of each kind of data looks, for help texts."""
    return "; ".join(kind.syntax for _, kind in SOURCES.items())


def is_drawn(data: str | Path) -> bool:
    """Returns whether a text or a path stands for drawn images."""
    kinds = (kind for _, kind in reversed(SOURCES.items()) if kind.matches(data))
    return next((kind.drawn for kind in kinds), False)


def open_source(
    data: str | Path,
    *,
    val_fraction: float = 0.1,
    seed: int = 0,
    max_skipped: float = 0.01,
    cache: Path | None = None,
    only_val: bool = False,
) -> Source:
    """Opens a data set: a folder, tar shards, a Hugging Face dataset, drawn scenes.

    Everything that would spoil a run is an error here, before any training: a missing folder, a
    class without images, classes with nearly the same name, a validation split with other classes.
    Labels are positions in the sorted class names (numbers are sorted as numbers; Hugging Face
    datasets and scenes keep their own order).

    Args:
        data: ``path/to/folder`` with one sub-folder per class, or with ``train/`` and ``val/`` that
            have them; ``shards/train-{000..012}.tar``, a folder of tar files or a remote address;
            ``hf:NAME_OR_PATH[:CONFIG][?image=COLUMN&label=COLUMN]``;
            ``scenes[:VARIANT][?size=64&train=2000&val=400&seed=0]``. A folder that is named like
            another kind of data can be given as a `pathlib.Path` or as ``./scenes``.
        val_fraction: The share of each class that is held out for validation where the data have
            no validation split.
        seed: Another seed holds out other images.
        max_skipped: The share of a split that may be unreadable. Unless it is 0, one image always
            may.
        cache: Where copies of remote shards are kept; the user's cache folder by default.
        only_val: Whether data that have a validation split alone, such as a folder with ``val/``
            and no ``train/``, will do. The training split is then empty.

    Raises:
        SourceError: If the data cannot be used.

    Examples:
        >>> source = open_source("scenes:hard?size=32&train=80&val=16")
        >>> len(source.classes), len(source.train), len(source.val)
        (8, 80, 16)
    """
    options = SourceOptions(
        val_fraction=val_fraction,
        seed=seed,
        max_skipped=max_skipped,
        cache=cache,
        only_val=only_val,
    )
    for _, kind in reversed(SOURCES.items()):
        if kind.matches(data):
            return kind.open(str(data), options)
    problem = "is a file that is no data set" if Path(data).exists() else "is missing"
    raise SourceError(f"The data set {data} {problem}: give one of {source_syntax()}.")


def build_source(
    name: str,
    classes: Iterable[str],
    train: Split,
    val: Split | None,
    options: SourceOptions,
) -> Source:
    """Makes a source from its parts after checking them.

    Every kind of data finds its images in its own way and then uses this function, so that the same
    images give the same labels, validation split and error messages in a folder and in shards.

    Args:
        name: The text that was given to `open_source`.
        classes: The class names, in the order of the labels.
        train: The images to train on.
        val: The images to validate on; if None, they are held out from ``train``.
        options: The options of `open_source`.

    Raises:
        SourceError: If there are fewer than two classes, if two names can hardly be told apart, or
            if a split has no images of a class.
    """
    classes = check_classes(classes, name)
    for part, split in {"training": train, "validation": val}.items():
        if split is None or (options.only_val and split is train and not len(train)):
            continue
        absent = set(range(len(classes))) - set(split.labels())
        if absent:
            names = and_more(repr(classes[label]) for label in sorted(absent))
            raise SourceError(
                f"There are no images of {names} in the {part} split of {name}: add some, or "
                "remove the class from both splits."
            )
    if val is None:
        train, val = hold_out(train, options.val_fraction, options.seed)
    for split in (train, val):
        split.max_skipped = options.max_skipped
    return Source(name=name, classes=classes, train=train, val=val)


def check_classes(names: Iterable[str], where: object) -> tuple[str, ...]:
    """Returns the class names, or raises if there are too few or two can hardly be told apart."""
    classes = tuple(names)
    if not classes:
        raise SourceError(f"There are no classes in {where}: give one folder of images per class.")
    seen: dict[str, str] = {}
    for name in classes:
        # How file systems that ignore case, or that normalize as macOS does, compare the two.
        plain = unicodedata.normalize("NFC", name).casefold().strip()
        if plain in seen:
            raise SourceError(
                f"The classes {seen[plain]!r} and {name!r} in {where} differ only in case, spaces "
                "or Unicode form: merge or rename them."
            )
        seen[plain] = name
    if len(classes) == 1:
        raise SourceError(
            f"There is a single class in {where}, {classes[0]!r}: at least two are needed; if it "
            "is the folder around the classes, give its path."
        )
    return classes


def hold_out(split: Split, fraction: float, seed: int = 0) -> tuple[Split, Split]:
    """Divides a split into one for training and one for validation, class by class.

    Images are ranked by a hash of the seed and their key. Unlike a shuffle, this does not depend on
    any library's random numbers, and adding or removing an image hardly changes the others.

    Args:
        split: The images to divide.
        fraction: The share of each class that is held out: at least one image if there are two,
            never all of them.
        seed: Another seed holds out other images.

    Returns:
        The images to train on and the images that were held out, both in their old order.

    Raises:
        SourceError: If no class has two images.
    """
    _check_fraction(fraction)
    by_label: dict[int, list[int]] = {}
    for position, label in enumerate(split.labels()):
        by_label.setdefault(label, []).append(position)

    def rank(position: int) -> bytes:
        text = f"{seed}\0{split.key(position)}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    held = np.zeros(len(split), np.bool_)
    for members in by_label.values():
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held[sorted(members, key=rank)[:count]] = True
    if not held.any():
        raise SourceError(
            "No class has a second image that could be held out for validation: give more images "
            "or a validation split."
        )
    return split.select(np.flatnonzero(~held)), split.select(np.flatnonzero(held))


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise SourceError(f"val_fraction is {fraction}: give a share between 0 and 1.")


def _check_skipped(share: float) -> None:
    if not 0 <= share <= 1:
        raise SourceError(f"max_skipped is {share}: give a share between 0 and 1.")


def check_source(
    source: Source,
    *,
    progress: Callable[[int, int], None] | None = None,
    num_workers: int | None = None,
) -> tuple[Source, tuple[Skipped, ...]]:
    """Reads every image once and removes the unreadable ones.

    Args:
        source: The data set to check.
        progress: Called with the number of images that have been read and their total number.
        num_workers: Number of threads that read.

    Returns:
        The source without the unreadable images, and the list of those.

    Raises:
        SourceError: If too many images are unreadable or none of a class is left to train on.

    Examples:
        >>> source, skipped = check_source(open_source("scenes?train=8&val=8"))
        >>> skipped
        ()
    """
    done, total = 0, len(source.train) + len(source.val)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    skipped: list[Skipped] = []
    kept: list[Split] = []
    for split in (source.train, source.val):
        bad = split.unreadable(progress=advance, num_workers=num_workers)
        if bad:
            split.enforce_limit(len(bad), list(bad.values())[-1])
        skipped += [Skipped(key=split.key(p), reason=reason) for p, reason in bad.items()]
        kept.append(split.select(np.setdiff1d(np.arange(len(split)), list(bad))))
    lost = set(source.train.labels()) - set(kept[0].labels())
    if lost or not len(kept[1]):
        what = f"train on for the class {source.classes[min(lost)]!r}" if lost else "validate on"
        raise SourceError(
            f"No readable image is left to {what} in {source.name}: replace the damaged files."
        )
    return replace(source, train=kept[0], val=kept[1]), tuple(skipped)


def write_skipped(path: str | os.PathLike[str], skipped: Iterable[Skipped]) -> None:
    """Writes one line per image, key and reason, and replaces the file only when complete."""

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")

    with (
        atomic(Path(path)) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines(f"{escape(item.key)}\t{escape(item.reason)}\n" for item in skipped)


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
        self._mask_files: MaskFinder | None = None
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

    def with_masks(self, files: MaskFinder, classes: Sequence[str] = ()) -> LabeledImages:
        """Returns the same images with masks from elsewhere.

        Args:
            files: The masks by the images' keys, e.g. `bcosvit.data.masks.MaskFiles`.
            classes: The names of the data's classes, to choose objects by.

        Raises:
            SourceError: If none of the images has a mask.
        """
        keys = [self.splits[number].key(at) for number, at in self._places]
        if not any(files.find(key) is not None for key in keys):
            raise SourceError(
                f"None of {len(keys)} images has a mask of its name, e.g. {keys[0]!r}: name masks "
                "like the images."
            )
        other = copy.copy(self)
        other._mask_files, other._classes = files, tuple(classes)
        return other

    def skipped(self) -> tuple[Skipped, ...]:
        """Returns the images that could not be read so far."""
        return tuple(item for split in self.splits for item in split.skipped())

    def _mask(self, index: int) -> Tensor | None:
        number, position = self._places[index]
        split = self.splits[number]
        inner = int(split.indices[position])
        if self._mask_files is not None:
            key, label = split.key(position), split.label(position)
            name = self._classes[label] if 0 <= label < len(self._classes) else None
            mask = self._mask_files.mask(key, name)
            if mask is not None:
                image = split.reader.image(inner, getattr(self.transform, "at_least", None))
                _check_proportions(key, mask, image)
        else:
            assert isinstance(split.reader, MaskReader)
            mask = split.reader.mask(inner)
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
        # Data that count from 1 would otherwise be off by one class without a word.
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


def parse_query(data: str, *allowed: str) -> tuple[str, dict[str, str]]:
    """Splits ``address?option=value&...`` into the address and its options."""
    address, _, query = data.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        raise SourceError(
            f"The option {unknown[0]} of {data} is unknown: use {', '.join(allowed)}."
        )
    return address, options


def split_names(present: Iterable[str | None]) -> tuple[str | None, str | None]:
    """Returns which of the names are those of the training and of the validation split."""
    found = set(present)
    train = next((name for name in TRAIN_NAMES if name in found), None)
    return train, next((name for name in VAL_NAMES if name in found), None)

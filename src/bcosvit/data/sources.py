"""Sources of images: a training split, a validation split and class names, from one text.

`open_source` makes a `Source` from a text. The kinds of data that it understands register
themselves with `register_source`, and build their sources with `build_source`, so that the same
images give the same labels, validation split and error messages wherever they are stored.

`check_source` reads everything before training and returns a source without unreadable images.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl

import numpy as np

from bcosvit.data.dataset import Skipped, SourceError, Split, check_skipped
from bcosvit.messages import and_more
from bcosvit.registry import Registry

__all__ = [
    "SOURCES",
    "Source",
    "SourceKind",
    "SourceOptions",
    "build_source",
    "check_source",
    "hold_out",
    "is_drawn",
    "open_source",
    "register_source",
    "source_syntax",
]

TRAIN_NAMES = ("train", "training")

VAL_NAMES = ("val", "valid", "validation", "test")

"""Names of splits, in the order in which they are looked for: beside a val, a test is unused."""


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
        check_skipped(self.max_skipped)


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
    Labels are positions in the sorted class names. Numbers in ``.cls`` and ``.json`` files are
    sorted as numbers; Hugging Face datasets and scenes keep their own order.

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

"""Tar shards with random access.

The `webdataset` library defines how shards are addressed (brace patterns, ``::`` lists, remote
addresses) and how samples are stored in them, as members ``key.jpg`` and ``key.cls`` or
``key.json``; both are kept. Archives of class folders (``train/<class>/x.jpg``) are read too.

Its streaming is not used. A stream can be shuffled only within a buffer and cannot be entered in
the middle, so that neither the order of an epoch nor a resumed run would follow from the seed
alone. Instead, the headers of each shard are read once, and an image is its shard, offset and size.
Reading one is an open, a seek and a read, with no state between threads or processes. A remote
shard is copied into a local cache first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.images import EXTENSIONS, ImageError, read_image
from bcosvit.data.sources import (
    TRAIN_NAMES,
    VAL_NAMES,
    Source,
    SourceOptions,
    build_source,
    register_source,
    split_names,
)
from bcosvit.files import atomic, cache_folder
from bcosvit.messages import require

__all__ = ["ShardReader", "is_shards", "open_shards"]

_REMOTE = re.compile(r"(pipe:|\w+://)")
_SHARDS = 100_000
"""How many shards a pattern may stand for."""
_SPLIT_NAME = re.compile(rf"({'|'.join(TRAIN_NAMES + VAL_NAMES)})(?=[-_.\d]|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One image in a shard."""

    shard: int
    name: str
    offset: int
    size: int
    label: int | str | None
    split: str | None
    """The split that the folders in the archive or the shard's name stand for, in lower case."""


class ShardReader:
    """Images in local tar files, by offset."""

    drawn = False

    def __init__(self, shards: Sequence[Path], found: Sequence[Member], labels: np.ndarray) -> None:
        self._shards = tuple(shards)
        # Shards of the same name in several folders must not share keys.
        parent = os.path.commonpath([shard.absolute().parent for shard in shards])
        self._titles = [os.path.relpath(shard, parent) for shard in shards]
        self._names = [member.name for member in found]
        self._where = np.array([(m.shard, m.offset, m.size) for m in found], np.int64)
        self._labels = labels

    def __len__(self) -> int:
        return len(self._names)

    def key(self, index: int) -> str:
        return f"{self._titles[self._where[index, 0]]}/{self._names[index]}"

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def image(self, index: int, at_least: int | None) -> Image.Image:
        shard, offset, size = self._where[index].tolist()
        path = self._shards[shard]
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise ImageError(
                f"The shard {path} cannot be read ({error.strerror}): check the path."
            ) from error
        return read_image(data, at_least=at_least, name=f"{path}/{self._names[index]}")


def is_shards(data: str | Path) -> bool:
    """Returns whether data are tar shards, by the ending, the scheme or the folder's content."""
    if _REMOTE.match(str(data)) or re.search(r"\.(tar(\.\w+)?|tgz)$", str(data)):
        return True
    folder = Path(data)
    # An archive beside the images that were extracted from it is not a shard.
    return folder.is_dir() and bool(_shards_in(folder)) and not _has_images(folder)


@register_source(
    "shards", syntax="tar shards such as shards/train-{000..012}.tar", matches=is_shards
)
def open_shards(data: str, options: SourceOptions) -> Source:
    """Opens tar files by a pattern, a folder, a remote address or a ``pipe:`` command."""
    shards = _local_shards(data, options.cache)
    found = _members(shards)
    if not found:
        raise SourceError(f"There are no images in {data}: check what the shards contain.")
    names = {member.split for member in found}
    train, val = split_names(names)
    no_train = train is None and val is not None and not options.only_val
    if no_train or (None in names and len(names) > 1):
        listed = ", ".join(sorted(name or "neither" for name in names))
        raise SourceError(
            f"The shards {data} hold images marked {listed}: mark all of them as train or val, by "
            "the shards' names or the folders inside, or none."
        )
    found = [member for member in found if member.split in (train, val)]
    classes, labels = _classes(found, shards, data)
    images = Split(ShardReader(shards, found, labels))
    if val is None:
        return build_source(data, classes, images, None, options)
    is_val = np.array([member.split == val for member in found])
    train_images = images.select(np.flatnonzero(~is_val))
    val_images = images.select(np.flatnonzero(is_val))
    return build_source(data, classes, train_images, val_images, options)


def _has_images(folder: Path) -> bool:
    names = (name for _, _, files in os.walk(folder) for name in files)
    return any(os.path.splitext(name)[1].lower() in EXTENSIONS for name in names)


def _shards_in(folder: Path) -> list[Path]:
    """The shards in a folder, or one level below it (``train/0.tar``)."""
    found = [path for pattern in ("*.tar", "*/*.tar") for path in folder.glob(pattern)]
    return sorted(path for path in found if not path.name.startswith("."))


def _local_shards(data: str, cache: Path | None) -> list[Path]:
    """The shards of an address on this machine, after copying remote ones into the cache."""
    if Path(data).is_dir():
        return _shards_in(Path(data))
    addresses: list[str] = [data]
    # A command may have braces of its own, and an existing file is never a pattern.
    if not data.startswith("pipe:") and not Path(data).exists():
        _check_pattern(data)
        try:
            addresses = _webdataset("shardlists").expand_urls(data)
        except (AssertionError, ValueError) as error:
            raise SourceError(
                f"The pattern {data} cannot be expanded ({error}): write a-{{000..012}}.tar."
            ) from error
    # Overlapping patterns would put copies of an image into both splits.
    addresses = [*dict.fromkeys(address.removeprefix("file://") for address in addresses)]
    paths = [_fetch(a, cache) if _REMOTE.match(a) else Path(a) for a in addresses]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}: "
            "check the path or the pattern."
        )
    return paths


def _check_pattern(pattern: str) -> None:
    """Refuses what stands for more addresses than there is memory, before it is expanded."""
    count = 1
    for part in re.findall(r"\{([^{}]*)\}", pattern):
        numbers = re.fullmatch(r"(-?\d{1,99})\.\.(-?\d{1,99})(?:\.\..*)?", part)
        span = int(numbers[2]) - int(numbers[1]) if numbers else part.count(",")
        count *= abs(span) + 1
    if count > _SHARDS:
        raise SourceError(
            f"The pattern {pattern} stands for {count:,} shards, {_SHARDS:,} are allowed: write "
            "a-{000..012}.tar."
        )


def _fetch(address: str, cache: Path | None) -> Path:
    """Copies a remote shard into the cache, completely or not at all, unless it is there."""
    # The name says which split it is; the hash distinguishes addresses.
    names = re.findall(r"[\w.-]+\.tar\b", address) or ["shard.tar"]
    folder = hashlib.sha256(address.encode()).hexdigest()[:16]
    target = (cache or cache_folder("shards")) / folder / names[-1][-100:]
    if target.exists():
        return target
    try:
        with (
            atomic(target) as partial,
            _webdataset("gopen").gopen(address) as stream,
            partial.open("wb") as file,
        ):
            shutil.copyfileobj(stream, file)
    except Exception as error:
        raise SourceError(
            f"The shard {address} cannot be fetched ({error}): check the address and the network."
        ) from error
    return target


def _webdataset(module: str) -> Any:
    return require(f"webdataset.{module}", extra="train", purpose="A tar shard")


def _members(shards: Sequence[Path]) -> list[Member]:
    """Every image in the shards; its label is in a ``.cls`` or ``.json`` file beside it, or else it
    is the folder."""
    # What is appended to an archive under an old name replaces what was there.
    images: dict[tuple[int, str], tuple[int, int]] = {}
    sidecars: dict[tuple[int, str], int | str] = {}
    for number, path in enumerate(shards):
        for info, archive in _walk(path):
            stem, _, ending = info.name.rpartition(".")
            if f".{ending.lower()}" in EXTENSIONS:
                images[number, info.name] = info.offset_data, info.size
            elif ending in {"cls", "json"}:
                file = archive.extractfile(info)
                assert file is not None
                label = _label(file.read(), ending, f"{path}/{info.name}")
                # A .cls file is there for the label alone, so that it takes precedence.
                if label is not None and (ending == "cls" or (number, stem) not in sidecars):
                    sidecars[number, stem] = label
    # webdataset ends a key at the first dot; file names with dots of their own end at the last.
    key_of: Callable[[str], tuple[str | None, str | None]]
    key_of = _webdataset("tariterators").base_plus_ext
    folders = _folders([name for _, name in images])
    found = []
    for ((number, name), (offset, size)), (split, label) in zip(
        images.items(), folders, strict=True
    ):
        for key in (key_of(name)[0], name.rpartition(".")[0]):
            label = sidecars.get((number, key or ""), label)
        split = split or _split_of_shard(shards[number])
        found.append(
            Member(shard=number, name=name, offset=offset, size=size, label=label, split=split)
        )
    return found


def _classes(
    found: Sequence[Member], shards: Sequence[Path], data: str
) -> tuple[list[str], np.ndarray]:
    """The sorted classes and all labels; ``classes.txt`` names numbers if it exists."""
    given: list[int | str] = []
    for member in found:
        if member.label is None:
            raise SourceError(
                f"The image {shards[member.shard]}/{member.name} has no label: put a .cls or .json "
                "file beside it, or put it into a folder with the name of its class."
            )
        given.append(member.label)
    values = sorted(set(given), key=lambda value: (isinstance(value, str), value))
    if len({type(value) for value in values}) > 1:
        raise SourceError(f"The labels in {data} are partly numbers, partly names: use one kind.")
    classes = [str(value) for value in values]
    names = shards[0].parent / "classes.txt"
    if isinstance(values[0], int) and names.is_file():
        lines = names.read_text("utf-8").split("\n")
        classes = [line.strip() for line in lines if line.strip()]
        if values != list(range(len(classes))):
            raise SourceError(
                f"The labels in {data} run from {values[0]} to {values[-1]} ({len(values)} of "
                f"them), {names} names {len(classes)} classes: both must be 0, 1, 2, …"
            )
    numbers = {value: number for number, value in enumerate(values)}
    return classes, np.array([numbers[value] for value in given], np.int64)


def _walk(path: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """The plain, visible files of an archive, by its headers alone."""
    # Opening a pipe would wait for ever.
    if not path.is_file():
        raise SourceError(f"The shard {path} is not a regular file: give the path of a tar file.")
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                if info.isreg() and info.offset_data + info.size > size:
                    raise SourceError(
                        f"The shard {path} ends within {info.name}: copy or write it again."
                    )
                visible = not PurePosixPath(info.name).name.startswith((".", "__"))
                if info.isreg() and not info.issparse() and visible:
                    yield info, archive
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(
            f"The shard {path} is not an uncompressed tar file ({error}): unpack compressed shards "
            "first, since images are read from them in any order."
        ) from error


def _label(data: bytes, ending: str, where: str) -> int | str | None:
    """What a file beside an image says; None where a .json file holds other things."""
    try:
        text = data.decode("utf-8").strip()
        value: Any = text
        if ending == "json":
            content = json.loads(text)
            named = [content[name] for name in ("label", "cls", "class") if name in content]
            if not named:
                return None
            value = named[0]
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(
            f"The label file {where} cannot be understood: a .cls file holds a number or a name, a "
            ".json file an object with 'label', 'cls' or 'class'."
        ) from error
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise SourceError(f"The label in {where} is {value!r}: give a number or a name.")
    return value


def _folders(names: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """For each name the split and the class that its folders stand for."""
    parts = [[p for p in PurePosixPath(name).parts[:-1] if p not in {".", "/"}] for name in names]
    # `tar cf pets.tar pets/` puts one folder around everything.
    while (
        parts
        and all(len(p) > 1 and p[0] == parts[0][0] for p in parts)
        and not _split_of(parts[0][0])
    ):
        parts = [p[1:] for p in parts]
    found: list[tuple[str | None, str | None]] = []
    for part in parts:
        split = _split_of(part[0]) if part else None
        rest = part[1:] if split else part
        found.append((split, rest[0] if rest else None))
    return found


def _split_of(folder: str) -> str | None:
    match = _SPLIT_NAME.fullmatch(folder)
    return match[1].lower() if match else None


def _split_of_shard(path: Path) -> str | None:
    match = _SPLIT_NAME.match(path.name)
    return match[1].lower() if match else _split_of(path.parent.name)

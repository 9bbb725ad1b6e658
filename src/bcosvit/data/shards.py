"""Tar shards as a random-access store.

The `webdataset` library defines how such shards are addressed (see `data.addresses`) and how
samples lie in them, as members ``key.jpg`` and ``key.cls`` or ``key.json``; that is kept. Archives
of class folders (``train/<class>/x.jpg``) are read too.

Its streaming is not used for training. A stream can be shuffled only within a buffer and cannot be
entered in the middle, so that neither the order of an epoch nor a resumed run would follow from the
seed alone. Instead each shard's headers are walked once, and a picture is its shard, offset and
size; reading one is an open, a seek and a read, with no state between threads or processes.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from bcosvit.data.addresses import local_shards, webdataset
from bcosvit.data.images import EXTENSIONS, ImageError, read
from bcosvit.data.partition import TRAIN, VAL, Draw, Opened, check_classes, check_coverage
from bcosvit.data.splits import SourceError

__all__ = ["Member", "ShardStore", "members", "open_shards"]

_MARK = re.compile(rf"({'|'.join(TRAIN + VAL)})(?=[-_.\d]|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One picture in a shard."""

    shard: int
    name: str
    offset: int
    size: int
    label: int | str | None
    mark: str | None
    """The split that the archive's folders or the shard's name speak of, in lower case."""


class ShardStore:
    """Pictures in local tar files, by offset."""

    drawn = False

    def __init__(self, shards: Sequence[Path], found: Sequence[Member], labels: np.ndarray) -> None:
        self._shards = tuple(shards)
        # Shards of one name in several folders must not share keys.
        around = os.path.commonpath([shard.absolute().parent for shard in shards])
        self._titles = [os.path.relpath(shard, around) for shard in shards]
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
        return read(data, at_least=at_least, name=f"{path}/{self._names[index]}")


def open_shards(data: str, draw: Draw, cache: Path | None) -> Opened:
    """Index the shards of an address and part their pictures; see `data.sources`."""
    shards = local_shards(data, cache)
    found = members(shards)
    if not found:
        raise SourceError(f"There are no pictures in {data}: check the shards' content.")
    marks = {member.mark for member in found}
    train = next((mark for mark in TRAIN if mark in marks), None)
    val = next((mark for mark in VAL if mark in marks), None)
    if (train is None and val is not None) or (None in marks and len(marks) > 1):
        names = ", ".join(sorted(mark or "neither" for mark in marks))
        raise SourceError(
            f"The shards {data} hold pictures marked {names}: mark all of them as train or val, by "
            "the shards' names or the folders inside, or none."
        )
    found = [member for member in found if member.mark in (train, val)]
    classes, labels = _classes(found, shards, data)
    store = ShardStore(shards, found, labels)
    if val is None:
        return (classes, *draw(store, np.arange(len(store))))
    is_val = np.array([member.mark == val for member in found])
    parts = (store, np.flatnonzero(~is_val)), (store, np.flatnonzero(is_val))
    for name, part in zip(("train", "val"), parts, strict=True):
        check_coverage(classes, part, f"the {name} part of {data}")
    return (classes, *parts)


def members(shards: Sequence[Path]) -> list[Member]:
    """Every picture in the shards, with its label: from ``.cls`` or ``.json`` beside it, otherwise
    the folder that it lies in."""
    pictures: list[tuple[int, str, int, int]] = []
    sidecars: dict[tuple[int, str], int | str] = {}
    for number, path in enumerate(shards):
        for info, archive in _walk(path):
            stem, _, ending = info.name.rpartition(".")
            if f".{ending.lower()}" in EXTENSIONS:
                pictures.append((number, info.name, info.offset_data, info.size))
            elif ending in {"cls", "json"}:
                file = archive.extractfile(info)
                assert file is not None
                label = _label(file.read(), ending, f"{path}/{info.name}")
                # A .cls file is there for the label alone, so that it has the last word.
                if label is not None and (ending == "cls" or (number, stem) not in sidecars):
                    sidecars[number, stem] = label
    # webdataset ends a key at the first dot; file names with dots of their own end at the last.
    key_of: Callable[[str], tuple[str | None, str | None]]
    key_of = webdataset("tariterators").base_plus_ext
    folders = _folders([picture[1] for picture in pictures])
    found = []
    for (number, name, offset, size), (mark, folder) in zip(pictures, folders, strict=True):
        keys = (name.rpartition(".")[0], key_of(name)[0])
        labels = [sidecars[number, key] for key in keys if key and (number, key) in sidecars]
        label = labels[0] if labels else folder
        mark = mark or _shard_mark(shards[number])
        place = {"shard": number, "offset": offset, "size": size}
        found.append(Member(name=name, label=label, mark=mark, **place))
    return found


def _classes(
    found: Sequence[Member], shards: Sequence[Path], data: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """The sorted classes and everyone's label; numbers are named by ``classes.txt``, if there."""
    names = shards[0].parent / "classes.txt"
    given: list[int | str] = []
    for member in found:
        if member.label is None:
            raise SourceError(
                f"The picture {shards[member.shard]}/{member.name} has no label: put a .cls or "
                ".json file beside it, or lay it in a folder named after its class."
            )
        given.append(member.label)
    values = sorted(set(given), key=lambda value: (isinstance(value, str), value))
    if len({type(value) for value in values}) > 1:
        raise SourceError(f"The labels in {data} are partly numbers, partly names: use one kind.")
    classes = [str(value) for value in values]
    if isinstance(values[0], int) and names.is_file():
        classes = names.read_text("utf-8").split("\n")
        classes = [line.strip() for line in classes if line.strip()]
        if values != list(range(len(classes))):
            raise SourceError(
                f"The labels in {data} run from {values[0]} to {values[-1]} ({len(values)} of "
                f"them), {names} names {len(classes)} classes: both must be 0, 1, 2, …"
            )
    numbers = {value: number for number, value in enumerate(values)}
    labels = np.array([numbers[value] for value in given], np.int64)
    return check_classes(classes, data), labels


def _walk(path: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """The plain, visible files of an archive, by its headers alone."""
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
            "first, since pictures are read from them in any order."
        ) from error


def _label(data: bytes, ending: str, where: str) -> int | str | None:
    """What a sidecar says; None where a .json file holds other things."""
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
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"The label file {where} cannot be understood: a .cls file holds a number or a name, a "
            ".json file an object with 'label', 'cls' or 'class'."
        ) from error
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise SourceError(f"The label in {where} is {value!r}: give a number or a name.")
    return value


def _folders(names: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """For each name the split and the class that its folders speak of."""
    parts = [[p for p in PurePosixPath(name).parts[:-1] if p not in {".", "/"}] for name in names]
    # `tar cf pets.tar pets/` puts one folder around everything.
    while parts and all(len(p) > 1 and p[0] == parts[0][0] for p in parts) and not _mark(parts[0]):
        parts = [p[1:] for p in parts]
    found: list[tuple[str | None, str | None]] = []
    for part in parts:
        mark = _mark(part)
        rest = part[1:] if mark else part
        found.append((mark, rest[0] if rest else None))
    return found


def _mark(parts: Sequence[str]) -> str | None:
    match = _MARK.fullmatch(parts[0]) if parts else None
    return match[1].lower() if match else None


def _shard_mark(path: Path) -> str | None:
    match = _MARK.match(path.name) or _MARK.fullmatch(path.parent.name)
    return match[1].lower() if match else None

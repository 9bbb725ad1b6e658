"""Anyone's pictures as a `Source`: the classes, a split to train on and one to validate on.

`open_source` takes one text, whatever the data are:

* ``path/to/folder``: a sub-folder a class, or ``train/`` and ``val/`` with a sub-folder a class
* ``shards/train-{000..012}.tar``, a folder of tar files, a remote address (see `data.shards`)
* ``hf:NAME_OR_PATH[:CONFIG][?image=COLUMN&label=COLUMN]`` (see `data.hub`)
* ``scenes[:VARIANT][?size=64&train=2000&val=400&seed=0]``: drawn, no files (see `data.scenes`)

Everything that would spoil a run is an error here, before any training: a missing folder, a class
without pictures, two classes that some disks would merge, a validation split with other classes.
Labels are positions in the sorted class names (numbers sort as numbers; Hugging Face datasets and
scenes keep their own order), so that they depend on the data alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bcosvit.data.addresses import is_shards
from bcosvit.data.folders import open_folder
from bcosvit.data.hub import open_hub
from bcosvit.data.partition import Draw, Opened, Part
from bcosvit.data.shards import open_shards
from bcosvit.data.splits import Skipped, SourceError, Split, unreadable, write_skipped

if TYPE_CHECKING:
    from bcosvit.data.scenes import Scenes

__all__ = ["Skipped", "Source", "SourceError", "Split", "check", "open_source", "write_skipped"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, ready to be trained on."""

    name: str
    """What was given to `open_source`."""
    classes: tuple[str, ...]
    """The class names; a label is a position in here."""
    train: Split
    """What to train on."""
    val: Split
    """What to validate on; no picture of it is in `train`, unless the data themselves repeat it."""

    def fingerprint(self) -> str:
        """A hash of classes, keys and labels in order: a run that resumes can tell by it that its
        pictures are no longer the same ones. Pixels do not enter."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogatepass"))
        for split in (self.train, self.val):
            digest.update(b"\n\n")
            for position in range(len(split)):
                line = f"{split.label(position)}\0{split.key(position)}\n"
                digest.update(line.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def open_source(
    data: str | Path,
    *,
    val_fraction: float = 0.1,
    seed: int = 0,
    max_skipped: float = 0.01,
    cache: Path | None = None,
) -> Source:
    """Open a folder, tar shards, a Hugging Face dataset or the drawn scenes; see above.

    `val_fraction` of each class is set aside with `seed` where the data have no validation split of
    their own. `max_skipped` is the share of a split that may be unreadable; unless it is 0, one
    picture always may. Remote shards are copied to `cache`, by default the user's cache folder. A
    folder that is called like another kind of data can be given as a `Path`, or as ``./scenes``.
    """
    draw = Draw(fraction=val_fraction, seed=seed)
    text = str(data)
    address, _, query = text.partition("?")
    kind = "" if isinstance(data, Path) else address.partition(":")[0]
    opened: Opened
    if kind == "scenes":
        opened = _open_scenes(address, _options(text, query, "size", "train", "val", "seed"), seed)
    elif kind == "hf" and not address.startswith("hf://"):
        opened = open_hub(address[3:], _options(text, query, "image", "label"), draw)
    elif is_shards(text):
        opened = open_shards(text, draw, cache)
    else:
        opened = open_folder(Path(data), draw)
    classes, train, val = opened
    return Source(
        name=text,
        classes=classes,
        train=Split(*train, max_skipped=max_skipped),
        val=Split(*val, max_skipped=max_skipped),
    )


def check(
    source: Source,
    *,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> tuple[Source, tuple[Skipped, ...]]:
    """Read every picture once; return the source without the bad ones, and the list of those.

    Too many bad pictures, or a class with none left to train on, are errors. `progress` is called
    with how many pictures are done and how many there are.
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
        bad = unreadable(split, progress=advance, threads=threads)
        if bad:
            split.enforce_limit(len(bad), list(bad.values())[-1])
        skipped += [Skipped(key=split.key(p), reason=reason) for p, reason in bad.items()]
        kept.append(split.without(bad))
    lost = set(source.train.labels()) - set(kept[0].labels())
    if lost or not len(kept[1]):
        what = f"train on for the class {source.classes[min(lost)]!r}" if lost else "validate on"
        raise SourceError(
            f"No readable picture is left to {what} in {source.name}: replace the damaged files."
        )
    return replace(source, train=kept[0], val=kept[1]), tuple(skipped)


class _SceneStore:
    """Drawn scenes, with the masks of their objects."""

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
        """The object's visible pixels."""
        return self._scenes[index].mask


def _open_scenes(address: str, options: Mapping[str, str], seed: int) -> Opened:
    from bcosvit.data.scenes import Scenes

    numbers: dict[str, int] = {"seed": seed, "size": 64}
    for option, value in options.items():
        if not value.isdecimal():
            raise SourceError(f"The option {option} of {address} is {value!r}: give a number.")
        numbers[option] = int(value)
    variant = address.partition(":")[2] or "plain"
    classes: tuple[str, ...] = ()
    parts: list[Part] = []
    for split in ("train", "val"):
        scenes = Scenes(split, variant, numbers["size"], numbers.get(split), numbers["seed"])
        classes = scenes.classes
        parts.append((_SceneStore(scenes, f"{address}/{split}"), np.arange(len(scenes))))
    return classes, parts[0], parts[1]


def _options(data: str, query: str, *allowed: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        raise SourceError(
            f"The option {unknown[0]} of {data} is unknown: use {', '.join(allowed)}."
        )
    return options

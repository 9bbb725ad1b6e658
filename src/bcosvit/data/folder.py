"""Folders of images, with one sub-folder per class or without classes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.images import EXTENSIONS, list_images, read_image
from bcosvit.data.sources import (
    TRAIN_NAMES,
    VAL_NAMES,
    Source,
    SourceOptions,
    build_source,
    check_classes,
    hold_out,
    register_source,
    split_names,
)
from bcosvit.messages import and_more

__all__ = ["FolderReader", "open_folder", "open_unlabeled"]


class FolderReader:
    """Image files by their paths below a folder; the path is the key."""

    drawn = False

    def __init__(self, root: Path, paths: list[str], labels: list[int]) -> None:
        self._root = root
        self._paths = paths
        self._labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def key(self, index: int) -> str:
        return self._paths[index]

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def image(self, index: int, at_least: int | None) -> Image.Image:
        return read_image(self._root / self._paths[index], at_least=at_least)


@register_source(
    "folder",
    syntax="a folder with one sub-folder per class",
    matches=lambda data: Path(data).is_dir(),
)
def open_folder(data: str, options: SourceOptions) -> Source:
    """Opens a folder of class folders, or one with ``train/`` and ``val/`` that hold them."""
    root = Path(data)
    parts = _parts(root, options)
    classes: tuple[str, ...] = ()
    paths: list[str] = []
    labels: list[int] = []
    ends: list[int] = []
    for part in parts:
        names = _class_names(part)
        if ends and names != classes:
            odd = sorted(set(names) ^ set(classes))
            raise SourceError(
                f"The classes of {parts[0]} and {part} differ ({and_more(map(repr, odd))}): both "
                "need the same class folders."
            )
        classes = names
        for label, name in enumerate(classes):
            found = [path.relative_to(root).as_posix() for path in list_images(part / name)]
            if not found:
                raise SourceError(_empty(part / name))
            paths += found
            labels += [label] * len(found)
        ends.append(len(paths))
    images = Split(FolderReader(root, paths, labels))
    # A validation split without a training split is allowed where nothing is trained.
    start = 0 if parts[0].name.lower() in VAL_NAMES and parts[0] != root else ends[0]
    train = images.select(range(start))
    val = images.select(range(start, ends[-1])) if len(ends) > 1 or not start else None
    return build_source(data, classes, train, val, options)


@register_source("unlabeled", syntax="unlabeled:FOLDER of images without classes")
def open_unlabeled(data: str, options: SourceOptions) -> Source:
    """Opens all images in a folder and its sub-folders; their labels are -1, there is no class."""
    root = Path(data.removeprefix("unlabeled:"))
    if not root.is_dir():
        raise SourceError(f"The folder {root} of {data} is missing: give an existing folder.")
    paths = [path.relative_to(root).as_posix() for path in list_images(root)]
    if not paths:
        raise SourceError(_empty(root))
    images = Split(FolderReader(root, paths, [-1] * len(paths)))
    train, val = hold_out(images, options.val_fraction, options.seed)
    for split in (train, val):
        split.max_skipped = options.max_skipped
    return Source(name=data, classes=(), train=train, val=val)


def _parts(root: Path, options: SourceOptions) -> list[Path]:
    """The folders that hold class folders: the root, train/, train/ and val/, or val/ alone."""
    folders = {folder.name.lower(): folder for folder in _subfolders(root)}
    train, val = split_names(folders)
    others = folders.keys() - {*TRAIN_NAMES, *VAL_NAMES}
    # A folder of images called train, beside other classes, is the class of trains.
    if train is not None and (not others or _subfolders(folders[train])):
        return [folders[train], *([] if val is None else [folders[val]])]
    if val is not None and folders.keys() <= set(VAL_NAMES):
        if options.only_val:
            return [folders[val]]
        raise SourceError(f"The data folder {root} has {folders[val].name}/ but no train/: add it.")
    return [root]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith((".", "__")))


def _class_names(part: Path) -> tuple[str, ...]:
    names = [folder.name for folder in _subfolders(part)]
    if not names and list_images(part, recursive=False):
        raise SourceError(
            f"The images in {part} are in no class folder: sort them into one folder per class, "
            f"or give unlabeled:{part} where no labels are needed."
        )
    return check_classes(names, part)


def _empty(folder: Path) -> str:
    """Also says what is there: it is mostly a format that we do not read."""
    endings = Counter(path.suffix.lower() for path in folder.rglob("*") if path.is_file())
    other = ", ".join(f"{count} {ending or 'other'}" for ending, count in endings.most_common(3))
    return (
        f"The folder {folder} has no images{f' but {other} files' if other else ''}: add "
        f"some ({', '.join(sorted(EXTENSIONS))}) or remove the folder."
    )

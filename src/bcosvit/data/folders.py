"""A folder of pictures, one sub-folder a class, with or without train/ and val/ above them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from bcosvit.data.images import EXTENSIONS, list_images, read
from bcosvit.data.partition import TRAIN, VAL, Draw, Opened, check_classes, few
from bcosvit.data.splits import SourceError

__all__ = ["FolderStore", "open_folder"]


class FolderStore:
    """Picture files by their paths below one folder; the path is the key."""

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
        return read(self._root / self._paths[index], at_least=at_least)


def open_folder(root: Path, draw: Draw) -> Opened:
    """Find the classes and pictures; see `data.sources` for the layouts."""
    if not root.is_dir():
        kind = "a file, neither a folder nor a tar shard" if root.exists() else "missing"
        raise SourceError(f"The data folder {root} is {kind}: give a folder of class folders.")
    parts = _parts(root)
    classes: tuple[str, ...] = ()
    paths: list[str] = []
    labels: list[int] = []
    ends: list[int] = []
    for part in parts:
        names = _class_names(part)
        if ends and names != classes:
            odd = sorted(set(names) ^ set(classes))
            raise SourceError(
                f"The classes of {parts[0]} and {part} differ ({few(odd)}): both need the same "
                "class folders."
            )
        classes = names
        for label, name in enumerate(classes):
            found = [path.relative_to(root).as_posix() for path in list_images(part / name)]
            if not found:
                raise SourceError(_empty(part / name))
            paths += found
            labels += [label] * len(found)
        ends.append(len(paths))
    store = FolderStore(root, paths, labels)
    if len(parts) == 1:
        return (classes, *draw(store, np.arange(len(store))))
    return classes, (store, np.arange(ends[0])), (store, np.arange(ends[0], ends[1]))


def _parts(root: Path) -> list[Path]:
    """The folders that hold class folders: the root, train/, or train/ and val/."""
    folders = {folder.name.lower(): folder for folder in _subfolders(root)}
    train = next((folders[name] for name in TRAIN if name in folders), None)
    val = next((folders[name] for name in VAL if name in folders), None)
    if train is not None:
        return [train] if val is None else [train, val]
    if val is not None and folders.keys() <= set(VAL):
        raise SourceError(f"The data folder {root} has {val.name}/ but no train/: add it.")
    return [root]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith((".", "__")))


def _class_names(part: Path) -> tuple[str, ...]:
    names = [folder.name for folder in _subfolders(part)]
    if not names and list_images(part, recursive=False):
        raise SourceError(
            f"The pictures in {part} lie in no class folder: sort them into one folder a class."
        )
    return check_classes(names, part)


def _empty(folder: Path) -> str:
    """Say also what does lie there: mostly it is a format that we do not read."""
    endings = Counter(path.suffix.lower() for path in folder.rglob("*") if path.is_file())
    other = ", ".join(f"{count} {ending or 'other'}" for ending, count in endings.most_common(3))
    return (
        f"The class folder {folder} has no pictures{f' but {other} files' if other else ''}: add "
        f"some ({', '.join(sorted(EXTENSIONS))}) or remove the folder."
    )

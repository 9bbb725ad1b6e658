"""Hugging Face datasets as a random-access store.

The library downloads, caches and memory-maps; what it does not do here is decode. The image column
is read as stored bytes or paths, so that the project's one reader sees every picture, with its
limits and its errors. Columns are found by their features, not by their names: one `Image` and one
`ClassLabel`; where there are several, ``?image=...&label=...`` chooses. The order of the classes is
the data set's own, because that is what its label numbers mean to everyone else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bcosvit.data.images import ImageError, read
from bcosvit.data.partition import TRAIN, VAL, Draw, Opened, check_classes, check_coverage
from bcosvit.data.splits import SourceError

__all__ = ["HubStore", "open_hub"]


class HubStore:
    """One split of a Hugging Face dataset."""

    drawn = False

    def __init__(self, dataset: Any, *, name: str, image: str, label: str) -> None:
        library = _library()
        numbers = (-1 if number is None else number for number in dataset[label])
        self._labels = np.fromiter(numbers, np.int64, len(dataset))
        names = dataset.features[label].names
        if len(self._labels) and not 0 <= self._labels.min() <= self._labels.max() < len(names):
            raise SourceError(
                f"The split {name} has pictures without a label: choose a labeled split or drop "
                "those rows."
            )
        self._rows = dataset.select_columns([image]).cast_column(image, library.Image(decode=False))
        self._column = image
        self._name = name

    def __len__(self) -> int:
        return len(self._labels)

    def key(self, index: int) -> str:
        return f"{self._name}/{index}"

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def image(self, index: int, at_least: int | None) -> Image.Image:
        cell = self._rows[index][self._column]
        if cell is None or (cell["bytes"] is None and cell["path"] is None):
            raise ImageError(f"The picture {self.key(index)} is missing: fill or drop the row.")
        source = cell["path"] if cell["bytes"] is None else cell["bytes"]
        return read(source, at_least=at_least, name=self.key(index))


def open_hub(address: str, options: Mapping[str, str], draw: Draw) -> Opened:
    """Open ``NAME_OR_PATH[:CONFIG]``; see `data.sources`."""
    loaded = _load(address)
    splits: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    train = next((name for name in TRAIN if name in splits), None)
    val = next((name for name in VAL if name in splits), None)
    if train is None:
        raise SourceError(
            f"The Hugging Face dataset {address} has no train split but {', '.join(splits)}: "
            "rename one of them."
        )
    features = splits[train].features
    image = _column(features, "Image", options.get("image"), address)
    label = _column(features, "ClassLabel", options.get("label"), address)
    classes = check_classes(features[label].names, address)
    parts = []
    for name in (train,) if val is None else (train, val):
        if any(splits[name].features.get(column) != features[column] for column in (image, label)):
            raise SourceError(
                f"The splits {train} and {name} of {address} differ in the columns {image} and "
                f"{label}: give them the same features."
            )
        store = HubStore(splits[name], name=name, image=image, label=label)
        parts.append((store, np.arange(len(store))))
        check_coverage(classes, parts[-1], f"the split {name} of {address}")
    return (classes, *draw(*parts[0])) if val is None else (classes, parts[0], parts[1])


def _load(address: str) -> Any:
    library = _library()
    path, config = (address, None) if Path(address).exists() else _name_and_config(address)
    try:
        folder = Path(path)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return library.load_from_disk(path)
        if folder.is_file() and folder.suffix == ".parquet":
            return library.load_dataset("parquet", data_files=path)
        return library.load_dataset(path, config)
    # Anything between a missing network and a malformed file, from several libraries.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise SourceError(
            f"The Hugging Face dataset {address} cannot be loaded ({reason}): check the name, the "
            "configuration and the network."
        ) from error


def _name_and_config(address: str) -> tuple[str, str | None]:
    name, _, config = address.partition(":")
    return name, config or None


def _column(features: Mapping[str, Any], kind: str, wanted: str | None, address: str) -> str:
    fitting = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if wanted is not None and wanted in fitting:
        return wanted
    if wanted is None and len(fitting) == 1:
        return fitting[0]
    option = "image" if kind == "Image" else "label"
    columns = ", ".join(f"{name}: {type(feature).__name__}" for name, feature in features.items())
    raise SourceError(
        f"The Hugging Face dataset {address} has {len(fitting)} columns of type {kind}"
        f"{'' if wanted is None else f', none of them named {wanted}'} ({columns}): one is needed, "
        f"cast one to {kind} or choose with ?{option}=NAME."
    )


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise SourceError(
            "Hugging Face datasets need the package datasets: install bcosvit[train]."
        ) from error

"""Hugging Face datasets.

The library downloads, caches and memory-maps; it does not decode here. The image column is read as
stored bytes or paths, so that `read_image` sees every image, with its limits and errors. Columns
are found by their features, not by their names: one ``Image`` and one ``ClassLabel``; where there
are several, ``?image=...&label=...`` chooses. The order of the classes is the data set's own,
because that is what its label numbers mean to everyone else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.images import ImageError, read_image
from bcosvit.data.sources import (
    Source,
    SourceOptions,
    build_source,
    parse_query,
    register_source,
    split_names,
)
from bcosvit.messages import require

__all__ = ["HubReader", "open_hub"]


class HubReader:
    """The images of one split of a Hugging Face dataset."""

    drawn = False

    def __init__(self, dataset: Any, *, name: str, image: str, label: str) -> None:
        numbers = (-1 if number is None else number for number in dataset[label])
        self._labels = np.fromiter(numbers, np.int64, len(dataset))
        names = dataset.features[label].names
        if len(self._labels) and not 0 <= self._labels.min() <= self._labels.max() < len(names):
            raise SourceError(
                f"The split {name} has images without a label: choose a labeled split or drop "
                "those rows."
            )
        undecoded = _library().Image(decode=False)
        self._rows = dataset.select_columns([image]).cast_column(image, undecoded)
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
            raise ImageError(f"The image {self.key(index)} is missing: fill or drop the row.")
        source = cell["path"] if cell["bytes"] is None else cell["bytes"]
        return read_image(source, at_least=at_least, name=self.key(index))


@register_source("hf", syntax="hf:NAME_OR_PATH[:CONFIG][?image=COLUMN&label=COLUMN]")
def open_hub(data: str, options: SourceOptions) -> Source:
    """Opens a Hugging Face dataset by its name, or by the path where it was saved."""
    address, query = parse_query(data.removeprefix("hf:"), "image", "label")
    loaded = _load(address)
    splits: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    train, val = split_names(splits)
    if train is None:
        raise SourceError(
            f"The Hugging Face dataset {address} has no train split but {', '.join(splits)}: "
            "rename one of them."
        )
    features = splits[train].features
    image = _column(features, "Image", query.get("image"), address)
    label = _column(features, "ClassLabel", query.get("label"), address)

    def split(name: str) -> Split:
        if any(splits[name].features.get(column) != features[column] for column in (image, label)):
            raise SourceError(
                f"The splits {train} and {name} of {address} differ in the columns {image} and "
                f"{label}: give them the same features."
            )
        return Split(HubReader(splits[name], name=name, image=image, label=label))

    held_out = None if val is None else split(val)
    return build_source(data, features[label].names, split(train), held_out, options)


def _load(address: str) -> Any:
    library = _library()
    path, config = address, None
    if not Path(address).exists():
        path, _, config = address.partition(":")
    folder = Path(path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return library.load_from_disk(path)
        if folder.is_file() and folder.suffix == ".parquet":
            return library.load_dataset("parquet", data_files=path)
        return library.load_dataset(path, config or None)
    # Anything between a missing network and a malformed file, from several libraries.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise SourceError(
            f"The Hugging Face dataset {address} cannot be loaded ({reason}): check the name, the "
            "configuration and the network."
        ) from error


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
    return require("datasets", extra="train", purpose="A Hugging Face dataset")

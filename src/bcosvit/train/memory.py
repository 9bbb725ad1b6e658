"""Pictures that are drawn, not read, are drawn once: drawing costs more than training on them."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Reader, Split

LIMIT = 2**30
"""Bytes; larger sets are drawn again whenever they are looked at."""


class Kept:
    """A reader's pictures, in memory."""

    drawn = True

    def __init__(self, reader: Reader, pictures: NDArray[np.uint8]) -> None:
        self.reader, self.pictures = reader, pictures

    def __len__(self) -> int:
        return len(self.reader)

    def key(self, index: int) -> str:
        return self.reader.key(index)

    def label(self, index: int) -> int:
        return self.reader.label(index)

    def image(self, index: int, at_least: int | None) -> Image.Image:
        return Image.fromarray(self.pictures[index])


def keep_drawn(split: Split) -> Split:
    """The same split; where its pictures are drawn, and not too many, they are kept in memory."""
    if not split.reader.drawn:
        return split
    first = np.asarray(split.reader.image(0, None))
    if first.nbytes * len(split.reader) > LIMIT:
        return split
    # Drawing is pure Python: a process per core, where there is enough to do for one.
    workers = min(os.cpu_count() or 1, len(split.reader) // 256)
    raw = _Raw(split.reader)
    loader = DataLoader(raw, batch_size=None, num_workers=workers, collate_fn=_as_it_is)
    kept = Kept(split.reader, np.stack(list(loader)))
    return Split(kept, split.indices, transform=split.transform, max_skipped=split.max_skipped)


class _Raw(Dataset[NDArray[np.uint8]]):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.asarray(self.reader.image(index, None))


def _as_it_is(picture: Any) -> Any:
    return picture

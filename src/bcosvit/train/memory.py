"""Pictures that are drawn, not read, are drawn once: drawing costs more than training on them."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.splits import Split
from bcosvit.data.splits import Store as PictureStore

LIMIT = 2**30
"""Bytes; larger sets are drawn again whenever they are looked at."""


class Kept:
    """A store's pictures, in memory."""

    drawn = True

    def __init__(self, store: PictureStore, pictures: NDArray[np.uint8]) -> None:
        self.store, self.pictures = store, pictures

    def __len__(self) -> int:
        return len(self.store)

    def key(self, index: int) -> str:
        return self.store.key(index)

    def label(self, index: int) -> int:
        return self.store.label(index)

    def image(self, index: int, at_least: int | None) -> Image.Image:
        return Image.fromarray(self.pictures[index])


def keep_drawn(split: Split) -> Split:
    """The same split; where its pictures are drawn, and not too many, they are kept in memory."""
    if not split.store.drawn:
        return split
    first = np.asarray(split.store.image(0, None))
    if first.nbytes * len(split.store) > LIMIT:
        return split
    # Drawing is pure Python: a process per core, where there is enough to do for one.
    workers = min(os.cpu_count() or 1, len(split.store) // 256)
    raw = _Raw(split.store)
    loader = DataLoader(raw, batch_size=None, num_workers=workers, collate_fn=_as_it_is)
    kept = Kept(split.store, np.stack(list(loader)))
    return Split(kept, split.indices, transform=split.transform, max_skipped=split.max_skipped)


class _Raw(Dataset[NDArray[np.uint8]]):
    def __init__(self, store: PictureStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.asarray(self.store.image(index, None))


def _as_it_is(picture: Any) -> Any:
    return picture

"""The folder in which a feature cache lives, and how nothing in it is ever half there.

Three files, and an empty fourth to lock:

* ``cache.features``: records of one size, so that any view is found by arithmetic and read through
  a memory map. A record holds a label, a scale, and features in half precision: float16 times a
  power of two per record, which puts the record's largest value between 2¹⁴ and 2¹⁵. So nothing
  overflows, all 11 bits are kept for 29 binary orders below the largest value, and 10 more fade
  out, whether features are of order 10⁻⁹ or 10⁹ (a v1 backbone has no norm layers to hold them).
  bfloat16 would need no scale, but has 8 bits.
* ``cache.done``: a byte per record, written once the record itself is safely on disk. What is not
  marked was never finished.
* ``cache.json``: the layout, and digests of what the features were made of.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcosvit.files import atomic

FORMAT = 1
FEATURES, DONE, META, LOCK = "cache.features", "cache.done", "cache.json", "cache.lock"
META_BYTES = 4096
"""Room for ``cache.json``, which holds digests and so does not grow with the data."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What fixes the size of every file; record ``index·views + view`` holds that view."""

    images: int
    views: int
    shape: tuple[int, int, int]
    """Of one view's features."""

    @property
    def records(self) -> int:
        return self.images * self.views

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a record, the same bytes on every machine."""
        return np.dtype([("label", "<i8"), ("scale", "<f4"), ("features", "<f2", self.shape)])

    @property
    def record_bytes(self) -> int:
        """Of a record and its mark."""
        return self.dtype.itemsize + 1

    @property
    def bytes(self) -> int:
        return META_BYTES + self.records * self.record_bytes


class Store:
    """An existing folder of records, finished or not; opens its files when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / META).is_file():
            raise ValueError(f"There is no feature cache in {folder}; make one with .build.")
        try:
            meta = json.loads((folder / META).read_text())
            if meta["format"] != FORMAT:
                raise ValueError(f"it is of format {meta['format']}, not {FORMAT}")
            shape = tuple(meta["shape"])
            self.layout = Layout(images=meta["images"], views=meta["views"], shape=shape)
            self.made_of: dict[str, str] = meta["made_of"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / META} cannot be read ({error}); delete {folder} to build it anew."
            ) from error
        self._map: np.memmap[Any, Any] | None = None

    @classmethod
    def at(cls, folder: Path, layout: Layout, made_of: Mapping[str, str]) -> "Store":
        """The store in ``folder``, created where there is none, refused where it is another's."""
        if not (folder / META).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            # The description comes last: without it, whatever lies here counts for nothing.
            (folder / FEATURES).write_bytes(b"")
            (folder / DONE).write_bytes(bytes(layout.records))
            with atomic(folder / META) as temporary:
                temporary.write_text(json.dumps(_meta(layout, made_of), indent=1))
        store = cls(folder)
        old = {**_meta(store.layout, {}), **store.made_of}
        new = {**_meta(layout, {}), **made_of}
        differs = [name for name in new if old.get(name) != new[name]]
        if differs:
            raise ValueError(
                f"The feature cache in {folder} was made of something else (it differs in "
                f"{', '.join(differs)}); delete it, or give another folder."
            )
        return store

    def done(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """1 for each finished record."""
        done = np.fromfile(self.folder / DONE, np.uint8)
        finished = int(np.flatnonzero(done)[-1]) + 1 if done.any() else 0
        features = self.folder / FEATURES
        held = features.stat().st_size if features.is_file() else 0
        if len(done) != self.layout.records or held < finished * self.layout.dtype.itemsize:
            raise ValueError(
                f"The feature cache in {self.folder} is damaged: its files are shorter than what "
                f"they are said to hold; delete it and build it anew."
            )
        return done

    def read(self, index: int, view: int) -> tuple[Tensor, int]:
        """A view's features in float32, and its label."""
        record = self._records()[index * self.layout.views + view]
        features = torch.from_numpy(np.array(record["features"])).float()
        return features.mul_(float(record["scale"])), int(record["label"])

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """A range of records as they are: features in float16, their scales, and labels."""
        rows = self._records()[start:stop]
        features, scales, labels = (
            torch.from_numpy(np.array(rows[name])) for name in ("features", "scale", "label")
        )
        return features, scales, labels

    def write(self, records: Sequence[int], labels: Sequence[int], features: Tensor) -> None:
        """Keeps features [n, *shape] and marks them as done once the disk has them."""
        rows = np.empty(len(records), self.layout.dtype)
        rows["label"] = labels
        peaks = features.flatten(1).abs().amax(1).cpu().numpy()
        if not np.isfinite(peaks).all():
            index, view = divmod(records[int(np.isfinite(peaks).argmin())], self.layout.views)
            raise ValueError(
                f"The backbone's features of image {index}, view {view} are not finite; "
                f"check its weights."
            )
        # Below 2⁻¹⁰⁰ the scale itself would leave float32; such features are as good as zero.
        rows["scale"] = np.ldexp(np.float32(1), np.maximum(np.frexp(peaks)[1], -100) - 15)
        scale = torch.from_numpy(rows["scale"].copy()).to(features.device).view(-1, 1, 1, 1)
        rows["features"] = (features / scale).half().cpu().numpy()
        _put(self.folder / FEATURES, rows, records)
        _put(self.folder / DONE, np.ones(len(records), np.uint8), records)

    def _records(self) -> np.memmap[Any, Any]:
        if self._map is None:
            shape = (self.layout.records,)
            self._map = np.memmap(self.folder / FEATURES, self.layout.dtype, mode="r", shape=shape)
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would be the whole file.
        return {**self.__dict__, "_map": None}


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Waits until no other process is in this block for the same folder."""
    # Not on Windows, where the import fails and says so.
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        # The system lets go of it when the process ends, however it ends.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_room(folder: Path, layout: Layout, max_bytes: int) -> None:
    """Raises ``ValueError`` where the bound or the disk is too small for the whole cache."""
    if layout.bytes > max_bytes:
        fit = max(0, max_bytes - META_BYTES) // layout.record_bytes
        raise ValueError(
            f"A feature cache of {layout.images} images × {layout.views} views needs "
            f"{layout.bytes} bytes ({size(layout.bytes)}), more than max_bytes = {max_bytes} "
            f"({size(max_bytes)}), into which {fit // layout.images} views of every image or "
            f"{fit // layout.views} images fit; set fewer views, or a larger max_bytes."
        )
    held = sum(path.stat().st_size for name in (FEATURES, DONE) if (path := folder / name).exists())
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if layout.bytes - held > free:
        raise ValueError(
            f"The feature cache needs {size(layout.bytes - held)} more in {folder}, where the "
            f"disk has {size(free)} left; make room, set fewer views, or give another folder."
        )


def _meta(layout: Layout, made_of: Mapping[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "images": layout.images,
        "views": layout.views,
        "shape": list(layout.shape),
        "made_of": dict(made_of),
    }


def _put(path: Path, rows: np.ndarray[Any, Any], records: Sequence[int]) -> None:
    """Writes rows at their records and waits until the disk has them."""
    raw = rows.view(np.uint8).reshape(len(rows), rows.itemsize)
    # Unbuffered: a buffer that could not be written would be tried once more on closing.
    with path.open("r+b", buffering=0) as file:
        try:
            for row, record in zip(raw, records, strict=True):
                file.seek(record * rows.itemsize)
                left = row.data
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            message = "the disk is full; what is finished stays, so make room and run it again"
            raise OSError(errno.ENOSPC, message, str(path)) from error


def size(number: int) -> str:
    """Bytes for a reader: '1.5 GiB'."""
    power = min(4, int(math.log(max(number, 1), 1024)))
    return f"{number / 1024**power:.1f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

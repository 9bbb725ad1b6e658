"""The files of a feature cache: records of one size, and which of them are complete.

A cache is a folder with three files, and a fourth to lock:

* ``cache.features``: records of one size, so that any view is found by arithmetic and read through
  a memory map. A record holds a label, a scale, and features in float16, multiplied by a power of
  two that puts the largest value of the record between 2¹⁴ and 2¹⁵. So nothing overflows, all 11
  bits are kept for 29 binary orders of magnitude below the largest value, and 10 more fade out,
  whether features are of order 10⁻⁹ or 10⁹ (a v1 backbone has no normalization layers). bfloat16
  would need no scale, but has 8 bits.
* ``cache.done``: one byte per record, written when the record itself is on disk. A record without
  this mark was never finished.
* ``cache.json``: the layout, and digests of everything that the features depend on.

The files are written by hand, since no format that we know of appends fixed-size records that are
known to be complete after a crash and are read through a memory map.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcosvit.files import atomic
from bcosvit.train.devices import readable_bytes

FORMAT = 1
FEATURES, DONE, META, LOCK = "cache.features", "cache.done", "cache.json", "cache.lock"
META_BYTES = 4096
"""Reserved for ``cache.json``, which does not grow with the data."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What determines the size of all files; record ``index·views + view`` holds that view."""

    images: int
    views: int
    shape: tuple[int, ...]
    """Shape of the features of one view."""

    @property
    def records(self) -> int:
        return self.images * self.views

    @property
    def dtype(self) -> np.dtype[Any]:
        """A record, with the same bytes on every machine."""
        return np.dtype([("label", "<i8"), ("scale", "<f4"), ("features", "<f2", self.shape)])

    @property
    def record_bytes(self) -> int:
        """Bytes of a record and its mark."""
        return self.dtype.itemsize + 1

    @property
    def bytes(self) -> int:
        return META_BYTES + self.records * self.record_bytes


class CacheFolder:
    """An existing folder of records, complete or not; opens its files when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / META).is_file():
            raise ValueError(f"There is no feature cache in {folder}; build one with .build.")
        try:
            meta = json.loads((folder / META).read_text())
            if meta["format"] != FORMAT:
                raise ValueError(f"it has format {meta['format']}, not {FORMAT}")
            shape = tuple(meta["shape"])
            self.layout = Layout(images=meta["images"], views=meta["views"], shape=shape)
            self.made_of: dict[str, str] = meta["made_of"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / META} cannot be read ({error}); delete {folder} to build it again."
            ) from error
        self._map: np.memmap[Any, Any] | None = None

    @classmethod
    def create(cls, folder: Path, layout: Layout, made_of: Mapping[str, str]) -> "CacheFolder":
        """Opens the folder, creating it where there is none.

        Raises:
            ValueError: The folder holds a cache of something else.
        """
        if not (folder / META).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            # The description is written last: without it, the other files do not count.
            (folder / FEATURES).write_bytes(b"")
            (folder / DONE).write_bytes(bytes(layout.records))
            with atomic(folder / META) as temporary:
                temporary.write_text(json.dumps(_meta(layout, made_of), indent=1))
        found = cls(folder)
        old = {**_meta(found.layout, {}), **found.made_of}
        new = {**_meta(layout, {}), **made_of}
        differs = [name for name in new if old.get(name) != new[name]]
        if differs:
            raise ValueError(
                f"The feature cache in {folder} was built from something else (it differs in "
                f"{', '.join(differs)}); delete it, or give another folder."
            )
        return found

    def done(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns 1 for each finished record, and 0 for the others."""
        done = np.fromfile(self.folder / DONE, np.uint8)
        finished = int(np.flatnonzero(done)[-1]) + 1 if done.any() else 0
        features = self.folder / FEATURES
        size = features.stat().st_size if features.is_file() else 0
        if len(done) != self.layout.records or size < finished * self.layout.dtype.itemsize:
            raise ValueError(
                f"The feature cache in {self.folder} is damaged: its files are shorter than they "
                f"should be; delete it and build it again."
            )
        return done

    def read(self, index: int, view: int) -> tuple[Tensor, int]:
        """Returns the features of a view in float32, and its label."""
        record = self._records()[index * self.layout.views + view]
        features = torch.from_numpy(np.array(record["features"])).float()
        return features.mul_(float(record["scale"])), int(record["label"])

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a range of records as stored: features in float16, their scales, and labels."""
        rows = self._records()[start:stop]
        features, scales, labels = (
            torch.from_numpy(np.array(rows[name])) for name in ("features", "scale", "label")
        )
        return features, scales, labels

    def write(self, records: Sequence[int], labels: Sequence[int], features: Tensor) -> None:
        """Stores features [n, *shape], and marks them as done when they are on disk."""
        rows = np.empty(len(records), self.layout.dtype)
        rows["label"] = labels
        peaks = features.flatten(1).abs().amax(1).cpu().numpy()
        if not np.isfinite(peaks).all():
            index, view = divmod(records[int(np.isfinite(peaks).argmin())], self.layout.views)
            raise ValueError(
                f"The backbone's features of image {index}, view {view} are not finite; "
                f"check its weights."
            )
        # Below 2⁻¹⁰⁰ the scale itself would leave float32; such features count as zero.
        rows["scale"] = np.ldexp(np.float32(1), np.maximum(np.frexp(peaks)[1], -100) - 15)
        scale = torch.from_numpy(rows["scale"].copy()).to(features.device)
        scale = scale.view(-1, *[1] * len(self.layout.shape))
        rows["features"] = (features / scale).half().cpu().numpy()
        _write_rows(self.folder / FEATURES, rows, records)
        _write_rows(self.folder / DONE, np.ones(len(records), np.uint8), records)

    def _records(self) -> np.memmap[Any, Any]:
        if self._map is None:
            shape = (self.layout.records,)
            self._map = np.memmap(self.folder / FEATURES, self.layout.dtype, mode="r", shape=shape)
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would contain the whole file.
        return {**self.__dict__, "_map": None}


def check_space(folder: Path, layout: Layout, max_bytes: int) -> None:
    """Raises ``ValueError`` where the whole cache exceeds ``max_bytes`` or the free disk space."""
    if layout.bytes > max_bytes:
        fit = max(0, max_bytes - META_BYTES) // layout.record_bytes
        raise ValueError(
            f"A feature cache of {layout.images} images × {layout.views} views needs "
            f"{layout.bytes} bytes ({readable_bytes(layout.bytes)}), more than max_bytes = "
            f"{max_bytes} ({readable_bytes(max_bytes)}), which is enough for "
            f"{fit // layout.images} views of every image or {fit // layout.views} images; set "
            f"fewer views, or a larger max_bytes."
        )
    used = sum(path.stat().st_size for name in (FEATURES, DONE) if (path := folder / name).exists())
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if layout.bytes - used > free:
        raise ValueError(
            f"The feature cache needs {readable_bytes(layout.bytes - used)} more in {folder}, but "
            f"the disk has {readable_bytes(free)} left; make room, set fewer views, or give "
            f"another folder."
        )


def _meta(layout: Layout, made_of: Mapping[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "images": layout.images,
        "views": layout.views,
        "shape": list(layout.shape),
        "made_of": dict(made_of),
    }


def _write_rows(path: Path, rows: np.ndarray[Any, Any], records: Sequence[int]) -> None:
    """Writes rows at the places of their records, and waits until they are on disk."""
    raw = rows.view(np.uint8).reshape(len(rows), rows.itemsize)
    # Unbuffered, since a buffer that could not be written would be tried once more on closing.
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
            message = "the disk is full; finished features are safe, so make room and run it again"
            raise OSError(errno.ENOSPC, message, str(path)) from error

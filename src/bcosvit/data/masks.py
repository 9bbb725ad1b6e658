"""Masks of the objects in pictures, from files: images, arrays, COCO, Pascal VOC.

A picture and its mask are matched by name: ``masks/tench/n01.png`` is the mask of the picture
``tench/n01.jpg``, and of ``val/tench/n01.jpg`` as well. A mask has the size of its picture, or at
least its proportions, and passes through the same transform, so that it is cut like the picture.

Masks may come from anywhere, so that the sizes that a file states are checked before anything is
allocated.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bcosvit.data.annotations import Coco, Mask, draw_coco, draw_voc, regular
from bcosvit.data.dataset import SourceError
from bcosvit.data.images import read_labels

__all__ = ["MaskFiles"]

VOID = 255
"""What Pascal VOC and others write where it is uncertain what a pixel belongs to."""

_SUFFIXES = (".png", ".npz", ".npy", ".xml", ".gif", ".bmp", ".tif", ".tiff")

BYTES = 300_000_000
"""Of an array."""
ARCHIVE_BYTES = 1_000_000
"""Of the list of what an archive of arrays holds."""


class MaskFiles:
    """Masks by the names of pictures.

    Args:
        path: A folder of label images (PNG and other formats without loss), of arrays
            (``.npz``, ``.npy``) or of Pascal VOC's XML files with boxes, in the same sub-folders as
            the pictures or in none; or a JSON file with COCO's annotations, whose polygons, run
            lengths or boxes are used.
        values: The values that mark the object in label images and arrays, e.g. ``(1, 3)`` for
            trimaps whose 3 is the object's outline. By default all but 0, and but 255 where other
            values occur besides it.

    Raises:
        SourceError: If there are no masks.

    Examples:
        >>> import os, tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("L", (8, 8), 1).save(os.path.join(folder, "cat.png"))
        ...     MaskFiles(folder).mask("animals/cat.jpg").all()
        np.True_
    """

    def __init__(self, path: str | Path, values: Sequence[int] | None = None) -> None:
        self.path, self.values = Path(path), None if values is None else tuple(values)
        self._coco: Coco | None = None
        self._files: dict[str, str] = {}
        if self.path.is_file() and self.path.suffix.lower() == ".json":
            self._coco = Coco(self.path)
            names = self._coco.names
        elif self.path.is_dir():
            found = sorted(p for p in self.path.rglob("*") if p.suffix.lower() in _SUFFIXES)
            for file in found:
                relative = file.relative_to(self.path)
                name = relative.with_suffix("").as_posix().removesuffix("_mask")
                # An image of labels says more than boxes of the same name.
                self._files.setdefault(name, relative.as_posix())
            names = list(self._files)
        else:
            raise SourceError(
                f"The masks {path} are neither a folder nor a JSON file: give one of them."
            )
        if not names:
            raise SourceError(
                f"The masks {path} are empty: put a mask there for each picture, of the same name "
                f"({', '.join(_SUFFIXES[:4])})."
            )
        self._names = {name: name for name in names}
        # A bare name stands for a file in a sub-folder, unless several have it.
        bare: dict[str, list[str]] = {}
        for name in names:
            bare.setdefault(PurePosixPath(name).name, []).append(name)
        for short, several in bare.items():
            if len(several) == 1:
                self._names.setdefault(short, several[0])

    def find(self, key: str) -> str | None:
        """Returns the name of a picture's mask, or None if there is none."""
        parts = PurePosixPath(key).with_suffix("").parts
        candidates = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((self._names[name] for name in candidates if name in self._names), None)

    def match(self, keys: Iterable[str]) -> dict[str, str]:
        """Finds the masks of all pictures of a data set, which no two of them share.

        Where masks lie in the folders of their pictures, ``cat/1.png`` is not taken for the mask of
        ``dog/1.jpg``, whether or not this picture has one.

        Args:
            keys: The names of the pictures.

        Returns:
            The name of the mask of each picture that has one.

        Raises:
            SourceError: If a mask fits several pictures.
        """
        found = {key: name for key in keys if (name := self.find(key)) is not None}
        placed = {key for key, name in found.items() if _folder(key) == _folder(name) != ""}
        pictures: dict[str, str] = {}
        for key, name in [*found.items()]:
            if placed and key not in placed and "/" in name:
                del found[key]
            elif (other := pictures.setdefault(name, key)) != key:
                raise SourceError(
                    f"The mask {name} in {self.path} fits both {other} and {key}: put masks into "
                    "the same sub-folders as the pictures."
                )
        return found

    def mask(self, key: str, class_name: str | None = None) -> Mask | None:
        """Reads a mask.

        Args:
            key: The picture's name, a path below the data.
            class_name: Objects of this class alone are taken from annotations with names, where
                there are some.

        Returns:
            The object's pixels [H, W], or None without a mask.

        Raises:
            SourceError: If the file cannot be read.
        """
        name = self.find(key)
        if name is None:
            return None
        of_coco = f"{self.path} of {name}"
        where = of_coco if self._coco is not None else str(self.path / self._files[name])
        try:
            if self._coco is not None:
                return draw_coco(*self._coco.read(name), class_name)
            path = regular(self.path / self._files[name])
            if path.suffix.lower() == ".xml":
                return draw_voc(path, class_name)
            labels = _read_array(path) if _is_array(path) else read_labels(path)
            labels = np.squeeze(labels) if labels.ndim > 2 else labels
            if labels.ndim != 2:
                raise ValueError(f"it has shape {list(labels.shape)}, expected [H, W]")
            if labels.dtype.kind == "f" and np.isnan(labels).any():
                raise ValueError("it holds NaN, which does not say whether a pixel belongs to it")
            return self._selected(labels)
        # On damaged data those who read them raise nearly every kind of exception.
        except Exception as error:
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise SourceError(
                f"The mask {where} cannot be read ({reason}): replace or remove it."
            ) from error

    def _selected(self, labels: NDArray[Any]) -> Mask:
        if labels.dtype == np.bool_:
            return labels
        if self.values is not None:
            return np.isin(labels, self.values)
        chosen = labels != 0
        if (labels[chosen] != VOID).any():
            chosen &= labels != VOID
        return chosen


def _folder(name: str) -> str:
    """The folder that a picture or a mask lies in, without those around it."""
    return PurePosixPath(name).parent.name


def _is_array(path: Path) -> bool:
    return path.suffix.lower() in (".npz", ".npy")


def _read_array(path: Path) -> NDArray[Any]:
    """Reads the array ``mask``, or the first one, of a file of NumPy's."""
    if path.suffix.lower() == ".npy":
        with path.open("rb") as file:
            return _read_npy(file)
    with _Listed(path) as whole, zipfile.ZipFile(whole) as archive:
        whole.listed = True
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        if not names:
            raise ValueError("it holds no array")
        entry = archive.getinfo("mask.npy" if "mask.npy" in names else names[0])
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is compressed in a way that NumPy does not use")
        with archive.open(entry) as file:
            return _read_npy(file)


class _Listed(io.FileIO):
    """An archive whose list of entries is bounded: ``zipfile`` reads it as a whole."""

    listed = False

    def read(self, size: int | None = -1, /) -> bytes:
        if not self.listed and size is not None and size > ARCHIVE_BYTES:
            raise ValueError("it lists more entries than a file with a mask has")
        return super().read(size)


def _read_npy(file: IO[bytes]) -> NDArray[Any]:
    """Reads an array of numbers whose size is known before anything is allocated."""
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(file)
    if version not in headers:
        raise ValueError(f"it is of version {version} of NumPy's format, 1.0 and 2.0 are known")
    shape, in_columns, dtype = headers[version](file)
    if dtype.kind not in "biuf":
        raise ValueError(f"its values are {dtype}, expected numbers or truth values")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size > BYTES:
        raise ValueError(f"it has shape {list(shape)}, and {BYTES / 1e6:.0f} MB are allowed")
    content = file.read(size)
    if len(content) < size:
        raise ValueError(f"it ends after {len(content)} of {size} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if in_columns else "C")

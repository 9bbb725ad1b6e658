"""Masks of the objects in pictures, from files: images, arrays, COCO, Pascal VOC.

A picture and its mask are matched by name: ``masks/tench/n01.png`` is the mask of the picture
``tench/n01.jpg``, and of ``val/tench/n01.jpg`` as well. A mask has the size of its picture, or at
least its proportions, and passes through the same transform, so that it is cut like the picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bcosvit.data.dataset import SourceError

__all__ = ["MaskFiles"]

VOID = 255
"""What Pascal VOC and others write where it is uncertain what a pixel belongs to."""

_SUFFIXES = (".png", ".npz", ".npy", ".xml", ".gif", ".bmp", ".tif", ".tiff")

Mask = NDArray[np.bool_]


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
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Image.new("L", (8, 8), 1).save(os.path.join(folder, "cat.png"))
        ...     MaskFiles(folder).mask("animals/cat.jpg").all()
        np.True_
    """

    def __init__(self, path: str | Path, values: Sequence[int] | None = None) -> None:
        self.path, self.values = Path(path), None if values is None else tuple(values)
        self._coco: dict[str, dict[str, Any]] | None = None
        self._files: dict[str, str] = {}
        if self.path.is_file() and self.path.suffix.lower() == ".json":
            self._coco = _read_coco(self.path)
            names = list(self._coco)
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
        if self._coco is not None:
            return _draw_coco(self._coco[name], class_name)
        path = self.path / self._files[name]
        try:
            if path.suffix.lower() == ".xml":
                return _draw_voc(path, class_name)
            return self._selected(_read_labels(path))
        except (OSError, ValueError, KeyError, SyntaxError, ElementTree.ParseError) as error:
            raise SourceError(
                f"The mask {path} cannot be read ({error}): replace or remove it."
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


def _read_labels(path: Path) -> NDArray[Any]:
    if path.suffix.lower() in (".npz", ".npy"):
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            with loaded as arrays:
                loaded = arrays["mask"] if "mask" in arrays.files else arrays[arrays.files[0]]
        labels = np.squeeze(loaded)
    else:
        with Image.open(path) as image:
            # A palette's numbers are the labels, not its colors.
            single = image.mode in ("1", "L", "P", "I", "I;16")
            labels = np.asarray(image if single else image.convert("L"))
    if labels.ndim != 2:
        raise ValueError(f"it has shape {list(labels.shape)}, expected [H, W]")
    return labels


def _of_class(objects: Sequence[tuple[str, Any]], class_name: str | None) -> list[Any]:
    own = [each for name, each in objects if name.casefold() == (class_name or "").casefold()]
    return own or [each for _, each in objects]


def _draw_voc(path: Path, class_name: str | None) -> Mask | None:
    root = ElementTree.parse(path).getroot()
    width, height = (int(float(root.findtext(f"size/{side}", "0"))) for side in ("width", "height"))
    if width < 1 or height < 1:
        raise ValueError("it does not say the picture's size")
    objects = []
    for each in root.iter("object"):
        box = each.find("bndbox")
        if box is not None:
            edges = [float(box.findtext(n, "nan")) for n in ("xmin", "ymin", "xmax", "ymax")]
            objects.append((each.findtext("name", ""), edges))
    mask = np.zeros((height, width), np.bool_)
    for left, top, right, bottom in _of_class(objects, class_name):
        # Pixels count from 1, both ends included.
        mask[max(0, round(top) - 1) : round(bottom), max(0, round(left) - 1) : round(right)] = True
    return mask if mask.any() else None


def _read_coco(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {each["id"]: str(each["name"]) for each in content.get("categories", ())}
        images: dict[Any, dict[str, Any]] = {}
        for image in content["images"]:
            size = (int(image["height"]), int(image["width"]))
            images[image["id"]] = {"name": image["file_name"], "size": size, "objects": []}
        for each in content["annotations"]:
            if each["image_id"] in images:
                shape = each.get("segmentation") or each["bbox"]
                name = names.get(each.get("category_id"), "")
                images[each["image_id"]]["objects"].append((name, shape))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path} is no file of COCO's annotations ({error!r}): it needs images and annotations."
        ) from error
    return {
        PurePosixPath(each["name"]).with_suffix("").as_posix(): each
        for each in images.values()
        if each["objects"]
    }


def _draw_coco(image: Mapping[str, Any], class_name: str | None) -> Mask | None:
    height, width = image["size"]
    mask = np.zeros((height, width), np.bool_)
    for shape in _of_class(image["objects"], class_name):
        if isinstance(shape, dict):
            counts = shape["counts"]
            runs = _run_lengths(counts) if isinstance(counts, str) else counts
            values = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.bool_)
            # Run lengths go down the columns.
            mask |= values[: height * width].reshape(width, height).T
        elif shape and isinstance(shape[0], list):
            canvas = Image.new("1", (width, height))
            for polygon in shape:
                points = list(zip(polygon[::2], polygon[1::2], strict=True))
                ImageDraw.Draw(canvas).polygon(points, fill=1, outline=1)
            mask |= np.asarray(canvas)
        else:
            left, top, wide, high = shape
            rows = slice(max(0, round(top)), max(0, round(top + high)))
            mask[rows, max(0, round(left)) : max(0, round(left + wide))] = True
    return mask if mask.any() else None


def _run_lengths(text: str) -> list[int]:
    """COCO's compressed run lengths: 5 bits per character, then differences to the one before."""
    runs: list[int] = []
    at = 0
    while at < len(text):
        value, shift, more = 0, 0, True
        while more:
            code = ord(text[at]) - 48
            value |= (code & 0x1F) << shift
            more = bool(code & 0x20)
            at, shift = at + 1, shift + 5
            if not more and code & 0x10:
                value |= -1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    return runs

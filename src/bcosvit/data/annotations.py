"""Annotations of objects in pictures, by COCO and by Pascal VOC, drawn as masks.

They may come from anywhere, so that what a file says is checked before anything is allocated or
drawn: sizes, numbers of values, and how long it takes to draw all objects of a picture.
"""

from __future__ import annotations

import json
import os
import re
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bcosvit.data.dataset import SourceError

PIXELS = 100_000_000
"""What a mask may have, as pictures may."""
XML_BYTES = 5_000_000
"""Of a file with boxes."""
COCO_BYTES = 2_000_000_000
"""Of a file with COCO's annotations; LVIS's are half as large."""
ENTRY_BYTES = 8_000_000
"""Of one entry of such a file, and of all annotations of a picture."""
PICTURES, ENTRIES, NAME_BYTES = 1_000_000, 10_000_000, 200_000_000
"""What such a file may have: pictures, entries in all, and characters in all names of pictures."""
WORK = 2_000_000_000
"""Pixels that are looked at to draw all objects of a picture, which takes seconds."""

Mask = NDArray[np.bool_]


def regular(path: Path) -> Path:
    """The path, if opening it does not wait for ever, as for a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a regular file")
    return path


def _of_class(objects: Sequence[tuple[str, Any]], class_name: str | None) -> list[Any]:
    own = [each for name, each in objects if name.casefold() == (class_name or "").casefold()]
    return own or [each for _, each in objects]


def _canvas(height: int, width: int) -> Mask:
    """An empty mask."""
    if height < 1 or width < 1:
        raise ValueError("it does not say the picture's size")
    if height * width > PIXELS:
        raise ValueError(f"it has {width} × {height} pixels, and {PIXELS:,} are allowed")
    return np.zeros((height, width), np.bool_)


def _numbers(values: Any) -> list[float]:
    """Coordinates, which are finite, and not so large that drawing them overflows."""
    found = [float(value) for value in values]
    if not all(abs(value) <= 1e9 for value in found):
        raise ValueError("it has coordinates beyond 1e9")
    return found


def _check_work(work: float) -> None:
    if work > WORK:
        raise ValueError("it has so many objects that drawing them would take too long")


class _NoEntities(ElementTree.TreeBuilder):
    """A document type is where entities are defined, which grow without bounds where used."""

    def doctype(self, *_: str | None) -> None:
        raise ValueError("it has a document type, which files with boxes do not need")


def draw_voc(path: Path, class_name: str | None) -> Mask | None:
    """Draws the boxes of an XML file, only those of the class if it has some; None without any."""
    if path.stat().st_size > XML_BYTES:
        raise ValueError(f"it is larger than {XML_BYTES // 1_000_000} MB")
    root = ElementTree.parse(path, ElementTree.XMLParser(target=_NoEntities())).getroot()
    sides = _numbers(root.findtext(f"size/{side}", "0") for side in ("width", "height"))
    width, height = map(int, sides)
    objects = []
    for each in root.iter("object"):
        box = each.find("bndbox")
        if box is not None:
            edges = _numbers(box.findtext(n, "nan") for n in ("xmin", "ymin", "xmax", "ymax"))
            objects.append((each.findtext("name", ""), edges))
    mask, drawn = _canvas(height, width), _of_class(objects, class_name)
    _check_work(len(drawn) * mask.size / 16)
    for left, top, right, bottom in drawn:
        # Pixels count from 1, both ends included.
        rows = slice(max(0, round(top) - 1), max(0, round(bottom)))
        mask[rows, max(0, round(left) - 1) : max(0, round(right))] = True
    return mask if mask.any() else None


class Coco:
    """COCO's annotations, read one at a time; only their positions in the file are kept.

    Raises:
        SourceError: If the file holds something else, or too much.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if regular(path).stat().st_size > COCO_BYTES:
                raise ValueError(f"it is larger than {COCO_BYTES // 10**9} GB")
            self._read()
        # What is not as expected raises nearly every kind of exception.
        except Exception as error:
            reason = str(error) if type(error) is ValueError else repr(error)
            raise SourceError(
                f"{path} is no file of COCO's annotations ({reason}): "
                "it needs images and annotations."
            ) from error

    def _read(self) -> None:
        numbers: dict[int | str, int] = {}
        images: dict[int, tuple[str, tuple[int, int]]] = {}
        self._classes: dict[Any, str] = {}
        # For each annotation: its picture, and where it is in the file.
        pictures, starts, sizes = array("q"), array("q"), array("q")
        room, found = NAME_BYTES, set()

        def number(key: Any) -> int:
            if not isinstance(key, int | str) or len(str(key)) > 1000:
                raise ValueError("it has pictures whose id is neither a number nor a short text")
            return numbers.setdefault(key, len(numbers))

        for count, (member, start, end, entry) in enumerate(_entries(self.path), 1):
            found.add(member)
            if member == "categories":
                self._classes[entry["id"]] = str(entry["name"])
            elif member == "images":
                name = PurePosixPath(entry["file_name"]).with_suffix("").as_posix()
                room -= len(name)
                images[number(entry["id"])] = (name, (int(entry["height"]), int(entry["width"])))
            elif member == "annotations":
                _shape_of(entry)
                pictures.append(number(entry["image_id"]))
                starts.append(start)
                sizes.append(end - start)
            if max(len(numbers), len(self._classes)) > PICTURES or count > ENTRIES or room < 0:
                raise ValueError(
                    f"it has more than {PICTURES:,} pictures or categories, {ENTRIES:,} entries or "
                    f"{NAME_BYTES // 10**6} MB of names; divide it"
                )
        if missing := {"images", "annotations"} - found:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        order = np.argsort(pictures, kind="stable")
        self._where = np.array([starts, sizes])[:, order]
        bounds = np.searchsorted(np.array(pictures)[order], np.arange(len(numbers) + 1))
        self._images = {
            name: (size, bounds[n], bounds[n + 1])
            for n, (name, size) in images.items()
            if bounds[n] < bounds[n + 1]
        }
        self.names = list(self._images)

    def read(self, name: str) -> tuple[tuple[int, int], list[tuple[str, Any]]]:
        """Reads height and width of a picture, and its objects, each with the name of its class."""
        size, first, last = self._images[name]
        if self._where[1, first:last].sum() > ENTRY_BYTES:
            raise ValueError(f"its annotations have more than {ENTRY_BYTES // 10**6} MB")
        objects = []
        with self.path.open("rb") as file:
            for start, length in zip(*self._where[:, first:last], strict=True):
                file.seek(start)
                entry = json.loads(file.read(length))
                objects.append((self._classes.get(entry.get("category_id"), ""), _shape_of(entry)))
        return size, objects


def _shape_of(annotation: Mapping[str, Any]) -> Any:
    return annotation.get("segmentation") or annotation["bbox"]


def _entries(path: Path) -> Iterator[tuple[str, int, int, Any]]:
    """Yields the entries of all lists in a JSON object, one at a time.

    Yields:
        The name of the list, the entry's first byte in the file, the one after its last, and what
        it is.
    """
    with path.open("rb") as file:
        text = _Text(file)
        text.expect("{")
        while not text.follows("}"):
            _, _, member = text.value()
            text.expect(":")
            if not text.follows("["):
                text.value()
            else:
                while not text.follows("]"):
                    yield str(member), *text.value()
                    text.separates("]")
            text.separates("}")
        if not text.follows(""):
            raise ValueError("it goes on after its end")


class _Text:
    """The text of a JSON file, of which a part is in memory.

    Bytes are characters here, as in Latin-1, so that positions are those in the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text, self._at, self._first = file, "", 0, 0

    def _more(self) -> bool:
        """Reads as much again as could not be used so far, up to the size of an entry."""
        self._first, self._text = self._first + self._at, self._text[self._at :]
        self._at = 0
        size = min(max(len(self._text), 1 << 18), ENTRY_BYTES - len(self._text))
        new = self._file.read(size) if size > 0 else b""
        self._text += new.decode("latin-1")
        return bool(new)

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def follows(self, character: str) -> bool:
        """Whether a character is the next one; it is then passed over."""
        found = self._next() == character
        self._at += found
        return found

    def expect(self, character: str) -> None:
        if not self.follows(character):
            raise ValueError(f"it has no {character} at byte {self._first + self._at:,}")

    def separates(self, end: str) -> None:
        """A comma, or the end of a list, which is left for the next call."""
        if self._next() != end:
            self.expect(",")

    def value(self) -> tuple[int, int, Any]:
        """Reads a value; returns its first byte, the one after its last, and what it is."""
        self._next()
        while True:
            with suppress(ValueError):
                value, end = _DECODER.raw_decode(self._text, self._at)
                # A number may go on.
                if end < len(self._text):
                    first, self._at = self._first + self._at, end
                    break
            if not self._more():
                raise ValueError(
                    f"it is damaged at byte {self._first + self._at:,}, or has more than "
                    f"{ENTRY_BYTES // 10**6} MB in one entry there"
                )
        if not self._text.isascii():
            value = json.loads(self._text[first - self._first : end].encode("latin-1"))
        return first, self._first + end, value


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def draw_coco(
    size: tuple[int, int], objects: Sequence[tuple[str, Any]], class_name: str | None
) -> Mask | None:
    """Draws what `Coco.read` returns of a picture, as `draw_voc` does."""
    height, width = size
    mask, work = _canvas(height, width), 0.0
    # Run lengths go down the columns.
    columns = np.zeros(mask.size, np.bool_)
    canvas = Image.new("1", (width, height))
    draw = ImageDraw.Draw(canvas)
    for shape in _of_class(objects, class_name):
        if isinstance(shape, dict):
            ends = np.cumsum(_runs_of(shape, mask.size))
            _check_work(work := work + mask.size / 16 + 100 * len(ends))
            for start, end in zip(ends[::2], ends[1::2], strict=False):
                columns[start:end] = True
        elif isinstance(shape, list) and isinstance(shape[0], list):
            for polygon in shape:
                points = list(zip(*[iter(_numbers(polygon))] * 2, strict=True))
                _check_work(work := work + _polygon_work(points, height))
                draw.polygon(points, fill=1, outline=1)
        else:
            left, top, wide, high = _numbers(shape)
            _check_work(work := work + mask.size / 16)
            rows = slice(max(0, round(top)), max(0, round(top + high)))
            mask[rows, max(0, round(left)) : max(0, round(left + wide))] = True
    mask |= np.asarray(canvas)
    mask |= columns.reshape(width, height).T
    return mask if mask.any() else None


def _polygon_work(points: Sequence[tuple[float, float]], height: int) -> float:
    """Every row looks at all edges, and sorts its crossings with them, which takes much longer."""
    rows = np.clip([y for _, y in points], 0, height)
    crossings = np.abs(rows - np.roll(rows, 1)).sum()
    return height * len(points) + 300 * float(crossings)


def _runs_of(shape: Mapping[str, Any], pixels: int) -> list[int]:
    """Run lengths, of zeros and ones in turn."""
    counts = shape["counts"]
    runs = _run_lengths(counts) if isinstance(counts, str) else [int(each) for each in counts]
    if min(runs, default=-1) < 0 or sum(runs) != pixels:
        raise ValueError(f"its run lengths do not add up to the {pixels:,} pixels of the picture")
    return runs


def _run_lengths(text: str) -> list[int]:
    """COCO's compressed run lengths: 5 bits per character, then differences to the one before."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 30:
            raise ValueError("its run lengths are damaged")
        value |= (code & 0x1F) << shift
        shift += 5
        if code & 0x20:
            continue
        if code & 0x10:
            value |= -1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value, shift = 0, 0
    if shift:
        raise ValueError("its run lengths end early")
    return runs

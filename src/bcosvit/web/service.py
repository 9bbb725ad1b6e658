"""What the server computes for a picture, without Gradio and without users.

One `ExplanationService` serves all users. Its cache is keyed by pixels, classes and method, so
that equal requests get equal answers, and no user can get the answer for another picture.
Explaining leaves the model untouched, so that threads need no lock except around the cache.
"""

import hashlib
import os
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from threading import Lock, Semaphore
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bcosvit.attribution import METHODS
from bcosvit.attribution.passes import check_cancelled, counting_passes
from bcosvit.data.images import read_image
from bcosvit.predictor import Explanation, Predictor, Sums, part_of
from bcosvit.report.explain import TOP, ReportInfo, contact_sheet, html_report, npz_files
from bcosvit.report.images import contribution_scales
from bcosvit.report.provenance import Provenance, versions
from bcosvit.web.batches import Batches

FILES = {"html": html_report, "npz": npz_files, "png": contact_sheet}
"""The kinds of files to download, with what writes them."""

FILE_NAME = "bcosvit"
"""The name of downloaded files, without the ending."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what one user can send, and on what all users together can occupy."""

    megabytes: int = 20
    """Of one uploaded file."""
    pixels: int = 50_000_000
    """Of one picture, read from its header before anything is decoded."""
    pictures: int = 16
    """On one page or in one request."""
    queue: int = 100
    """Requests that may wait; more are refused until there is room."""
    concurrency: int = 2
    """Requests that use the model at the same time."""
    batch: int = 8
    """Pictures of all users that are computed in one pass."""
    seconds: int = 3600
    """After which uploads and downloads are deleted, and cached explanations forgotten."""
    upload_seconds: int = 60
    """In which all of a request must arrive."""
    cached: int = 64
    """Explanations in the cache, of all users together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) < 1:
                raise ValueError(f"{each.name} = {value} is not allowed: give an integer >= 1.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """A picture as the model sees it."""

    name: str
    image: Tensor
    """[3, H, W]"""
    key: str
    """A digest of the pixels."""


_Wanted = tuple[Upload, tuple[int, ...], tuple[str, ...]]
"""A picture, its classes to explain, and the methods; the empty one predicts alone."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle in pixels of the picture as the model sees it, from the upper left corner."""

    x: int
    y: int
    width: int
    height: int

    @classmethod
    def of(cls, edges: Sequence[float | None]) -> "Box | None":
        """Returns a box if x, y, width and height are all given, else None.

        Raises:
            ValueError: If one of them is no integer.
        """
        given = [edge for edge in edges if edge is not None]
        if len(given) < 4:
            return None
        if odd := [edge for edge in given if edge != int(edge)]:
            raise ValueError(f"{odd[0]} is no number of whole pixels: give an integer.")
        x, y, width, height = map(int, given)
        return cls(x=x, y=y, width=width, height=height)


@dataclass(frozen=True, kw_only=True)
class Region:
    """What the pixels of a box contribute to a logit: sums of the map, in float64."""

    positive: float
    negative: float
    together: float
    share: float | None
    """Of the evidence, which is logit − bias; None where that is zero."""
    area: float
    """The share of the picture's pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassMap:
    """The map of one method for one class of a picture."""

    found: Explanation
    method: str
    row: int
    """The position of the class among those explained."""
    scale: float
    """The value that is drawn in full color."""

    @property
    def map(self) -> Tensor:
        """[H, W]"""
        return self.found.attributions[self.method].map[self.row]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExplanationService:
    """Predicts and explains pictures with one model, within limits and with a cache.

    Methods that pass a picture through the model many times run one at a time, beside the others.

    Args:
        predictor: The model.
        limits: What is accepted.
    """

    predictor: Predictor
    limits: Limits = field(default_factory=Limits)
    _cache: OrderedDict[tuple[str, tuple[int, ...], str], tuple[float, Explanation]] = field(
        default_factory=OrderedDict
    )
    """By pixels, classes and method, which is empty for a prediction alone."""
    _lock: Lock = field(default_factory=Lock)
    _opening: Semaphore = field(init=False)
    _slow: Semaphore = field(default_factory=Semaphore)
    _batches: Batches[_Wanted, dict[str, Explanation]] = field(init=False)

    def __post_init__(self) -> None:
        at_once = self.limits.concurrency
        object.__setattr__(self, "_opening", Semaphore(at_once))
        batches = Batches(self._computed_together, at_once, self.limits.batch)
        object.__setattr__(self, "_batches", batches)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that apply to the model."""
        return self.predictor.methods("all")

    @property
    def exact(self) -> str | None:
        """The first method if its contributions sum to the logit, as those of B-cos models do."""
        first = self.methods[0]
        return first if METHODS.get(first).exact else None

    def is_slow(self, method: str) -> bool:
        """Returns whether a method passes a picture through the model many times."""
        return METHODS.get(method).cost == "many"

    def seconds(self, method: str) -> float:
        """Estimates how long a method takes for one class of a picture, where it need not wait.

        Args:
            method: Its name.

        Returns:
            The time of a prediction, which is measured once, times the method's `passes`.
        """
        size = self.predictor.transform.image_size
        return self._prediction_seconds * METHODS.get(method).passes(size, size)

    @cached_property
    def _prediction_seconds(self) -> float:
        size = self.predictor.transform.image_size
        image = torch.full((3, size, size), 0.5)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            self.predictor.explain(image, methods=())
            times.append(time.perf_counter() - start)
        # The first one also prepares what the others find ready.
        return median(times[1:])

    def open(self, source: str | Path | BinaryIO | None) -> Upload:
        """Reads an uploaded file.

        Args:
            source: Its path, or the open file; None where nothing was uploaded.

        Raises:
            ValueError: If it is missing, too large or not a picture.
        """
        if source is None:
            raise ValueError("There is no picture: upload one first.")
        if isinstance(source, str | Path):
            source = Path(source)
            if not source.is_file():
                raise ValueError(f"The upload {source.name} has been deleted: upload it again.")
            name, size = source.name, source.stat().st_size
        else:
            name, size = "picture", source.seek(0, os.SEEK_END)
            source.seek(0)
        if size > self.limits.megabytes * 1_000_000:
            most = self.limits.megabytes
            raise ValueError(f"The file {name} is larger than {most} MB: shrink the picture.")
        transform = self.predictor.transform
        pixels, enough = self.limits.pixels, transform.at_least
        with self._waiting_for(self._opening):
            image = transform(read_image(source, max_pixels=pixels, at_least=enough, name=name))
        key = hashlib.sha256(image.numpy().data).hexdigest()
        return Upload(name=name, image=image, key=key)

    def check_count(self, paths: Sequence[str] | None) -> Sequence[str]:
        """Returns the paths, or raises ``ValueError`` if there are more than the limit."""
        paths = paths or []
        if len(paths) > self.limits.pictures:
            raise ValueError(
                f"{len(paths)} pictures are too many at once: give at most {self.limits.pictures}."
            )
        return paths

    def find_class(self, given: str, upload: Upload) -> int:
        """Finds a class by name or number; an empty text is the most confident class."""
        return self.find_label(given) if given.strip() else self.predict(upload).top(1)[0]

    def find_label(self, given: str) -> int:
        """Finds a class by name or number."""
        # Names may contain commas, which separate classes on the command line.
        names = self.predictor.class_names
        labels = [names.index(given)] if given in names else self.predictor.find_classes(given)
        if len(labels) != 1:
            raise ValueError(f"{given!r} names {len(labels)} classes; give one.")
        return labels[0]

    def predict(self, upload: Upload) -> Explanation:
        """Returns logits and probabilities, without maps."""
        return self._explanation(upload, (), ())

    def entry(self, found: Explanation, label: int) -> dict[str, Any]:
        """Returns what is predicted for a class, fit for JSON."""
        return found.entry(label, self.predictor.class_names)

    def explain(
        self,
        upload: Upload,
        label: int,
        method: str | None = None,
        *,
        joint: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> ClassMap:
        """Explains one class by one method.

        Args:
            upload: The picture.
            label: The class.
            method: A method's name; by default the first that applies to the model.
            joint: Whether the scale is that of all most confident classes together.
            progress: Called with the share of a slow method's passes that are done.

        Raises:
            ValueError: If the method does not exist or does not apply.
        """
        methods = self.predictor.methods(method)
        if len(methods) != 1:
            raise ValueError(f"{method!r} names {len(methods)} methods; give one.")
        others = self.predict(upload).top(TOP) if joint else []
        # The same classes in the same order for each of them, so that the cache is used.
        labels = tuple(others if label in others else [*others, label])
        found = self._explanation(upload, labels, methods, progress)
        row = labels.index(label)
        scale = contribution_scales(found.attributions[methods[0]].map, joint=joint)[row]
        return ClassMap(found=found, method=methods[0], row=row, scale=scale)

    def sums(self, upload: Upload, label: int) -> Sums:
        """Returns the terms that show an explanation to be complete."""
        return self._exact_map(upload, label).found.sums(0)

    def incompleteness(self, upload: Upload, label: int, *, strict: bool = False) -> str | None:
        """Returns a sentence where contributions miss the logit beyond rounding.

        Args:
            upload: The picture.
            label: The class.
            strict: Whether the sentence is an error instead.

        Raises:
            ValueError: If contributions miss the logit, and ``strict`` is set.
        """
        sentence = self._exact_map(upload, label).found.incompleteness
        if strict and sentence is not None:
            raise ValueError(sentence)
        return sentence

    def region(self, upload: Upload, label: int, box: Box) -> Region:
        """Sums what the pixels of a box contribute to a class.

        Raises:
            ValueError: If the box is not inside the picture, or the model is not a B-cos model.
        """
        height, width = upload.image.shape[-2:]
        right, bottom = box.x + box.width, box.y + box.height
        if min(box.x, box.y) < 0 or min(box.width, box.height) < 1:
            raise ValueError(
                f"{asdict(box)} is not a box; give x and y from 0, and a width and height from 1."
            )
        if right > width or bottom > height:
            raise ValueError(
                f"The box ends at ({right}, {bottom}), beyond the picture of {width}×{height} "
                f"pixels that the model sees; make it smaller."
            )
        inside = self._exact_map(upload, label).map[box.y : bottom, box.x : right].double()
        sums = self.sums(upload, label)
        evidence, together = sums.logit - sums.bias, inside.sum().item()
        return Region(
            positive=inside.clamp_min(0).sum().item(),
            negative=inside.clamp_max(0).sum().item(),
            together=together,
            share=together / evidence if evidence else None,
            area=box.width * box.height / (width * height),
        )

    def write_file(
        self,
        chosen: Sequence[tuple[Upload, int]],
        methods: str,
        kind: str,
        folder: str | Path,
    ) -> Path:
        """Writes a file about pictures, to be downloaded.

        Args:
            chosen: The pictures, each with the class to explain.
            methods: Names of methods, separated by commas; "" is the first that applies.
            kind: One of `FILES`; several NPZ files come as one ZIP file.
            folder: Where the file is written.

        Returns:
            The file.

        Raises:
            ValueError: If there is no picture, or the kind or a method does not exist.
        """
        if kind not in FILES:
            raise ValueError(f"There is no kind of file {kind!r}; choose from {', '.join(FILES)}.")
        if not chosen:
            raise ValueError("There is no picture: upload one first.")
        used = self.predictor.methods(methods or None)
        # Users see the name of the weights, but not where they are stored.
        predictor = replace(self.predictor, weights=Path(self.predictor.weights).name)
        command = f"bcosvit serve --weights {predictor.weights}"
        provenance = Provenance(command=command, versions=versions(), config=predictor.config)
        info = ReportInfo(predictor=predictor, methods=used, provenance=provenance)
        path = Path(folder, FILE_NAME if kind == "npz" else f"{FILE_NAME}.{kind}")
        with FILES[kind](path, info) as add:
            for number, (upload, label) in enumerate(chosen, start=1):
                found = self._explanation(upload, (label,), used)
                add(number, replace(found, name=upload.name))
        return _zipped(path) if path.is_dir() else path

    def _exact_map(self, upload: Upload, label: int) -> ClassMap:
        if self.exact is None:
            raise ValueError(
                "This model is not a B-cos model, so its maps do not sum to a logit; "
                "serve a B-cos model for exact contributions."
            )
        return self.explain(upload, label, self.exact)

    def _explanation(
        self,
        upload: Upload,
        labels: tuple[int, ...],
        methods: tuple[str, ...],
        progress: Callable[[float], None] | None = None,
    ) -> Explanation:
        """Explains classes by methods, of which none is computed that the cache has."""
        wanted = methods or ("",)
        found = {name: self._cached(upload, labels, name) for name in wanted}
        missing = tuple(name for name, each in found.items() if each is None)
        if missing and not any(name and self.is_slow(name) for name in missing):
            # Pictures of one size, as many classes and the same methods share a pass.
            kind = (upload.image.shape, len(labels), missing)
            found |= self._batches(kind, (upload, labels, missing))
        elif missing:
            with (
                self._waiting_for(self._slow),
                counting_passes(self._share(labels, missing, progress)),
            ):
                # Somebody else may have asked for the same, and be done by now.
                found |= {name: self._cached(upload, labels, name) for name in missing}
                missing = tuple(name for name in missing if found[name] is None)
                if missing:
                    found |= self._computed(upload, labels, missing)
        each = [explanation for explanation in found.values() if explanation is not None]
        if len(each) == 1:
            return each[0]
        return replace(
            each[0],
            attributions={name: a for one in each for name, a in one.attributions.items()},
        )

    def _computed(
        self, upload: Upload, labels: tuple[int, ...], methods: tuple[str, ...]
    ) -> dict[str, Explanation]:
        """Explains without the cache, and fills it."""
        used = [name for name in methods if name]
        # Without the file's name: another user may ask about the same pixels.
        found = self.predictor.explain(upload.image, labels or None, methods=used)
        return self._remembered(upload, labels, methods, found)

    def _computed_together(self, wanted: Sequence[_Wanted]) -> list[dict[str, Explanation]]:
        """Explains pictures of several users in one pass; each of them as if it were alone."""
        found: dict[int, dict[str, Explanation]] = {}
        missing: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for place, (upload, labels, methods) in enumerate(wanted):
            # Somebody else may have asked for the same before, or in this batch.
            known = {name: self._cached(upload, labels, name) for name in methods}
            complete = {name: each for name, each in known.items() if each is not None}
            if len(complete) == len(methods):
                found[place] = complete
            else:
                missing.setdefault((upload.key, labels), []).append(place)
        once = [wanted[places[0]] for places in missing.values()]
        if len(once) == 1:
            computed = [self._computed(*once[0])]
        elif once:
            (_, labels, methods), *_ = once
            explanations = self.predictor.explain_batch(
                [upload.image for upload, _, _ in once],
                [each for _, each, _ in once] if labels else None,
                methods=[name for name in methods if name],
            )
            computed = [
                self._remembered(*each, explanation)
                for each, explanation in zip(once, explanations, strict=True)
            ]
        else:
            computed = []
        for places, each in zip(missing.values(), computed, strict=True):
            found |= dict.fromkeys(places, each)
        return [found[place] for place in range(len(wanted))]

    def _remembered(
        self,
        upload: Upload,
        labels: tuple[int, ...],
        methods: tuple[str, ...],
        found: Explanation,
    ) -> dict[str, Explanation]:
        """Returns an explanation by method, and fills the cache with it."""
        split = {
            name: replace(found, attributions={name: found.attributions[name]} if name else {})
            for name in methods
        }
        with self._lock:
            for name, each in split.items():
                self._cache[upload.key, labels, name] = time.monotonic(), each
            while len(self._cache) > self.limits.cached:
                self._cache.popitem(last=False)
        return split

    def _cached(self, upload: Upload, labels: tuple[int, ...], method: str) -> Explanation | None:
        """Looks for an explanation of these classes, alone or among others."""
        with self._lock:
            key = (upload.key, labels, method)
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][1]
            for (pixels, others, name), (_, found) in self._cache.items():
                if pixels == upload.key and name == method and set(labels) <= set(others):
                    return _of_classes(found, [others.index(label) for label in labels])
        return None

    def _share(
        self,
        labels: tuple[int, ...],
        methods: tuple[str, ...],
        progress: Callable[[float], None] | None,
    ) -> Callable[[int], None]:
        """Returns a function that turns numbers of passes into shares of all passes."""
        size = self.predictor.transform.image_size
        slow = [METHODS.get(name) for name in methods if name and self.is_slow(name)]
        total = max(1, len(labels)) * sum(each.passes(size, size) for each in slow)
        begun = 0

        def share(passes: int) -> None:
            nonlocal begun
            if progress is not None and total:
                progress(min(1.0, begun / total))
            begun += passes

        return share

    def forget(self) -> None:
        """Deletes cached explanations that are as old as uploads may be."""
        oldest = time.monotonic() - self.limits.seconds
        with self._lock:
            for key in [key for key, (made, _) in self._cache.items() if made < oldest]:
                del self._cache[key]

    @contextmanager
    def _waiting_for(self, turn: Semaphore) -> Iterator[None]:
        """Waits until there is room for a computation, unless nobody waits for its result."""
        while not turn.acquire(timeout=0.1):
            check_cancelled()
        try:
            check_cancelled()
            yield
        finally:
            turn.release()


def _of_classes(found: Explanation, rows: list[int]) -> Explanation:
    """Returns an explanation of some of the classes that are explained."""
    own = {name: part_of(each, rows, logits=False) for name, each in found.attributions.items()}
    return replace(found, target=found.target[rows], attributions=own)


def _zipped(folder: Path) -> Path:
    """The only file of a folder, or a ZIP file of all its files."""
    files = sorted(folder.iterdir())
    if len(files) == 1:
        return files[0]
    path = folder.with_suffix(".zip")
    # Without compression: NPZ files are compressed already.
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, file.name)
    return path

"""What the server computes for a picture, without Gradio and without users.

One `ExplanationService` serves all users. Its cache is keyed by pixels, classes and methods, so
that equal requests get equal answers, and no user can get the answer for another picture.
Explaining leaves the model untouched, so that threads need no lock except around the cache.
"""

import hashlib
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from torch import Tensor

from bcosvit.attribution import METHODS
from bcosvit.attribution.base import check_cancelled
from bcosvit.data.images import read_image
from bcosvit.predictor import Explanation, Predictor, Sums
from bcosvit.report.explain import TOP, ReportInfo, contact_sheet, html_report, npz_files
from bcosvit.report.images import contribution_scales
from bcosvit.report.provenance import Provenance, versions

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


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle in pixels of the picture as the model sees it, from the upper left corner."""

    x: int
    y: int
    width: int
    height: int

    @classmethod
    def of(cls, edges: Sequence[float | None]) -> "Box | None":
        """Returns a box if x, y, width and height are all given, else None."""
        given = [int(edge) for edge in edges if edge is not None]
        if len(given) < 4:
            return None
        x, y, width, height = given
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
    _cache: OrderedDict[tuple[object, ...], tuple[float, Explanation]] = field(
        default_factory=OrderedDict
    )
    _lock: Lock = field(default_factory=Lock)
    _turns: dict[bool, Semaphore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._turns.update({False: Semaphore(self.limits.concurrency), True: Semaphore(1)})

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that apply to the model."""
        return self.predictor.methods("all")

    @property
    def exact(self) -> str | None:
        """The first method if its contributions sum to the logit, as those of B-cos models do."""
        first = self.methods[0]
        return first if METHODS.get(first).exact else None

    def open(self, path: str | Path | None) -> Upload:
        """Reads an uploaded file.

        Args:
            path: The file; None where nothing was uploaded.

        Raises:
            ValueError: If it is missing, too large or not a picture.
        """
        if path is None:
            raise ValueError("There is no picture: upload one first.")
        path, most = Path(path), self.limits.megabytes
        if not path.is_file():
            raise ValueError(f"The upload {path.name} has been deleted: upload it again.")
        if path.stat().st_size > most * 1_000_000:
            raise ValueError(f"The file {path.name} is larger than {most} MB: shrink the picture.")
        transform = self.predictor.transform
        pixels, enough = self.limits.pixels, transform.at_least
        with self._turn():
            image = transform(read_image(path, max_pixels=pixels, at_least=enough, name=path.name))
        key = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        return Upload(name=path.name, image=image, key=key)

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
        self, upload: Upload, label: int, method: str | None = None, *, joint: bool = False
    ) -> ClassMap:
        """Explains one class by one method.

        Args:
            upload: The picture.
            label: The class.
            method: A method's name; by default the first that applies to the model.
            joint: Whether the scale is that of all most confident classes together.

        Raises:
            ValueError: If the method does not exist or does not apply.
        """
        methods = self.predictor.methods(method)
        if len(methods) != 1:
            raise ValueError(f"{method!r} names {len(methods)} methods; give one.")
        others = self.predict(upload).top(TOP) if joint else []
        # The same classes in the same order for each of them, so that the cache is used.
        labels = tuple(others if label in others else [*others, label])
        found = self._explanation(upload, labels, methods)
        row = labels.index(label)
        scale = contribution_scales(found.attributions[methods[0]].map, joint=joint)[row]
        return ClassMap(found=found, method=methods[0], row=row, scale=scale)

    def sums(self, upload: Upload, label: int) -> Sums:
        """Returns the terms that show an explanation to be complete."""
        return self._exact_map(upload, label).found.sums(0)

    def incompleteness(self, upload: Upload, label: int) -> str | None:
        """Returns a sentence where contributions miss the logit beyond rounding."""
        return self._exact_map(upload, label).found.incompleteness

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
                image, name = upload.image, upload.name
                with self._turn(used):
                    found = predictor.explain(image, (label,), methods=used, name=name)
                add(number, found)
        return _zipped(path) if path.is_dir() else path

    def _exact_map(self, upload: Upload, label: int) -> ClassMap:
        if self.exact is None:
            raise ValueError(
                "This model is not a B-cos model, so its maps do not sum to a logit; "
                "serve a B-cos model for exact contributions."
            )
        return self.explain(upload, label, self.exact)

    def _explanation(
        self, upload: Upload, labels: tuple[int, ...], methods: tuple[str, ...]
    ) -> Explanation:
        key = (upload.key, labels, methods)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][1]
        # Without the file's name: another user may ask about the same pixels.
        with self._turn(methods):
            found = self.predictor.explain(upload.image, labels or None, methods=methods)
        with self._lock:
            self._cache[key] = time.monotonic(), found
            while len(self._cache) > self.limits.cached:
                self._cache.popitem(last=False)
        return found

    def forget(self) -> None:
        """Deletes cached explanations that are as old as uploads may be."""
        oldest = time.monotonic() - self.limits.seconds
        with self._lock:
            for key in [key for key, (made, _) in self._cache.items() if made < oldest]:
                del self._cache[key]

    @contextmanager
    def _turn(self, methods: Sequence[str] = ()) -> Iterator[None]:
        """Waits until there is room for a computation, unless nobody waits for its result."""
        turn = self._turns[any(METHODS.get(name).cost == "many" for name in methods)]
        while not turn.acquire(timeout=0.1):
            check_cancelled()
        try:
            check_cancelled()
            yield
        finally:
            turn.release()


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

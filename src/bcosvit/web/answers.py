"""What the demo answers, as plain functions of a picture: neither Gradio nor a user is known here.

`Answers` is one object for all users. Nothing in it belongs to anybody: what it remembers is found
by the pixels, the classes and the method, so that whoever asks the same is told the same, and
nobody can be given what belongs to another picture. Explaining leaves the model untouched, so
threads need no lock but the one around the memory.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from bcosvit.data.images import read_image
from bcosvit.predictor import Explanation, Predictor, Sums
from bcosvit.report.explain_html import TOP
from bcosvit.report.figures import contribution_scales
from bcosvit.web.limits import Limits


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A picture as the model sees it."""

    name: str
    image: Tensor
    """[3, H, W]"""
    key: str
    """A digest of the pixels."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Pixels of a picture as the model sees it, from the upper left corner."""

    x: int
    y: int
    width: int
    height: int

    @classmethod
    def of(cls, edges: Sequence[float | None]) -> "Box | None":
        """A box, once x, y, width and height are all given."""
        given = [int(edge) for edge in edges if edge is not None]
        if len(given) < 4:
            return None
        x, y, width, height = given
        return cls(x=x, y=y, width=width, height=height)


@dataclass(frozen=True, kw_only=True)
class Region:
    """What the pixels of a box contribute to a logit: sums of the map, summed in float64."""

    positive: float
    negative: float
    together: float
    share: float | None
    """Of the evidence, logit − bias; None where there is none."""
    area: float
    """Share of the picture's pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """One method for one class of a picture."""

    found: Explanation
    method: str
    row: int
    """The class's place among those explained."""
    scale: float
    """The value that is drawn in full color."""

    @property
    def map(self) -> Tensor:
        return self.found.attributions[self.method].map[self.row]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """A model, and what can be asked about pictures."""

    predictor: Predictor
    limits: Limits = field(default_factory=Limits)
    _memory: OrderedDict[tuple[object, ...], Explanation] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def methods(self) -> tuple[str, ...]:
        return self.predictor.methods("all")

    @property
    def exact(self) -> bool:
        """Whether contributions sum to the logit: those of B-cos models do."""
        return "inherent" in self.methods

    def open(self, path: str | Path | None) -> Picture:
        """Reads an uploaded file within the limits."""
        if path is None:
            raise ValueError("There is no picture: upload one first.")
        path, most = Path(path), self.limits.megabytes
        if not path.is_file():
            raise ValueError(f"The upload {path.name} is no longer kept: upload it again.")
        if path.stat().st_size > most * 1_000_000:
            raise ValueError(f"The file {path.name} is larger than {most} MB: shrink the picture.")
        transform = self.predictor.transform
        pixels, enough = self.limits.pixels, transform.at_least
        image = transform(read_image(path, max_pixels=pixels, at_least=enough, name=path.name))
        key = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        return Picture(name=path.name, image=image, key=key)

    def limited(self, paths: Sequence[str] | None) -> Sequence[str]:
        """Not too many at once."""
        paths = paths or []
        if len(paths) > self.limits.pictures:
            raise ValueError(
                f"{len(paths)} pictures are too many at once: give at most {self.limits.pictures}."
            )
        return paths

    def label(self, given: str, picture: Picture) -> int:
        """A class by name or number; the surest one where none is given."""
        if not given.strip():
            return self.predict(picture).top(1)[0]
        # Names may hold commas, which separate classes on the command line.
        names = self.predictor.class_names
        labels = [names.index(given)] if given in names else self.predictor.find_classes(given)
        if len(labels) != 1:
            raise ValueError(f"{given!r} names {len(labels)} classes; give one.")
        return labels[0]

    def predict(self, picture: Picture) -> Explanation:
        """Logits and confidences alone."""
        return self._found(picture, (), ())

    def entry(self, found: Explanation, label: int) -> dict[str, Any]:
        """What is predicted for a class, fit for JSON."""
        return found.entry(label, self.predictor.class_names)

    def explain(
        self, picture: Picture, label: int, method: str | None = None, *, joint: bool = False
    ) -> Shown:
        """One method's map for a class; ``joint`` scales it with those of the surest classes."""
        methods = self.predictor.methods(method)
        if len(methods) != 1:
            raise ValueError(f"{method!r} names {len(methods)} methods; give one.")
        others = self.predict(picture).top(TOP) if joint else []
        # The same classes in the same order, whichever of them is asked for.
        labels = tuple(others if label in others else [*others, label])
        found = self._found(picture, labels, methods)
        row = labels.index(label)
        scale = contribution_scales(found.attributions[methods[0]].map, joint=joint)[row]
        return Shown(found=found, method=methods[0], row=row, scale=scale)

    def sums(self, picture: Picture, label: int) -> Sums:
        """The check that an explanation is complete, in numbers."""
        return self._inherent(picture, label).found.sums(0)

    def region(self, picture: Picture, label: int, box: Box) -> Region:
        """What a box contributes to a class."""
        height, width = picture.image.shape[-2:]
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
        inside = self._inherent(picture, label).map[box.y : bottom, box.x : right].double()
        sums = self.sums(picture, label)
        evidence, together = sums.logit - sums.bias, inside.sum().item()
        return Region(
            positive=inside.clamp_min(0).sum().item(),
            negative=inside.clamp_max(0).sum().item(),
            together=together,
            share=together / evidence if evidence else None,
            area=box.width * box.height / (width * height),
        )

    def _inherent(self, picture: Picture, label: int) -> Shown:
        if not self.exact:
            raise ValueError(
                "This model is not a B-cos model, so its maps do not sum to a logit; "
                "serve one to ask for exact contributions."
            )
        return self.explain(picture, label, "inherent")

    def _found(
        self, picture: Picture, labels: tuple[int, ...], methods: tuple[str, ...]
    ) -> Explanation:
        key = (picture.key, labels, methods)
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        # Without the file's name: another user may ask about the same pixels.
        found = self.predictor.explain(picture.image, labels or None, methods=methods)
        with self._lock:
            self._memory[key] = found
            while len(self._memory) > self.limits.cached:
                self._memory.popitem(last=False)
        return found

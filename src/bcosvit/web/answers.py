"""What the endpoints of the API answer, whichever way a request comes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bcosvit.attribution import METHODS
from bcosvit.report.images import RGB, method_image, overlay_image, photo_image, weight_image
from bcosvit.web.service import Box, ClassMap, ExplanationService

Picture = str | BinaryIO | None
"""The path of an upload, or an open file; None where nothing was uploaded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """The explanation of one class of a picture."""

    numbers: dict[str, Any]
    shown: ClassMap

    def images(self, overlay: float) -> dict[str, RGB | None]:
        """The map, the map on the photo and W(x) in color, which only exact methods have.

        Args:
            overlay: The opacity of the map on the photo, from 0 to 1.
        """
        if not 0 <= overlay <= 1:
            raise ValueError(f"overlay = {overlay:g} is not allowed: give 0 (photo alone) to 1.")
        shown, found = self.shown, self.shown.found
        photo = photo_image(found.image)
        return {
            "map": method_image(shown.method, shown.map, shown.scale),
            "overlay": overlay_image(photo, shown.method, shown.map, shown.scale, alpha=overlay),
            "colors": weight_image(found.exact, shown.row),
        }


def model(service: ExplanationService) -> dict[str, Any]:
    """Describes the model: its classes, methods and input."""
    predictor = service.predictor
    return {
        "model": predictor.describe(),
        "weights": Path(predictor.weights).name,
        "classes": list(predictor.class_names),
        "methods": list(service.methods),
        "costs": {name: METHODS.get(name).cost for name in service.methods},
        "seconds": {name: service.seconds(name) for name in service.methods},
        "image_size": predictor.transform.image_size,
        "exact": service.exact is not None,
    }


def predict(service: ExplanationService, picture: Picture, top: float | None) -> dict[str, Any]:
    """Predicts the ``top`` most confident classes of a picture."""
    if top is None:
        raise ValueError("top is missing: give an integer >= 1.")
    if top < 1 or top != int(top):
        raise ValueError(f"top = {top:g} is not allowed: give an integer >= 1.")
    found = service.predict(service.open(picture))
    return {
        "top": [service.entry(found, label) for label in found.top(int(top))],
        "unlike": found.unlike,
        "is_unlike": found.is_unlike,
    }


def explain(
    service: ExplanationService,
    picture: Picture,
    label: str,
    method: str,
    *,
    joint: bool,
    strict: bool,
) -> Explained:
    """Explains a class of a picture.

    Args:
        service: The model.
        picture: What is explained.
        label: A class by name or number; "" is the most confident one.
        method: One that ``model`` lists; "" is the first of them.
        joint: Whether the scale is that of all most confident classes together.
        strict: Whether contributions that miss the logit beyond rounding are an error.
    """
    opened = service.open(picture)
    index = service.find_class(label, opened)
    shown = service.explain(opened, index, method or None, joint=joint)
    numbers = service.entry(shown.found, index) | {"method": shown.method, "scale": shown.scale}
    if service.exact is not None:
        numbers |= asdict(service.sums(opened, index))
        # A server's warnings are not seen by those who ask it.
        numbers["incompleteness"] = service.incompleteness(opened, index, strict=strict)
    return Explained(numbers=numbers, shown=shown)


def region(
    service: ExplanationService,
    picture: Picture,
    label: str,
    edges: Sequence[float | None],
    *,
    strict: bool,
) -> dict[str, Any]:
    """Sums what a box contributes to a class, in pixels of the picture as the model sees it.

    Args:
        service: The model.
        picture: What is explained.
        label: As for :func:`explain`.
        edges: x, y, width and height.
        strict: As for :func:`explain`.
    """
    box = Box.of(edges)
    if box is None:
        raise ValueError("A box needs four numbers: give x, y, width and height.")
    opened = service.open(picture)
    index = service.find_class(label, opened)
    found = service.region(opened, index, box)
    # What was explained was predicted, too.
    explained = service.explain(opened, index, service.exact).found
    numbers = service.entry(explained, index) | asdict(found)
    numbers["incompleteness"] = service.incompleteness(opened, index, strict=strict)
    return numbers

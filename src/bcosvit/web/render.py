"""What the page shows, as HTML from ``templates/fragments.html.jinja``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bcosvit.attribution import method_title
from bcosvit.predictor import Predictor
from bcosvit.progress import duration
from bcosvit.report.explain import probability_note
from bcosvit.report.images import (
    MapFigure,
    Picture,
    map_figure,
    overlay_image,
    photo_image,
    weight_image,
)
from bcosvit.report.pages import macros
from bcosvit.shipped import PHOTOS
from bcosvit.web.service import Box, ClassMap, Upload

NOTHING = (
    "Drop photos, choose them, paste one, or try an example. You will see what the model "
    "recognizes, and how much each pixel contributes to it."
)
SUMS = "Contributions, the residual (the share of constants) and the bias sum to the logit."
REGION = (
    "Click a picture for a small square, drag for a box, or type its pixels. Evidence is the logit "
    "without the bias."
)
METHODS = (
    "Other explanations of the same class; these are estimates. Slow methods pass the picture "
    "through the model many times; the time that takes is estimated for this machine."
)
STOPPED = "Stopped: the maps of slow methods that were not finished are missing."
DOWNLOAD = "All pictures, each with the class that is chosen for it."

EXAMPLES = sorted(PHOTOS.glob("*.jpg"))
"""Photographs to try."""

fragments = macros("web/templates/fragments.html.jinja")
"""Its macros, which return HTML; those that need more than their arguments are called below."""

_NO_BOX = Box(x=0, y=0, width=0, height=0)


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A picture in the list of all uploads."""

    index: int
    name: str
    picture: Picture
    entry: Mapping[str, Any]
    """What is predicted for the most confident class."""


def header(predictor: Predictor) -> Markup:
    """Renders the title of the page and the model's description."""
    return fragments.header(
        predictor.describe(),
        Path(predictor.weights).name,
        predictor.class_names,
        probability_note(predictor),
    )


def examples() -> Markup:
    """Renders the photographs to try, as buttons."""
    return fragments.examples(
        [
            Picture(data=path.read_bytes(), alt=f"Example: {path.stem}", width=96, height=96)
            for path in EXAMPLES
        ]
    )


def thumbnail(index: int, upload: Upload, entry: Mapping[str, Any]) -> Thumbnail:
    """Draws a picture for the list of all uploads."""
    # Without a text of its own: its name follows.
    picture = Picture.of(photo_image(upload.image), "")
    return Thumbnail(index=index, name=upload.name, picture=picture, entry=entry)


def views(shown: ClassMap, name: str, alpha: float, box: Box | None) -> Markup:
    """Renders the photo, the contributions, their overlay and W(x), with the box on each.

    Args:
        shown: The map.
        name: The class that it explains.
        alpha: The opacity of the overlay.
        box: The region that is measured.
    """
    photo = photo_image(shown.found.image)
    over = overlay_image(photo, shown.method, shown.map, shown.scale, alpha=alpha)
    weights = weight_image(shown.found.exact, shown.row)
    return fragments.views(
        Picture.of(photo, "The picture as the model sees it"),
        _figure(shown, name),
        Picture.of(over, f"{method_title(shown.method)} to {name}, on the picture"),
        None if weights is None else Picture.of(weights, f"The colors of W(x) for {name}"),
        box or _NO_BOX,
    )


def gallery(maps: Sequence[ClassMap], name: str) -> Markup:
    """Renders the maps of several methods for one class."""
    return fragments.gallery([_figure(each, name) for each in maps], _NO_BOX)


def working(method: str, share: float, seconds_left: float | None) -> Markup:
    """Renders how far a slow method is.

    Args:
        method: Its name.
        share: What is done of it.
        seconds_left: How long the rest will take; None where that is not known yet.
    """
    left = "waiting" if seconds_left is None else f"about {duration(seconds_left)} left"
    return fragments.working(method_title(method), share, left)


def _figure(shown: ClassMap, name: str) -> MapFigure:
    return map_figure(shown.method, shown.map, shown.scale, name)

"""What the page shows, as HTML from ``templates/fragments.html.jinja``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bcosvit.attribution import method_title
from bcosvit.predictor import Predictor, Sums
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
from bcosvit.web.service import Box, ClassMap, Region, Upload

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
    "Other explanations of the same class; they do not sum to the logit. Slow methods pass the "
    "picture through the model many times; how long that takes is estimated for this machine."
)
STOPPED = "Stopped: the maps of slow methods that were not finished are missing."
DOWNLOAD = "All pictures, each with the class that is chosen for it."

EXAMPLES = sorted(PHOTOS.glob("*.jpg"))
"""Photographs to try."""

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
    return _fragments().header(
        predictor.describe(),
        Path(predictor.weights).name,
        predictor.class_names,
        probability_note(predictor),
    )


def examples() -> Markup:
    """Renders the photographs to try, as buttons."""
    return _fragments().examples(
        [
            Picture(data=path.read_bytes(), alt=f"Example: {path.stem}", width=96, height=96)
            for path in EXAMPLES
        ]
    )


def camera() -> Markup:
    """Renders the button that takes a photo."""
    return _fragments().camera()


def rather(name: str, other: str, logit: float, warnings: Sequence[str] = ()) -> Markup:
    """Renders the title of a comparison of two classes, below warnings."""
    return _fragments().rather(name, other, logit, warnings)


def heading(title: str, hint: str) -> Markup:
    """Renders the heading of a part of the page."""
    return _fragments().heading(title, hint)


def empty(text: str) -> Markup:
    """Renders what is shown while there is nothing else."""
    return _fragments().empty(text)


def problem(text: str) -> Markup:
    """Renders an error message."""
    return _fragments().problem(text)


def thumbnail(index: int, upload: Upload, entry: Mapping[str, Any]) -> Thumbnail:
    """Draws a picture for the list of all uploads."""
    # Without a text of its own: its name follows.
    picture = Picture.of(photo_image(upload.image), "")
    return Thumbnail(index=index, name=upload.name, picture=picture, entry=entry)


def thumbnails(pictures: Sequence[Thumbnail], problems: Sequence[str]) -> Markup:
    """Renders the list of all uploads, of which the first is chosen, and the errors."""
    return _fragments().thumbnails(pictures, problems)


def class_list(entries: Sequence[Mapping[str, Any]], chosen: int) -> Markup:
    """Renders classes with their probabilities as buttons."""
    return _fragments().class_list(entries, chosen)


def title(entry: Mapping[str, Any], warnings: Sequence[str] = ()) -> Markup:
    """Renders the class that is explained, below warnings."""
    return _fragments().title(entry, warnings)


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
    return _fragments().views(
        Picture.of(photo, "The picture as the model sees it"),
        _figure(shown, name),
        Picture.of(over, f"{method_title(shown.method)} to {name}, on the picture"),
        None if weights is None else Picture.of(weights, f"The colors of W(x) for {name}"),
        box or _NO_BOX,
    )


def gallery(maps: Sequence[ClassMap], name: str) -> Markup:
    """Renders the maps of several methods for one class."""
    return _fragments().gallery([_figure(each, name) for each in maps], _NO_BOX)


def working(method: str, share: float, seconds_left: float | None) -> Markup:
    """Renders how far a slow method is.

    Args:
        method: Its name.
        share: What is done of it.
        seconds_left: How long the rest will take; None where that is not known yet.
    """
    left = "waiting" if seconds_left is None else f"about {duration(seconds_left)} left"
    return _fragments().working(method_title(method), share, left)


def sums(found: Sums) -> Markup:
    """Renders the terms that sum to the logit."""
    return _fragments().sums(found)


def region(found: Region) -> Markup:
    """Renders what a box contributes."""
    return _fragments().region(found)


def _figure(shown: ClassMap, name: str) -> MapFigure:
    return map_figure(shown.method, shown.map, shown.scale, name)


@cache
def _fragments() -> Any:
    return macros("web/templates/fragments.html.jinja")

"""The pieces of the page that Gradio has no component for, as HTML.

What can be chosen is a real button, so that it is reached by Tab and pressed by Enter; pictures
have texts for those who do not see them; every text that a user brought is escaped.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bcosvit.attribution import method_title
from bcosvit.predictor import Predictor, Sums
from bcosvit.report.figures import colors, on_white, overlay_image, photo_bytes, photo_image
from bcosvit.report.html import Html, bar, definitions, element, figure, picture, text
from bcosvit.report.pieces import map_figure, percent, signed
from bcosvit.web.answers import Box, Picture, Region, Shown

NOTHING = (
    "Drop photos, choose them, or paste one. You will see what the model takes them for, and how "
    "much every pixel speaks for it."
)
ADDS_UP = "Contributions, the residual (the share of constants) and the bias sum to the logit."
REGION = (
    "Click a picture for a small square, drag for a box, or type its pixels. Evidence is the logit "
    "without the bias."
)
METHODS = "Maps made afterwards, for the same class; they claim no sum."
DOWNLOAD = "All pictures, each with the class chosen for it."


def header(predictor: Predictor) -> Html:
    """What this is, and which model answers."""
    return element(
        "header",
        element("h1", text("What the model saw")),
        element(
            "p", text(f"{predictor.describe()} · {Path(predictor.weights).name}"), class_="soft"
        ),
    )


def heading(words: str, hint: str) -> Html:
    """Of a part of the page."""
    return element(
        "div", element("h3", text(words)), element("p", text(hint), class_="hint"), class_="part"
    )


def empty(words: str) -> Html:
    """What stands where there is nothing yet."""
    return element("p", text(words), class_="empty")


def problem(words: str) -> Html:
    """What went wrong, where it did."""
    return element("p", text(words), class_="problems", role="alert")


def strip(pictures: Mapping[int, tuple[Picture, str]], problems: Sequence[str]) -> Html:
    """A button a picture with its surest class, the first one pressed, and what is wrong."""
    buttons = [
        _choice(
            at,
            at == min(pictures),
            picture(photo_bytes(photo_image(each.image)), "", _size(each)),
            element("b", text(each.name)),
            element("span", text(top), class_="soft"),
        )
        for at, (each, top) in pictures.items()
    ]
    # A single picture needs no choosing.
    listed = [_group("Pictures", "strip", buttons)] if len(buttons) > 1 else []
    return Html("".join([*listed, *map(problem, problems)]))


def class_list(entries: Sequence[Mapping[str, Any]], chosen: int) -> Html:
    """A button a class, with its probability as a bar."""
    buttons = [
        _choice(
            entry["index"],
            entry["index"] == chosen,
            element("b", text(entry["class"])),
            element("span", text(percent(entry["probability"]))),
            bar(entry["probability"]),
        )
        for entry in entries
    ]
    return _group("Classes", "classes", buttons)


def title(entry: Mapping[str, Any]) -> Html:
    """The class that is explained."""
    facts = f"{percent(entry['probability'])}, logit {signed(entry['logit'])}"
    return element("h2", text(entry["class"]), Html(" "), element("small", text(facts)))


def views(shown: Shown, name: str, alpha: float, box: Box | None) -> Html:
    """The photo, the contributions, their overlay and W(x), with the box on each."""
    found = shown.found
    photo = photo_image(found.image)
    size = (photo.shape[1], photo.shape[0])
    over = overlay_image(photo, shown.method, shown.map, shown.scale, alpha=alpha)
    large = [
        figure(
            _stage(photo_bytes(photo), "The picture as the model sees it", size, box),
            Html(f"<b>Picture</b>, {size[0]}×{size[1]} pixels"),
        ),
        map_of(shown, name, box),
        figure(
            _stage(photo_bytes(over), f"{method_title(shown.method)} to {name}, on it", size, box),
            element("b", text("Overlay")),
        ),
    ]
    if found.exact is not None:
        rgba = on_white(colors(found.exact, shown.row))
        large.append(
            figure(
                _stage(photo_bytes(rgba), f"The colors of W(x) for {name}", size, box),
                Html("<b>W(x) in color</b>"),
            )
        )
    return element("div", *large, class_="views")


def map_of(shown: Shown, name: str, box: Box | None = None) -> Html:
    """A method's map with its scale."""
    return map_figure(shown.method, shown.map, shown.scale, name, partial(_stage, box=box))


def sums_card(sums: Sums) -> Html:
    """Completeness as arithmetic that anyone can check."""
    terms = {
        "Σ contributions": signed(sums.contributions),
        "+ residual": signed(sums.residual),
        "+ bias": signed(sums.bias),
        "= logit": signed(sums.logit),
        "off by": f"{sums.completeness_error:.1e}",
    }
    return element("div", definitions(terms), class_="facts")


def region_card(region: Region) -> Html:
    """What a box contributes."""
    share = "–" if region.share is None else f"{100 * region.share:.1f} %".replace("-", "−")
    terms = {
        "for": signed(region.positive),
        "against": signed(region.negative),
        "together": signed(region.together),
        "of the evidence": share,
        "of the area": percent(region.area),
    }
    return element("div", definitions(terms), class_="facts", role="status")


def gallery(figures: Sequence[Html]) -> Html:
    """Several maps side by side."""
    return element("div", *figures, class_="views small")


def _group(label: str, class_: str, buttons: Sequence[Html]) -> Html:
    return element("div", *buttons, class_=class_, role="group", aria_label=label)


def _choice(index: int, pressed: bool, *content: Html) -> Html:
    return element(
        "button",
        *content,
        type="button",
        data_index=str(index),
        aria_pressed="true" if pressed else "false",
    )


def _stage(data: bytes, alt: str, size: tuple[int, int], box: Box | None) -> Html:
    """A picture with a rectangle in units of its pixels on it."""
    width, height = size
    at = box or Box(x=0, y=0, width=0, height=0)
    edge = f'<rect x="{at.x}" y="{at.y}" width="{at.width}" height="{at.height}"/>'
    # Twice, dark below light: seen on any ground.
    rectangle = Html(f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{edge}{edge}</svg>')
    return element(
        "div",
        picture(data, alt, size),
        rectangle,
        class_="stage",
        data_width=str(width),
        data_height=str(height),
    )


def _size(each: Picture) -> tuple[int, int]:
    return each.image.shape[2], each.image.shape[1]

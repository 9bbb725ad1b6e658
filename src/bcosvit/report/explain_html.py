"""The report of `bcosvit explain`: a section a picture, written as it is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcosvit.attribution import METHODS, method_title
from bcosvit.data.dataset import Skipped
from bcosvit.predictor import Explanation, Sums
from bcosvit.report.figures import (
    RGB,
    colors,
    contribution_scales,
    on_white,
    overlay_image,
    photo_bytes,
    photo_image,
)
from bcosvit.report.html import (
    Html,
    bar,
    definitions,
    element,
    figure,
    foot,
    page,
    paragraph,
    picture,
    table,
    text,
)
from bcosvit.report.pieces import map_figure, percent, signed

TOP = 5
"""How many classes of a picture are listed, beside those explained."""

Add = Callable[[Explanation | Skipped], None]
"""Takes one picture after the other, the unreadable ones among them."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is the same for all pictures of a report."""

    weights: str
    model: str
    """In words."""
    config: Mapping[str, Any]
    classes: Sequence[str]
    methods: Sequence[str]
    joint: bool
    command: str
    versions: Mapping[str, str]


@contextmanager
def explain_page(path: str | Path, about: About) -> Iterator[Add]:
    """An HTML report that pictures are added to; the file appears when the block succeeds."""
    skipped: list[Skipped] = []
    ending = foot(about.command, about.config, about.versions)
    with page(path, "What the model saw", _lead(about), ending) as write:

        def add(item: Explanation | Skipped) -> None:
            if isinstance(item, Skipped):
                skipped.append(item)
            else:
                write(_section(item, about))

        yield add
        write(_skipped(skipped))


def _lead(about: About) -> Html:
    how = (
        "Maps of one method share a scale over the classes of a picture."
        if about.joint
        else "Every map has a scale of its own, so that maps cannot be compared in strength."
    )
    facts = {"Model": about.model, "Weights": about.weights}
    reading = (
        "Red pixels speak for a class, blue ones against it; full color stands for the 99.9th "
        f"percentile of the absolute values. {how}"
    )
    if any(METHODS.get(method).colormap == "jet" for method in about.methods):
        reading += " Attention has no sign: its maps go from blue, at zero, to red."
    exact = (
        "Contributions are exact: with the residual (the share of the model's constants) and the "
        "bias they sum to the logit. The colors of W(x) show what the model looks for, opaque "
        "where that matters and speaks for the class."
    )
    parts = [definitions(facts), paragraph(reading)]
    if any(METHODS.get(method).exact for method in about.methods):
        parts.append(paragraph(exact))
    parts.append(
        element(
            "p",
            text("Files that could not be read are listed "),
            element("a", text("at the end"), href="#skipped"),
            text("."),
        )
    )
    return Html("\n".join(parts))


def _section(found: Explanation, about: About) -> Html:
    heading = f"picture-{found.number}"
    scales = {
        method: contribution_scales(attribution.map, joint=about.joint)
        for method, attribution in found.attributions.items()
    }
    parts = [element("h2", text(found.name), id=heading), _classes(found, about.classes)]
    photo = photo_image(found.image)
    for row, label in enumerate(found.target.tolist()):
        sure, logit = found.probabilities[label].item(), found.logits[label].item()
        title = element("span", text(f"{percent(sure)}, logit {signed(logit)}"), class_="soft")
        parts.append(element("h3", text(about.classes[label] + " "), title))
        parts += _panels(found, row, about.classes[label], photo, scales)
        if found.exact is not None:
            parts.append(_sum(found.sums(row)))
    return element("section", *parts, class_="picture", aria_labelledby=heading)


def _classes(found: Explanation, names: Sequence[str]) -> Html:
    explained = found.target.tolist()
    shown = list(dict.fromkeys([*found.top(TOP), *explained]))
    sure = [found.probabilities[label].item() for label in shown]
    rows = [(names[label], percent(p), bar(p)) for label, p in zip(shown, sure, strict=True)]
    chosen = [number for number, label in enumerate(shown) if label in explained]
    return table(
        "The surest classes; those explained are marked.",
        ("Class", "Probability", ""),
        rows,
        numbers=(1,),
        chosen=chosen,
        class_="classes",
    )


def _panels(
    found: Explanation, row: int, name: str, photo: RGB, scales: Mapping[str, Sequence[float]]
) -> list[Html]:
    """The photo, the first method and W(x) large; the other methods in a row below."""
    first, *others = found.attributions
    maps = {method: found.attributions[method].map[row] for method in found.attributions}
    size = (photo.shape[1], photo.shape[0])
    large = [
        figure(
            picture(photo_bytes(photo), f"{found.name}, as the model saw it", size),
            Html(f"<b>Picture</b>, cropped to {size[0]}×{size[1]} pixels"),
        ),
        map_figure(first, maps[first], scales[first][row], name),
    ]
    over = overlay_image(photo, first, maps[first], scales[first][row])
    large.append(
        figure(
            picture(photo_bytes(over), f"{method_title(first)} to {name}, on the picture", size),
            Html(f"<b>Overlay</b> of {text(method_title(first))}"),
        )
    )
    if found.exact is not None and found.exact.weights is not None:
        rgba = colors(found.exact, row)
        alt = f"The colors of W(x) for {name}"
        large.append(
            figure(
                picture(photo_bytes(on_white(rgba)), alt, size),
                Html("<b>W(x) in color</b>, on white"),
            )
        )
    panels = [element("div", *large, class_="panels large")]
    if others:
        small = [map_figure(method, maps[method], scales[method][row], name) for method in others]
        panels.append(element("div", *small, class_="panels"))
    return panels


def _sum(sums: Sums) -> Html:
    """Completeness as arithmetic that anyone can check."""
    values = {
        "Σ contributions": sums.contributions,
        "residual": sums.residual,
        "bias": sums.bias,
    }
    terms = " + ".join(f"{name} <b>{signed(value)}</b>" for name, value in values.items())
    return Html(
        f'<p class="sum">{terms} = logit <b>{signed(sums.logit)}</b>, '
        f"to within {sums.completeness_error:.1e}</p>"
    )


def _skipped(skipped: Sequence[Skipped]) -> Html:
    heading = element("h2", text("Files that could not be read"), id="skipped")
    if not skipped:
        content = paragraph("None: every file was a picture.")
    else:
        rows = [(item.key, item.reason) for item in skipped]
        content = table(f"{len(skipped)} left out.", ("File", "Reason"), rows)
    return element("section", heading, content, aria_labelledby="skipped")

"""The HTTP API: a named endpoint a question, without state between requests."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.report.explain_html import TOP
from bcosvit.report.figures import (
    RGB,
    colors,
    method_image,
    on_white,
    overlay_image,
    photo_image,
    png_bytes,
)
from bcosvit.web.answers import Answers, Box
from bcosvit.web.exports import export
from bcosvit.web.gradio_parts import handed_out, queued, told, upload


def add_api(answers: Answers) -> None:
    """Endpoints of the ``gr.Blocks`` that is being built; nothing of them is seen on the page."""
    made = gr.File(visible=False)

    def model() -> dict[str, Any]:
        """The model that answers: its classes, methods and input."""
        predictor = answers.predictor
        return {
            "model": predictor.describe(),
            "weights": Path(predictor.weights).name,
            "classes": list(predictor.class_names),
            "methods": list(answers.methods),
            "image_size": predictor.transform.image_size,
            "exact": answers.exact,
        }

    def predict(picture: str | None, top: float) -> dict[str, Any]:
        """The surest classes of a picture."""
        if top < 1:
            raise ValueError(f"top = {top:g} is not allowed: give an integer >= 1.")
        found = answers.predict(answers.open(picture))
        return {"top": [answers.entry(found, label) for label in found.top(int(top))]}

    def explain(
        picture: str | None, label: str, method: str, overlay: float, joint: bool
    ) -> tuple[dict[str, Any], str | None, str | None, str | None]:
        """A class of a picture explained: numbers, the map, the map on the photo, W(x) in color.

        A label is a name or a number, "" the surest class; a method is one that the model lists,
        "" the first of them. Sums are given for B-cos models.
        """
        opened = answers.open(picture)
        index = answers.label(label, opened)
        shown = answers.explain(opened, index, method or None, joint=joint)
        found = shown.found
        numbers = answers.entry(found, index) | {"method": shown.method, "scale": shown.scale}
        if answers.exact:
            numbers |= asdict(answers.sums(opened, index))
        map_ = method_image(shown.method, shown.map, shown.scale)
        photo = photo_image(found.image)
        over = overlay_image(photo, shown.method, shown.map, shown.scale, alpha=overlay)
        own = found.exact
        colored = None if own is None else on_white(colors(own, shown.row))
        return numbers, png("map", map_), png("overlay", over), png("colors", colored)

    def png(name: str, image: RGB | None) -> str | None:
        def make(folder: Path) -> Path:
            assert image is not None
            path = folder / f"{name}.png"
            path.write_bytes(png_bytes(image))
            return path

        return None if image is None else handed_out(made, make)

    def region(
        picture: str | None,
        label: str,
        x: float | None,
        y: float | None,
        width: float | None,
        height: float | None,
    ) -> dict[str, Any]:
        """What a box contributes to a class, in pixels of the picture as the model sees it."""
        opened = answers.open(picture)
        index = answers.label(label, opened)
        box = Box.of((x, y, width, height))
        if box is None:
            raise ValueError("A box needs four numbers: give x, y, width and height.")
        found = answers.region(opened, index, box)
        return answers.entry(answers.predict(opened), index) | asdict(found)

    def report(pictures: list[str] | None, label: str, methods: str, kind: str) -> str:
        """One file about pictures: html, npz (a zip file of several) or png."""
        opened = [answers.open(path) for path in answers.limited(pictures)]
        chosen = [(each, answers.label(label, each)) for each in opened]
        return handed_out(made, partial(export, answers, chosen, methods, kind))

    with gr.Column(visible=False):
        one, several = upload(visible=False), upload(visible=False, file_count="multiple")
        label, method = gr.Textbox("", visible=False), gr.Textbox("", visible=False)
        overlay = gr.Number(0.75, visible=False)
        joint = gr.Checkbox(False, visible=False)
        kind = gr.Textbox("html", visible=False)
        top = gr.Number(TOP, visible=False)
        edges = [gr.Number(visible=False) for _ in range(4)]
        images = [gr.File(visible=False) for _ in range(3)]
        numbers = gr.JSON(visible=False)
        for function, inputs, outputs in (
            (model, [], [numbers]),
            (predict, [one, top], [numbers]),
            (explain, [one, label, method, overlay, joint], [numbers, *images]),
            (region, [one, label, *edges], [numbers]),
            (report, [several, label, method, kind], [made]),
        ):
            gr.Button(visible=False).click(
                told(function),
                inputs,
                outputs,
                api_name=function.__name__,
                **queued(answers.limits),
            )

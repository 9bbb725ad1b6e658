"""The HTTP API: named endpoints without state between requests."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.attribution import METHODS
from bcosvit.report.explain import TOP
from bcosvit.report.images import (
    RGB,
    method_image,
    overlay_image,
    photo_image,
    png_bytes,
    weight_image,
)
from bcosvit.web.components import downloadable, queue_options, upload_component, with_messages
from bcosvit.web.service import Box, ExplanationService


def add_api(service: ExplanationService) -> None:
    """Adds the endpoints to the ``gr.Blocks`` that is being built; the page does not show them."""
    made = gr.File(visible=False)

    def model() -> dict[str, Any]:
        """Describes the model: its classes, methods and input."""
        predictor = service.predictor
        return {
            "model": predictor.describe(),
            "weights": Path(predictor.weights).name,
            "classes": list(predictor.class_names),
            "methods": list(service.methods),
            "costs": {name: METHODS.get(name).cost for name in service.methods},
            "image_size": predictor.transform.image_size,
            "exact": service.exact is not None,
        }

    def predict(picture: str | None, top: float) -> dict[str, Any]:
        """Predicts the most confident classes of a picture."""
        if top < 1:
            raise ValueError(f"top = {top:g} is not allowed: give an integer >= 1.")
        found = service.predict(service.open(picture))
        return {"top": [service.entry(found, label) for label in found.top(int(top))]}

    def explain(
        picture: str | None, label: str, method: str, overlay: float, joint: bool
    ) -> tuple[dict[str, Any], str | None, str | None, str | None]:
        """Explains a class of a picture: numbers, the map, the map on the photo, W(x) in color.

        A label is a name or a number, and "" is the most confident class; a method is one that
        /model lists, and "" is the first of them. Sums are given for B-cos models.
        """
        opened = service.open(picture)
        index = service.find_class(label, opened)
        shown = service.explain(opened, index, method or None, joint=joint)
        found = shown.found
        numbers = service.entry(found, index) | {"method": shown.method, "scale": shown.scale}
        if service.exact is not None:
            numbers |= asdict(service.sums(opened, index))
        map_ = method_image(shown.method, shown.map, shown.scale)
        photo = photo_image(found.image)
        over = overlay_image(photo, shown.method, shown.map, shown.scale, alpha=overlay)
        colored = weight_image(found.exact, shown.row)
        return numbers, png("map", map_), png("overlay", over), png("colors", colored)

    def png(name: str, image: RGB | None) -> str | None:
        def write(folder: Path) -> Path:
            assert image is not None
            path = folder / f"{name}.png"
            path.write_bytes(png_bytes(image))
            return path

        return None if image is None else downloadable(made, write)

    def region(
        picture: str | None,
        label: str,
        x: float | None,
        y: float | None,
        width: float | None,
        height: float | None,
    ) -> dict[str, Any]:
        """Sums what a box contributes to a class, in pixels of the picture as the model sees it."""
        opened = service.open(picture)
        index = service.find_class(label, opened)
        box = Box.of((x, y, width, height))
        if box is None:
            raise ValueError("A box needs four numbers: give x, y, width and height.")
        found = service.region(opened, index, box)
        return service.entry(service.predict(opened), index) | asdict(found)

    def report(pictures: list[str] | None, label: str, methods: str, kind: str) -> str:
        """Writes one file about pictures: html, npz (several as a ZIP file) or png."""
        opened = [service.open(path) for path in service.check_count(pictures)]
        chosen = [(each, service.find_class(label, each)) for each in opened]
        return downloadable(made, partial(service.write_file, chosen, methods, kind))

    with gr.Column(visible=False):
        one = upload_component(visible=False)
        several = upload_component(visible=False, file_count="multiple")
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
                with_messages(function),
                inputs,
                outputs,
                api_name=function.__name__,
                **queue_options(service.limits),
            )

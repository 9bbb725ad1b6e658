"""The HTTP API: named endpoints without state between requests."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.report.explain import TOP
from bcosvit.report.images import RGB, png_bytes
from bcosvit.web import answers
from bcosvit.web.components import QUEUE, downloadable, upload_component, with_messages
from bcosvit.web.service import FILES, ExplanationService

ENDPOINTS: dict[str, dict[str, str]] = {
    "model": {},
    "predict": {"picture": "picture", "top": "number"},
    "explain": {
        "picture": "picture",
        "label": "text",
        "method": "text",
        "overlay": "number",
        "joint": "switch",
        "strict": "switch",
    },
    "region": {
        "picture": "picture",
        "label": "text",
        **dict.fromkeys(("x", "y", "width", "height"), "number"),
        "strict": "switch",
    },
    "report": {
        "pictures": "pictures",
        "label": "text",
        "methods": "text",
        "kind": "text",
        "strict": "switch",
    },
}
"""The arguments of each endpoint, with what they are. ``strict`` may be left out."""

META = {"_type": "gradio.FileData"}
"""By what Gradio tells an uploaded file from other objects."""

_KINDS = {
    "text": "a text",
    "number": "a finite number",
    "switch": "true or false",
    "picture": 'an uploaded file, such as {"path": …, "meta": {"_type": "gradio.FileData"}}',
    "pictures": "a list of uploaded files",
}


def all_arguments(endpoint: str | None, given: Any) -> Any:
    """Returns the arguments of a call, with ``strict`` where a list ends before it."""
    kinds = list(ENDPOINTS.get(endpoint or "", ()))
    if isinstance(given, list) and kinds[-1:] == ["strict"] and len(given) == len(kinds) - 1:
        return [*given, False]
    return given


def check_call(service: ExplanationService, endpoint: str, given: Any) -> None:
    """Checks the arguments of a call before anything is computed.

    Args:
        service: What is asked.
        endpoint: Its name.
        given: The arguments, as a list in order or by name.

    Raises:
        LookupError: If there is no such endpoint.
        ValueError: If an argument is missing or wrong.
    """
    if endpoint not in ENDPOINTS:
        known = ", ".join(f"/{name}" for name in ENDPOINTS)
        raise LookupError(f"There is no endpoint {endpoint[:64]!r}; choose from {known}.")
    kinds = ENDPOINTS[endpoint]
    given = all_arguments(endpoint, given)
    if isinstance(given, dict):
        if unknown := [name for name in given if name not in kinds]:
            raise ValueError(
                f"/{endpoint} has no argument {str(unknown[0])[:64]!r}; it takes "
                f"{', '.join(kinds) or 'none'}."
            )
        arguments = given
    else:
        if len(given) != len(kinds):
            raise ValueError(
                f"/{endpoint} takes {len(kinds)} arguments ({', '.join(kinds) or 'none'}), and "
                f"{len(given)} were given; send all of them in this order."
            )
        arguments = dict(zip(kinds, given, strict=True))
    for name, value in arguments.items():
        if not _is_of(kinds[name], value):
            raise ValueError(f"{name} is wrong: give {_KINDS[kinds[name]]}.")
    if label := arguments.get("label", ""):
        service.find_label(label)
    if (method := arguments.get("method", "")) or (method := arguments.get("methods", "")):
        service.predictor.methods(method)
    if (kind := arguments.get("kind", "html")) not in FILES:
        raise ValueError(f"There is no kind of file {kind!r}; choose from {', '.join(FILES)}.")


def _is_of(kind: str, value: Any) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "switch":
        return isinstance(value, bool)
    if kind == "number":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Integers may be larger than any float.
        return value is None or (number and abs(value) <= sys.float_info.max)
    if kind == "pictures":
        many = value or []
        return isinstance(many, list) and all(_is_of("picture", each) for each in many)
    if value is None:
        return True
    if not isinstance(value, dict) or value.get("meta") != META:
        return False
    path = value.get("path")
    return isinstance(path, str) and len(path) < 1000 and "://" not in path and "\0" not in path


def endpoint_functions(
    service: ExplanationService, made: gr.components.Component
) -> dict[str, Callable[..., Any]]:
    """Returns what each endpoint computes.

    Args:
        service: What is asked.
        made: The component that offers files.

    Returns:
        Functions by the names of `ENDPOINTS`, with the arguments that these have.
    """

    def model() -> dict[str, Any]:
        """Describes the model: its classes, methods and input."""
        return answers.model(service)

    def predict(picture: str | None, top: float | None) -> dict[str, Any]:
        """Predicts the most confident classes of a picture."""
        return answers.predict(service, picture, top)

    def explain(
        picture: str | None,
        label: str,
        method: str,
        overlay: float | None,
        joint: bool,
        strict: bool,
    ) -> tuple[dict[str, Any], str | None, str | None, str | None]:
        """Explains a class of a picture: numbers, the map, the map on the photo, W(x) in color.

        A label is a name or a number, and "" is the most confident class; a method is one that
        /model lists, and "" is the first of them. Sums are given for B-cos models; if strict,
        contributions that miss the logit beyond rounding are an error.
        """
        if overlay is None:
            raise ValueError("overlay is missing: give a number from 0 to 1.")
        found = answers.explain(service, picture, label, method, joint=joint, strict=strict)
        images = found.images(overlay)
        drawing, over, colors = (png(name, image) for name, image in images.items())
        return found.numbers, drawing, over, colors

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
        strict: bool,
    ) -> dict[str, Any]:
        """Sums what a box contributes to a class, in pixels of the picture as the model sees it."""
        return answers.region(service, picture, label, (x, y, width, height), strict=strict)

    def report(
        pictures: list[str] | None, label: str, methods: str, kind: str, strict: bool
    ) -> str:
        """Writes one file about pictures: html, npz (several as a ZIP file) or png."""
        opened = [service.open(path) for path in service.check_count(pictures)]
        chosen = [(each, service.find_class(label, each)) for each in opened]
        if strict and service.exact is not None:
            for each, index in chosen:
                service.incompleteness(each, index, strict=True)
        return downloadable(made, partial(service.write_file, chosen, methods, kind))

    return {each.__name__: each for each in (model, predict, explain, region, report)}


def add_api(service: ExplanationService) -> None:
    """Adds the endpoints to the ``gr.Blocks`` that is being built; the page does not show them."""
    made = gr.File(visible=False)
    functions = endpoint_functions(service, made)
    with gr.Column(visible=False):
        one = upload_component(visible=False)
        several = upload_component(visible=False, file_count="multiple")
        label, method = gr.Textbox("", visible=False), gr.Textbox("", visible=False)
        overlay = gr.Number(0.75, visible=False)
        joint, strict = (gr.Checkbox(False, visible=False) for _ in range(2))
        kind = gr.Textbox("html", visible=False)
        top = gr.Number(TOP, visible=False)
        edges = [gr.Number(visible=False) for _ in range(4)]
        images = [gr.File(visible=False) for _ in range(3)]
        numbers = gr.JSON(visible=False)
        for name, inputs, outputs in (
            ("model", [], [numbers]),
            ("predict", [one, top], [numbers]),
            ("explain", [one, label, method, overlay, joint, strict], [numbers, *images]),
            ("region", [one, label, *edges, strict], [numbers]),
            ("report", [several, label, method, kind, strict], [made]),
        ):
            gr.Button(visible=False).click(
                with_messages(functions[name]),
                inputs,
                outputs,
                api_name=name,
                **QUEUE,
            )

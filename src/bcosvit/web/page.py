"""The page: what is on it, and what happens when something is touched."""

from functools import partial
from typing import Any

import gradio as gr

from bcosvit.attribution import method_title
from bcosvit.data.images import EXTENSIONS
from bcosvit.report.explain_html import TOP
from bcosvit.web import panels, style
from bcosvit.web.answers import Answers
from bcosvit.web.desk import JOINT, OWN, START, Desk, Visit
from bcosvit.web.exports import KINDS
from bcosvit.web.gradio_parts import handed_out, queued, told, upload


def add_page(answers: Answers) -> None:
    """Components and events of the ``gr.Blocks`` that is being built."""
    desk, names = Desk(answers=answers), answers.predictor.class_names
    listed = min(TOP, len(names))

    def html(content: str = "", **options: Any) -> gr.HTML:
        return gr.HTML(content, **{"apply_default_css": False, "js_on_load": None, **options})

    html(panels.header(answers.predictor))
    note = gr.JSON(START, visible="hidden", elem_id="note")
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            files = upload(
                label=f"Photos, up to {answers.limits.pictures}",
                file_count="multiple",
                file_types=sorted(EXTENSIONS),
                height=160,
                elem_id="upload",
            )
            strip = html(js_on_load=style.CHOOSE, elem_id="pictures")
            with gr.Column(visible=False) as choice:
                classes = html(js_on_load=style.CHOOSE, elem_id="classes")
                other = gr.Dropdown(
                    [(name, number) for number, name in enumerate(names)],
                    value=None,
                    label="Any class",
                    elem_id="other",
                )
        with gr.Column(scale=3, min_width=320):
            nothing = html(panels.empty(panels.NOTHING))
            with gr.Column(visible=False, elem_id="results") as results:
                title = html(elem_id="title")
                # Where nothing adds up there is nothing to measure.
                drawn = {"js_on_load": style.DRAW, "elem_classes": "drawn"} if answers.exact else {}
                views = html(elem_id="views", **drawn)
                with gr.Row(elem_id="look"):
                    alpha = gr.Slider(0, 1, 0.75, step=0.05, label="Overlay", elem_id="overlay")
                    scale = gr.Radio(
                        [OWN, JOINT],
                        value=OWN,
                        label="Color scale",
                        info=f"Joint: one scale for the {listed} surest classes.",
                        elem_id="scale",
                    )
                with gr.Column(visible=answers.exact, elem_id="exact"):
                    html(panels.heading("Does it add up?", panels.ADDS_UP))
                    sums = html(elem_id="sums")
                    html(panels.heading("What does a region contribute?", panels.REGION))
                    with gr.Row(elem_id="box"):
                        edges = [
                            gr.Number(label=name, precision=0, min_width=60, elem_id=f"box-{name}")
                            for name in ("x", "y", "width", "height")
                        ]
                    region = html(elem_id="region")
                html(panels.heading("What do other methods say?", panels.METHODS))
                methods = gr.CheckboxGroup(
                    [(method_title(name), name) for name in answers.methods[1:]],
                    label="Compare with",
                    elem_id="methods",
                )
                compared = html(elem_id="compared")
                html(panels.heading("Download", panels.DOWNLOAD))
                with gr.Row():
                    saves = {
                        kind: gr.Button(kind.upper(), min_width=80, elem_id=f"save-{kind}")
                        for kind in KINDS
                    }
                made = gr.DownloadButton(visible="hidden", elem_id="fetch")

    def receive(paths: list[str] | None) -> list[Any]:
        visit, content = desk.receive(paths)
        some = visit is not None
        shown = [gr.update(visible=some), gr.update(visible=some), gr.update(visible=not some)]
        listed = [START, content, ""] if visit is None else listing(visit, content)
        return [*listed, None, *shown, *[None] * len(edges)]

    def listing(visit: Visit, *more: Any) -> list[Any]:
        return [visit.note(), *more, desk.classes(visit)]

    def turn(paths: list[str] | None, note: Any, event: gr.EventData) -> list[Any]:
        return [*listing(desk.visit(paths, {**note, "at": event._data["index"]})), None]

    def choose(paths: list[str] | None, note: Any, event: gr.EventData) -> list[Any]:
        return [desk.visit(paths, note).with_label(event._data["index"]).note(), None]

    def name(paths: list[str] | None, note: Any, label: int | None) -> list[Any]:
        visit = desk.visit(paths, note)
        return listing(visit if label is None else visit.with_label(label))

    def draw(paths: list[str] | None, note: Any, event: gr.EventData) -> list[Any]:
        box = [event._data[name] for name in ("x", "y", "width", "height")]
        return [*box, desk.measure(desk.visit(paths, note), *box)]

    def save(kind: str, paths: list[str] | None, note: Any, methods: list[str]) -> str:
        return handed_out(made, partial(desk.save, kind, desk.visit(paths, note), methods))

    def listener(function: Any, inputs: Any, outputs: Any, **options: Any) -> dict[str, Any]:
        return {
            "fn": told(function, as_html=True),
            "inputs": inputs,
            "outputs": outputs,
            "api_visibility": "private",
            "show_progress": "hidden",
            **queued(answers.limits),
            **options,
        }

    own = [files, note]
    look = listener(desk.look, [*own, alpha, scale, *edges], [title, views, sums, region])
    compare = listener(desk.compare, [*own, methods, scale], compared, show_progress="minimal")
    # A slider that is dragged, or a number that is typed, asks for the last value alone.
    lately: dict[str, Any] = {"trigger_mode": "always_last"}
    received = [note, strip, classes, other, choice, results, nothing, *edges]
    changed = [
        files.change(
            **listener(receive, files, received, show_progress="minimal", show_progress_on=files)
        ),
        strip.select(**listener(turn, own, [note, classes, other])),
        classes.select(**listener(choose, own, [note, other])),
        other.input(**listener(name, [*own, other], [note, classes])),
    ]
    for event in changed:
        event.success(**look).success(**compare)
    alpha.change(**look, **lately)
    scale.change(**look).success(**compare)
    for edge in edges:
        edge.input(**look, **lately)
    views.input(**listener(draw, own, [*edges, region]))
    methods.change(**compare, **lately)
    for kind, button in saves.items():
        button.click(
            **listener(partial(save, kind), [*own, methods], made, show_progress="minimal")
        ).success(None, js=style.FETCH, api_visibility="private")

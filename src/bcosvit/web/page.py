"""The layout of the page and its events."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.attribution import METHODS
from bcosvit.data.images import EXTENSIONS
from bcosvit.report.explain import TOP
from bcosvit.web import render
from bcosvit.web.components import QUEUE, downloadable, upload_component, with_messages
from bcosvit.web.service import FILES, ExplanationService
from bcosvit.web.session import EMPTY, INDEPENDENT, JOINT, PageEvents, Selection

STATIC = Path(__file__).parent / "static"
"""The style sheet and the scripts of components."""

_EDGES = ("x", "y", "width", "height")
_CLICK_DOWNLOAD = """() => document.querySelector("#download").click()"""


def add_page(service: ExplanationService) -> None:
    """Adds components and events to the ``gr.Blocks`` that is being built."""
    events, names = PageEvents(service=service), service.predictor.class_names
    listed_names = [(name, number) for number, name in enumerate(names)]
    listed, exact = min(TOP, len(names)), service.exact is not None
    choose, draw_box = ((STATIC / name).read_text() for name in ("choose.js", "draw.js"))

    def html(content: str = "", **options: Any) -> gr.HTML:
        return gr.HTML(content, **{"apply_default_css": False, "js_on_load": None, **options})

    html(render.header(service.predictor), js_on_load=(STATIC / "search.js").read_text())
    state = gr.JSON(EMPTY, visible="hidden", elem_id="state")
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            files = upload_component(
                label=f"Photos, up to {service.limits.pictures}",
                file_count="multiple",
                file_types=sorted(EXTENSIONS),
                height=160,
                elem_id="upload",
            )
            html(render.camera(), js_on_load=(STATIC / "camera.js").read_text(), elem_id="camera")
            examples = html(render.examples(), js_on_load=choose, elem_id="examples")
            thumbnails = html(js_on_load=choose, elem_id="pictures")
            with gr.Column(visible=False) as choice:
                classes = html(js_on_load=choose, elem_id="classes")
                other = gr.Dropdown(
                    listed_names,
                    value=None,
                    label="Any class",
                    elem_id="other",
                )
                versus = gr.Dropdown(
                    [("nothing: all evidence", -1), *listed_names],
                    value=None,
                    label="Rather than",
                    info="What speaks for the class rather than for this one, exactly.",
                    visible=exact,
                    elem_id="versus",
                )
        with gr.Column(scale=3, min_width=320):
            nothing = html(render.empty(render.NOTHING))
            with gr.Column(visible=False, elem_id="results") as results:
                title = html(elem_id="title")
                # Regions are measured only where contributions sum to the logit.
                drawn = {"js_on_load": draw_box, "elem_classes": "drawn"} if exact else {}
                views = html(elem_id="views", **drawn)
                with gr.Row(elem_id="look"):
                    alpha = gr.Slider(0, 1, 0.75, step=0.05, label="Overlay", elem_id="overlay")
                    scale = gr.Radio(
                        [INDEPENDENT, JOINT],
                        value=INDEPENDENT,
                        label="Color scale",
                        info=f"Joint: one scale for the {listed} most confident classes.",
                        elem_id="scale",
                    )
                with gr.Column(visible=exact, elem_id="exact"):
                    html(render.heading("Do contributions sum to the logit?", render.SUMS))
                    sums = html(elem_id="sums")
                    html(render.heading("What does a region contribute?", render.REGION))
                    with gr.Row(elem_id="box"):
                        edges = [
                            gr.Number(label=name, precision=0, min_width=60, elem_id=f"box-{name}")
                            for name in _EDGES
                        ]
                    region = html(elem_id="region")
                html(render.heading("How do other methods explain it?", render.METHODS))
                methods = gr.CheckboxGroup(
                    [(_method_label(name), name) for name in service.methods[1:]],
                    label="Compare with",
                    elem_id="methods",
                )
                compared = html(elem_id="compared")
                html(render.heading("Download", render.DOWNLOAD))
                with gr.Row():
                    saves = {
                        kind: gr.Button(kind.upper(), min_width=80, elem_id=f"save-{kind}")
                        for kind in FILES
                    }
                made = gr.DownloadButton(visible="hidden", elem_id="download")

    def upload(paths: list[str] | None) -> list[Any]:
        selection, content = events.upload(paths)
        some = selection is not None
        shown = [gr.update(visible=some), gr.update(visible=some), gr.update(visible=not some)]
        listed = [EMPTY, content, ""] if selection is None else listing(selection, content)
        return [*listed, None, *shown, *[None] * len(edges)]

    def choose_example(event: gr.EventData) -> list[str]:
        path = render.EXAMPLES[event._data["index"]]
        return [downloadable(files, lambda folder: shutil.copy(path, folder / path.name))]

    def listing(selection: Selection, *more: Any) -> list[Any]:
        return [selection.state(), *more, events.classes(selection)]

    def choose_picture(paths: list[str] | None, state: Any, event: gr.EventData) -> list[Any]:
        chosen = {**state, "current": event._data["index"]}
        return [*listing(events.selection(paths, chosen)), None]

    def choose_class(paths: list[str] | None, state: Any, event: gr.EventData) -> list[Any]:
        selection = events.selection(paths, state)
        return [selection.with_label(event._data["index"]).state(), None]

    def choose_other(paths: list[str] | None, state: Any, label: int | None) -> list[Any]:
        selection = events.selection(paths, state)
        return listing(selection if label is None else selection.with_label(label))

    def draw(paths: list[str] | None, state: Any, event: gr.EventData) -> list[Any]:
        box = [event._data[name] for name in _EDGES]
        return [*box, events.region(events.selection(paths, state), *box)]

    def save(kind: str, paths: list[str] | None, state: Any, methods: list[str]) -> str:
        selection = events.selection(paths, state)
        return downloadable(made, partial(events.save, kind, selection, methods))

    def listener(function: Any, inputs: Any, outputs: Any, **options: Any) -> dict[str, Any]:
        return {
            "fn": with_messages(function, as_html=True),
            "inputs": inputs,
            "outputs": outputs,
            "api_visibility": "private",
            "show_progress": "hidden",
            **QUEUE,
            **options,
        }

    own = [files, state]
    show = listener(events.show, [*own, alpha, scale, versus, *edges], [title, views, sums, region])
    examples.select(**listener(choose_example, [], files, show_progress="minimal"))
    compare = listener(events.compare, [*own, methods, scale], compared, show_progress="minimal")
    # While a slider is dragged or a number is typed, only the last value counts.
    last: dict[str, Any] = {"trigger_mode": "always_last"}
    uploaded = [state, thumbnails, classes, other, choice, results, nothing, *edges]
    changed = [
        files.change(
            **listener(upload, files, uploaded, show_progress="minimal", show_progress_on=files)
        ),
        thumbnails.select(**listener(choose_picture, own, [state, classes, other])),
        classes.select(**listener(choose_class, own, [state, other])),
        other.input(**listener(choose_other, [*own, other], [state, classes])),
    ]
    for event in changed:
        event.success(**show).success(**compare)
    alpha.change(**show, **last)
    versus.input(**show, **last)
    scale.change(**show).success(**compare)
    for edge in edges:
        edge.input(**show, **last)
    views.input(**listener(draw, own, [*edges, region]))
    methods.change(**compare, **last)
    for kind, button in saves.items():
        button.click(
            **listener(partial(save, kind), [*own, methods], made, show_progress="minimal")
        ).success(None, js=_CLICK_DOWNLOAD, api_visibility="private")


def _method_label(name: str) -> str:
    method = METHODS.get(name)
    return f"{method.title} (slow)" if method.cost == "many" else method.title

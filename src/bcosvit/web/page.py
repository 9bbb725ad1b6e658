"""The layout of the page and its events."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.attribution import METHODS
from bcosvit.attribution.passes import Cancelled
from bcosvit.data.images import EXTENSIONS
from bcosvit.progress import duration
from bcosvit.report.explain import TOP
from bcosvit.web import render
from bcosvit.web.components import QUEUE, Latest, downloadable, upload_component, with_messages
from bcosvit.web.jobs import has_left
from bcosvit.web.render import fragments
from bcosvit.web.service import FILES, ExplanationService
from bcosvit.web.session import EMPTY, INDEPENDENT, JOINT, PageEvents, Selection

STATIC = Path(__file__).parent / "static"
"""The style sheet and the scripts of components."""

_EDGES = ("x", "y", "width", "height")
_CLICK_DOWNLOAD = """() => document.querySelector("#download").click()"""


def add_page(service: ExplanationService) -> None:
    """Adds components and events to the ``gr.Blocks`` that is being built."""
    events, names, latest = PageEvents(service=service), service.predictor.class_names, Latest()
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
            html(
                fragments.camera(),
                js_on_load=(STATIC / "camera.js").read_text(),
                elem_id="camera",
            )
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
            nothing = html(fragments.empty(render.NOTHING))
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
                    html(fragments.heading("Do contributions sum to the logit?", render.SUMS))
                    sums = html(elem_id="sums")
                    html(fragments.heading("What does a region contribute?", render.REGION))
                    with gr.Row(elem_id="box"):
                        edges = [
                            gr.Number(label=name, precision=0, min_width=60, elem_id=f"box-{name}")
                            for name in _EDGES
                        ]
                    region = html(elem_id="region")
                html(fragments.heading("How do other methods explain it?", render.METHODS))
                methods = gr.CheckboxGroup(
                    [(_method_label(service, name), name) for name in service.methods[1:]],
                    label="Compare with",
                    elem_id="methods",
                )
                working = html(elem_id="working")
                cancel = gr.Button("Cancel", visible=False, size="sm", elem_id="cancel")
                compared = html(elem_id="compared")
                html(fragments.heading("Download", render.DOWNLOAD))
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

    def compare_methods(
        paths: list[str] | None, state: Any, methods: list[str], scale: str, request: gr.Request
    ) -> Iterator[list[Any]]:
        own, left = latest.begin(str(request.session_hash)), has_left()

        def is_cancelled() -> bool:
            return own.stopped or left() or not own.is_latest()

        try:
            for maps, status in events.compare(paths, state, methods, scale, is_cancelled):
                if not own.is_latest():
                    return
                shown = gr.skip() if maps is None else maps
                yield [shown, status, gr.update(visible=bool(status))]
        except Cancelled:
            # A later request shows its own results in the same place.
            if own.is_latest():
                yield [gr.skip(), fragments.empty(render.STOPPED), gr.update(visible=False)]

    def stop(request: gr.Request) -> None:
        latest.stop(str(request.session_hash))

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
    # Of values that change while an earlier one is at work, the last one counts. Clicks bring data
    # of their own, which Gradio would forget, so that each is answered.
    last: dict[str, Any] = {"trigger_mode": "always_last"}
    each: dict[str, Any] = {"trigger_mode": "multiple"}
    shown = [title, views, sums, region]
    show = listener(events.show, [*own, alpha, scale, versus, *edges], shown, **last)
    examples.select(**listener(choose_example, [], files, show_progress="minimal", **each))
    compare = listener(
        compare_methods,
        [*own, methods, scale],
        [compared, working, cancel],
        show_progress="minimal",
        show_progress_on=compared,
        # A later request ends the earlier one.
        trigger_mode="multiple",
    )
    uploaded = [state, thumbnails, classes, other, choice, results, nothing, *edges]
    changed = [
        files.change(
            **listener(upload, files, uploaded, show_progress="minimal", show_progress_on=files)
        ),
        thumbnails.select(**listener(choose_picture, own, [state, classes, other], **each)),
        classes.select(**listener(choose_class, own, [state, other], **each)),
        other.input(**listener(choose_other, [*own, other], [state, classes], **last)),
    ]
    for event in changed:
        event.success(**show).success(**compare)
    alpha.change(**show)
    versus.input(**show)
    scale.change(**show).success(**compare)
    for edge in edges:
        edge.input(**show)
    views.input(**listener(draw, own, [*edges, region], **each))
    methods.change(**compare)
    cancel.click(**listener(stop, [], []))
    for kind, button in saves.items():
        button.click(
            **listener(partial(save, kind), [*own, methods], made, show_progress="minimal")
        ).success(None, js=_CLICK_DOWNLOAD, api_visibility="private")


def _method_label(service: ExplanationService, name: str) -> str:
    title = METHODS.get(name).title
    if not service.is_slow(name):
        return title
    seconds = service.seconds(name)
    return f"{title} (slow, {'less than 1 s' if seconds < 1 else f'about {duration(seconds)}'})"

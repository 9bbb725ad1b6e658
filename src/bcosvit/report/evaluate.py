"""`bcosvit evaluate`: measures a model and its explanations, and leaves tables and a report."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from bcosvit.data.dataset import labeled_images, open_source
from bcosvit.files import make_folder
from bcosvit.metrics import METRICS, Evaluation, Metric, configure, evaluate, obstacles
from bcosvit.metrics import Progress as Told
from bcosvit.predictor import Predictor
from bcosvit.report.evaluate_html import EvaluationAbout, evaluate_page
from bcosvit.report.provenance import command_line, versions

REPORT = "report.html"


def evaluate_weights(
    weights: str | Path,
    data: str | Path,
    *,
    out: str | Path,
    metrics: str = "all",
    methods: str = "all",
    split: str = "val",
    limit: int | None = None,
    grids: int = 250,
    images: int = 250,
    batch: int = 32,
    seed: int = 0,
    workers: int = 0,
    device: str = "auto",
    console: Console | None = None,
) -> Evaluation:
    """Measures the model in ``weights`` on ``data`` (see `open_source`).

    The folder ``out`` gets a table a metric, ``summary.json`` and ``report.html``. ``metrics`` are
    some of `METRICS` with commas between them, or "all" that the data and the model allow;
    ``methods`` as in `Predictor.methods`. ``limit`` draws so many pictures of the split.
    """
    predictor = Predictor.load(weights, device)
    chosen = predictor.methods(methods)
    source = open_source(data)
    pictures = labeled_images(
        source,
        split,
        predictor.class_names if predictor.has_class_names else None,
        predictor.transform,
        num_classes=len(predictor.class_names),
    )
    if limit is not None:
        pictures.limit(limit, seed)
    masks = pictures.masks()
    options = {"grids": grids, "images": images, "seed": seed}
    wanted = [_with_options(metric, options) for metric in METRICS.pick(metrics).values()]
    left_out = obstacles(wanted, predictor.model, pictures, has_masks=masks is not None)
    if metrics.strip() == "all":
        wanted = [metric for metric in wanted if metric.name not in left_out]
    elif left_out:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"{name} cannot be measured: {reason}; leave it out.")
    # Before the work rather than after it.
    make_folder(out)
    with _told(console) as progress:
        found = evaluate(
            predictor.model,
            pictures,
            chosen,
            metrics=wanted,
            masks=masks if any(metric.needs_masks for metric in wanted) else None,
            batch_size=batch,
            num_workers=workers,
            progress=progress,
        )
    found.write(out)
    about = EvaluationAbout(
        facts={
            "Model": predictor.describe(),
            "Weights": predictor.weights,
            "Data": f"{source.name}, split {split}, {len(pictures)} pictures",
        },
        config={"evaluation": dict(found.settings), "model": predictor.config},
        command=command_line(),
        versions=versions(),
        left_out=left_out,
        skipped=pictures.skipped(),
    )
    evaluate_page(Path(out, REPORT), found, about)
    return found


def _with_options(metric: Metric, options: Mapping[str, Any]) -> Metric:
    """``metric`` with those of the options that it has."""
    names = {field.name for field in dataclasses.fields(metric)}  # type: ignore[arg-type]
    return configure(metric, {name: value for name, value in options.items() if name in names})


@contextmanager
def _told(console: Console | None) -> Iterator[Told | None]:
    """Progress bars, one for each pass over the data, where somebody watches."""
    if console is None:
        yield None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what.capitalize())
            bars.update(tasks[what], completed=done, total=total)

        yield tell

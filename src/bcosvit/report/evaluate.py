"""`bcosvit evaluate`: measures a model and its explanations, and writes tables and a report."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID, TimeRemainingColumn
from rich.progress import Progress as ProgressBars

from bcosvit.attribution import describe_method
from bcosvit.data.dataset import Skipped
from bcosvit.data.masks import MaskFiles
from bcosvit.data.sources import open_source
from bcosvit.files import locked_folder
from bcosvit.messages import unknown
from bcosvit.metrics import (
    METRICS,
    Evaluation,
    Metric,
    Progress,
    configure,
    evaluate,
    obstacles,
)
from bcosvit.metrics.accuracy import class_accuracies
from bcosvit.metrics.loader import Images
from bcosvit.predictor import Predictor
from bcosvit.progress import PlainLines
from bcosvit.report.images import Picture, overlay_image, photo_image
from bcosvit.report.pages import write_page
from bcosvit.report.provenance import Provenance
from bcosvit.report.tables import confusion_matrix, metric_columns

REPORT = "report.html"
PRECISIONS = {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What a model may compute in, by the names that recipes use, too."""
DEFAULT_METRICS = "default"
"""Stands for the metrics that are measured unless others are named."""


def evaluate_weights(
    weights: str | Path,
    data: str | Path,
    *,
    out: str | Path,
    metrics: str = DEFAULT_METRICS,
    methods: str = "all",
    split: str = "val",
    limit: int | None = None,
    masks: str | Path | None = None,
    mask_values: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    device: str = "auto",
    precision: str = "32",
    console: Console | None = None,
) -> Evaluation:
    """Measures a model and its explanations, and writes tables and a report.

    Args:
        weights: A shipped model's name, or anything else that `bcosvit.load` takes.
        data: Anything that `open_source` takes.
        out: The folder for one CSV table per metric, ``summary.json`` and ``report.html``.
        metrics: Names of metrics, separated by commas; or of those that the data and model allow,
            "default" (`Metric.default`) or "all".
        methods: Names of methods, separated by commas, or "all" (`Predictor.methods`).
        split: The part of the data: "val", "train" or "all".
        limit: The number of pictures to draw at random; by default all are measured.
        masks: Masks of the objects, as for `bcosvit.data.masks.MaskFiles`; scenes have their own.
        mask_values: The values that mark the object in label images; by default all but 0.
        options: Values of options such as ``grids``, for each of the metrics that has them.
        batch_size: How many pictures pass through the model at once; by default as many as suit
            the device.
        seed: Of everything that is drawn at random.
        num_workers: How many processes read ahead.
        device: A device by name; ``"auto"`` is the accelerator where there is one.
        precision: What the model computes in: "32", "bf16" or "fp16".
        console: Where progress bars are shown.

    Returns:
        The results of all metrics.

    Raises:
        ValueError: If an argument is not allowed, or a metric that is named cannot be measured.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision = {precision!r} is not allowed: choose one of {', '.join(PRECISIONS)}."
        )
    predictor = Predictor.load(weights, device)
    predictor.model.to(PRECISIONS[precision])
    chosen = predictor.methods(methods)
    source = open_source(data, only_val=True)
    pictures = predictor.labeled(source, split, limit=limit, seed=seed)
    if masks is not None:
        pictures = pictures.with_masks(MaskFiles(masks, mask_values), source.classes)
    inside = pictures.masks()
    values = {**(options or {}), "seed": seed}
    _check_options(values)
    named = metrics.strip() not in (DEFAULT_METRICS, "all")
    wanted = [
        _with_options(metric, values)
        for metric in METRICS.pick(metrics if named else "all").values()
        if metric.default or metrics.strip() != DEFAULT_METRICS
    ]
    left_out = obstacles(wanted, predictor.model, pictures, has_masks=inside is not None)
    if not named:
        wanted = [metric for metric in wanted if metric.name not in left_out]
    elif left_out:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"{name} cannot be measured: {reason}; leave it out.")
    # A folder that cannot be written, or that is being written, is found before the work.
    with locked_folder(out):
        with progress_bars(console) as progress:
            found = evaluate(
                predictor.model,
                pictures,
                chosen,
                metrics=wanted,
                masks=inside if any(metric.needs_masks for metric in wanted) else None,
                batch_size=batch_size,
                num_workers=num_workers,
                progress=progress,
            )
        found.write(out)
        write_report(
            Path(out, REPORT),
            found,
            facts={
                "Model": predictor.describe(),
                "Weights": predictor.weights,
                "Data": f"{source.name}, split {split}, {len(pictures)} pictures",
                "Precision": str(PRECISIONS[precision]).removeprefix("torch."),
            },
            provenance=Provenance.of(
                {"evaluation": dict(found.settings), "model": predictor.config}
            ),
            left_out=left_out,
            skipped=pictures.skipped(),
            class_names=predictor.class_names,
            mistakes=explain_mistakes(predictor, pictures, found, chosen[0]),
        )
    return found


MISTAKES = 12
"""Mistakes that a report explains."""


def explain_mistakes(
    predictor: Predictor, pictures: Images, found: Evaluation, method: str
) -> list[dict[str, Any]]:
    """Explains the mistakes whose label the model finds least likely.

    Args:
        predictor: The model.
        pictures: The data.
        found: Its evaluation on them.
        method: The explanation method.

    Returns:
        What the report shows of each: it is explained for the predicted class and for the label.
    """
    wrong = [image for image in found.accuracy.predictions if not image.correct]
    wrong.sort(key=lambda image: (image.log_odds, image.key))
    shown = []
    for image in wrong[:MISTAKES]:
        picture = pictures[image.index][0]
        each = predictor.explain(picture, [image.predicted, image.label], methods=[method])
        photo, maps = photo_image(picture), each.attributions[method].map
        classes = [predictor.class_names[label] for label in (image.predicted, image.label)]
        shown.append(
            {
                "key": image.key,
                "classes": classes,
                "confidences": [
                    each.probabilities[n].item() for n in (image.predicted, image.label)
                ],
                "pictures": [
                    (Picture.of(photo, image.key), "Picture"),
                    *(
                        (
                            Picture.of(overlay_image(photo, method, map_), f"Evidence for {name}"),
                            f"For {name}",
                        )
                        for map_, name in zip(maps, classes, strict=True)
                    ),
                ],
            }
        )
    return shown


def write_report(
    path: str | Path,
    found: Evaluation,
    *,
    facts: Mapping[str, str],
    provenance: Provenance,
    left_out: Mapping[str, str] | None = None,
    skipped: Sequence[Skipped] = (),
    class_names: Sequence[str] = (),
    mistakes: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes the HTML report of an evaluation.

    Args:
        path: The file; the tables that it links to are beside it (`Evaluation.write`).
        found: The results.
        facts: What the report says about model, weights and data.
        provenance: How the report was made.
        left_out: The reasons by the names of metrics that were not measured.
        skipped: Pictures that could not be read.
        class_names: The model's classes; without, the report does not list them.
        mistakes: What `explain_mistakes` returns.
    """
    columns, methods = metric_columns(found), found.settings["methods"]
    seen = found.accuracy.predictions if class_names else []
    accuracies = class_accuracies([p.label for p in seen], [p.predicted for p in seen])
    write_page(
        path,
        "report/templates/evaluate.html.jinja",
        facts=facts,
        provenance=provenance,
        level=found.settings["bootstrap"]["level"],
        methods=methods,
        columns=columns,
        best={
            title: max(values, key=lambda method: values[method].mean) if values else None
            for title, values in columns.items()
        },
        # The rows that are pointed out.
        chosen=[row for row, method in enumerate(methods) if describe_method(method).exact],
        completeness=found.completeness,
        results=[(name, _title(name), result) for name, result in found.results.items()],
        left_out=[(_title(name), reason) for name, reason in (left_out or {}).items()],
        skipped=skipped,
        class_names=class_names,
        accuracies=accuracies,
        confusion=confusion_matrix(accuracies),
        mistakes=mistakes,
    )


def _title(metric: str) -> str:
    return METRICS.get(metric).title if metric in METRICS else metric


def _check_options(options: Mapping[str, Any]) -> None:
    known = {name for _, metric in METRICS.items() for name in _option_names(metric)}
    for name in options:
        if name not in known:
            raise ValueError(unknown("option of a metric", name, sorted(known)))


def _option_names(metric: Metric) -> set[str]:
    return {field.name for field in dataclasses.fields(metric)}  # type: ignore[arg-type]


def _with_options(metric: Metric, options: Mapping[str, Any]) -> Metric:
    """Sets those of the options that the metric has."""
    names = _option_names(metric)
    return configure(metric, {name: value for name, value in options.items() if name in names})


@contextmanager
def progress_bars(console: Console | None) -> Iterator[Progress | None]:
    """Progress bars, one for each pass over the data; plain lines where there is no terminal."""
    if console is None:
        yield None
        return
    if not console.is_terminal:
        lines: dict[str, PlainLines] = {}

        def say(done: int, total: int, name: str) -> None:
            if name not in lines:
                lines[name] = PlainLines(name.capitalize(), console)
            lines[name](done, total)

        yield say
        return
    columns = (*ProgressBars.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with ProgressBars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(done: int, total: int, name: str) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name.capitalize())
            bars.update(tasks[name], completed=done, total=total)

        yield show

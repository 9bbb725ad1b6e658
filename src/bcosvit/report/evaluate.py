"""`bcosvit evaluate`: measures a model and its explanations, and leaves tables and a report."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from bcosvit.data.dataset import LabeledImages, labeled_images, open_source
from bcosvit.files import make_folder
from bcosvit.messages import pick
from bcosvit.metrics import Evaluation, GridPointingGame, PixelPerturbation, evaluate
from bcosvit.metrics import Progress as Told
from bcosvit.metrics.localization import CELLS
from bcosvit.predictor import Predictor
from bcosvit.report.evaluate_html import METRICS, EvaluationAbout, evaluate_page
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
    wanted, left_out = _metrics(metrics, predictor, pictures)
    game = GridPointingGame(grids=grids, seed=seed) if "localization" in wanted else None
    perturbation = PixelPerturbation(images=images, seed=seed) if "perturbation" in wanted else None
    # Before the work rather than after it.
    make_folder(out)
    with _told(console) as progress:
        found = evaluate(
            predictor.model,
            pictures,
            chosen,
            localization=game,
            perturbation=perturbation,
            masks=pictures.masks() if "masks" in wanted else None,
            batch_size=batch,
            workers=workers,
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


def _metrics(
    given: str, predictor: Predictor, pictures: LabeledImages
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The metrics to measure, and why others are not; asked for by name they must be possible."""
    impossible: dict[str, str] = {}
    classes = min(pictures.num_classes(), len(predictor.class_names))
    if classes < CELLS:
        impossible["localization"] = f"a grid shows {CELLS} classes, and there are {classes}"
    if pictures.masks() is None:
        impossible["masks"] = "the data have no masks"
    if given == "all":
        return tuple(name for name in METRICS if name not in impossible), impossible
    wanted = pick(given, tuple(METRICS), "metric")
    for name in wanted:
        if name in impossible:
            raise ValueError(f"{name} cannot be measured: {impossible[name]}; leave it out.")
    return wanted, {}


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

"""Evaluates a model and its explanations by all metrics in as few passes as possible.

The data are read once for the predictions, which also decide what the other metrics look at (those
of an earlier call will do), once for all metrics that explain single images, and once for each
kind of metric that composes pictures of its own. Every method sees the same batch and shares its
forward work, and metrics that differ in what they make of the same pass share that. Nothing but
rows of numbers outlives a batch, and the results do not depend on how images are batched or shared
between processes.
"""

import csv
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcosvit.attribution import Method, explain_all, method_name
from bcosvit.files import atomic
from bcosvit.machine import choose_batch_size
from bcosvit.metrics.accuracy import Accuracy, AccuracyResult, predict
from bcosvit.metrics.base import (
    METRICS,
    ExplainedBatch,
    FromEncoded,
    Item,
    Metric,
    MetricResult,
    Prediction,
)
from bcosvit.metrics.kept import KeptScores
from bcosvit.metrics.loader import Batch, Images, Masks, Ranks, Reader
from bcosvit.metrics.statistics import Bootstrap
from bcosvit.models.base import AnyModel
from bcosvit.nn.cuda_graphs import with_cuda_graphs
from bcosvit.nn.views import unwrapped

Progress = Callable[[int, int, str], None]
"""Called with the images done, their total (of this process), and a name for the pass."""

DEFAULT_BOOTSTRAP = Bootstrap()

_Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """Whether contributions add up to what they explain."""

    explanations: int
    """How many explanations by exact methods were checked; no other method claims completeness."""
    worst: float
    """The largest |Σ contributions + residual + bias − logit|, as a share of the logit or the bias,
    whichever is larger: where contributions cancel out, either of them may be near zero."""

    def __str__(self) -> str:
        return (
            f"miss logits by at most {self.worst:.1e} of logit or bias, whichever is larger "
            f"({self.explanations} explanations)"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The results of all metrics."""

    results: Mapping[str, MetricResult]
    """By metric; ``accuracy`` is always there."""
    left_out: Mapping[str, str]
    """Registered metrics that could not be measured, with the reason."""
    completeness: Completeness | None = None
    """Of all explanations that were made for the metrics."""
    settings: Mapping[str, Any]
    """Methods and options of the metrics, fit for JSON."""

    @property
    def accuracy(self) -> AccuracyResult:
        """The result of the metric ``accuracy``."""
        found = self.results["accuracy"]
        assert isinstance(found, AccuracyResult)
        return found

    def __getitem__(self, metric: str) -> Any:
        """Returns the result of a metric by its name."""
        return self.results[metric]

    def summary(self) -> dict[str, Any]:
        """Returns every mean with its interval and what it is a mean of, fit for JSON."""
        found: dict[str, Any] = {name: part.summary() for name, part in self.results.items()}
        if self.completeness is not None:
            found["completeness"] = asdict(self.completeness)
        return {**found, "settings": dict(self.settings)}

    def write(self, folder: str | Path) -> None:
        """Writes one ``METRIC.csv`` per metric and ``summary.json``, each whole or absent.

        Where several processes evaluate, all hold the same results, so one of them should write.

        Args:
            folder: Where to; it is created if it does not exist.
        """
        for name, part in self.results.items():
            write_table(Path(folder, f"{name}.csv"), part.rows())
        write_summary(Path(folder, "summary.json"), self.summary())


def evaluate(
    model: AnyModel,
    data: Images,
    methods: Sequence[Method] = ("inherent",),
    *,
    metrics: Sequence[str | Metric] | None = None,
    masks: Masks | None = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    batch_size: int | None = None,
    num_workers: int = 0,
    progress: Progress | None = None,
    known: AccuracyResult | None = None,
    keep: KeptScores | None = None,
) -> Evaluation:
    """Evaluates a model and its explanations.

    Inside ``torch.distributed`` every process calls this with the same arguments, does its share
    of the work and gets the whole result.

    Args:
        model: The model, in evaluation mode.
        data: A map-style data set of (image [3, H, W], label, key).
        methods: Explanation methods, by name or as objects.
        metrics: Metrics by name or as objects; None stands for the default ones
            (`Metric.default`) that can be measured. Accuracy is always measured.
        masks: A function from a position in the data to the object's mask [H, W] or None.
        bootstrap: How to compute intervals.
        batch_size: How many images pass through the model at once, except for grids, where at
            least the four pictures of one grid do; by default as many as suit the device.
        num_workers: How many processes read ahead.
        progress: A function that is called after each batch.
        known: The accuracy that an earlier call found for this model and these data, which are
            then not predicted again.
        keep: Where scores are kept while others are computed, so that an evaluation that was
            stopped goes on when this is called again with the same arguments.

    Returns:
        The results of all metrics.

    Raises:
        ValueError: If the model is in training mode, a metric or method does not apply, the data
            are not what they were when they were first read, or several processes keep scores.

    Examples:
        >>> import torch, bcosvit
        >>> from bcosvit.metrics import PixelPerturbation, evaluate
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> config = bcosvit.ModelConfig(
        ...     width=12, depth=1, image_size=16, num_classes=2, backbone=stem
        ... )
        >>> model = bcosvit.create_model(config).eval()
        >>> data = [(torch.rand(3, 16, 16), n % 2, f"image {n}") for n in range(4)]
        >>> found = evaluate(model, data, metrics=[PixelPerturbation(images=2)])
        >>> found.accuracy.top5.mean
        1.0
    """
    model = unwrapped(model)
    if metrics is None:
        chosen = [metric for _, metric in METRICS.items() if metric.default]
    else:
        chosen = [METRICS.get(each) if isinstance(each, str) else each for each in metrics]
    left_out = obstacles(chosen, model, data, has_masks=masks is not None)
    if metrics is not None and left_out:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"{name} cannot be measured: {reason}; leave it out.")
    named = name_metrics([metric for metric in chosen if metric.name not in left_out])
    explaining = {name: metric for name, metric in named.items() if metric.explains}
    if batch_size is None:
        device = next(model.parameters()).device
        batch_size = choose_batch_size(device, model.config.image_size)
    _check(model, data, methods, batch_size, bool(explaining))
    if known is not None and known.images != len(data):
        raise ValueError(
            f"The accuracy that is known is of {known.images} images, and the data have "
            f"{len(data)}; give what evaluating this model on these very data has found."
        )
    ranks = Ranks.current()
    if keep is not None and ranks.count > 1:
        raise ValueError("Several processes cannot keep scores in one file; leave out keep.")
    run = _Run(
        model,
        data,
        methods,
        batch_size,
        num_workers,
        masks,
        ranks,
        progress,
        keep,
        # Two CUDA graphs: batches of predictions and those of metrics may differ in size.
        predicting=with_cuda_graphs(model, model.from_encoded),
        scoring=with_cuda_graphs(model, model.from_encoded),
    )
    if explaining:
        # A method that does not exist or apply is better found now than after all predictions.
        run.maps(*run.on_device(next(run.reader().read([0], 1))))
        run.missed.clear()
    if known is None:
        items = Accuracy().select(predictions := run.predictions())
        known = Accuracy().result(items, {}, bootstrap, len(predictions) - len(items))
    # Metrics that compose pictures in the same way share their explanations; single images last.
    groups: dict[tuple[Callable[..., Any], int], dict[str, Metric]] = {}
    for name, metric in explaining.items():
        groups.setdefault((type(metric).compose, metric.tiles), {})[name] = metric
    single = groups.pop((Metric.compose, 1), None)
    found: dict[str, MetricResult] = {}
    for group in [*groups.values(), *([single] if single else [])]:
        found |= _measure(run, group, known.predictions, bootstrap)
    for name, metric in named.items():
        if not metric.explains and name != "accuracy":
            items = metric.select(known.predictions)
            found[name] = metric.result(items, {}, bootstrap)
    return Evaluation(
        results={"accuracy": known} | {name: found[name] for name in named if name in found},
        left_out=left_out,
        completeness=run.completeness(),
        settings={
            "methods": [method_name(method) for method in methods],
            "metrics": {name: asdict(metric) for name, metric in named.items()},  # type: ignore[call-overload]
            "bootstrap": asdict(bootstrap),
        },
    )


def name_metrics(metrics: Sequence[Metric]) -> dict[str, Metric]:
    """Names metrics; where several are the same but for their options, these become part of it.

    Args:
        metrics: The metrics.

    Returns:
        The metrics by unique names.

    Examples:
        >>> from bcosvit.metrics import PixelPerturbation
        >>> list(name_metrics([PixelPerturbation(), PixelPerturbation(output="logit")]))
        ['perturbation', 'perturbation-output-logit']
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        name = metric.name
        if sum(each.name == name for each in metrics) > 1:
            default = asdict(type(metric)())  # type: ignore[call-overload]
            given = asdict(metric)  # type: ignore[call-overload]
            changed = [f"-{key}-{given[key]}" for key in given if given[key] != default[key]]
            name += "".join(changed)
        found[name] = metric
    return found


def obstacles(
    metrics: Sequence[Metric], model: AnyModel, data: Images, *, has_masks: bool
) -> dict[str, str]:
    """Finds the metrics that cannot be measured.

    Args:
        metrics: The metrics in question.
        model: The model.
        data: The data set; where it has a method ``num_classes``, that is asked, too.
        has_masks: Whether there are masks of the objects.

    Returns:
        The reason by the metric's name.
    """
    num_classes = model.config.num_classes
    if hasattr(data, "num_classes"):
        num_classes = min(num_classes, data.num_classes())
    found: dict[str, str] = {}
    for metric in metrics:
        reason = metric.obstacle(num_classes)
        if metric.needs_masks and not has_masks:
            reason = "the data have no masks"
        elif metric.needs_masks and metric.tiles > 1:
            reason = "masks are those of single images, and it shows several at once"
        if reason is not None:
            found[metric.name] = reason
    return found


@dataclass(frozen=True)
class _Run:
    """What every pass over the data needs."""

    model: AnyModel
    data: Images
    methods: Sequence[Method]
    batch_size: int
    num_workers: int
    masks: Masks | None
    ranks: Ranks
    progress: Progress | None
    keep: KeptScores | None
    predicting: FromEncoded
    scoring: FromEncoded
    missed: list[float] = field(default_factory=list)
    """By how much each explanation missed its logit (`Completeness.worst` is the largest)."""

    def reader(self, *, masks: bool = False) -> Reader:
        return Reader(
            data=self.data, masks=self.masks if masks else None, num_workers=self.num_workers
        )

    def on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and labels, where the model is."""
        reference = next(self.model.parameters())
        return batch.images.to(reference), batch.labels.to(reference.device)

    def maps(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Every method's attribution maps [B, H, W], or [B, C, H, W] of several classes."""
        found = explain_all(self.model, images, labels, self.methods, check=False)
        expected = (*labels.shape, *images.shape[-2:])
        for method, attribution in found.items():
            if attribution.map.shape != expected:
                raise ValueError(
                    f"Method {method} gave maps {list(attribution.map.shape)}, expected "
                    f"{list(expected)}; it must attribute to the images' pixels."
                )
            if attribution.map.isnan().any():
                raise ValueError(f"Method {method} gave a map with NaN, which cannot be ranked.")
            if attribution.residual is not None and attribution.logit is not None:
                # A model without a bias may give a logit of exactly zero.
                least = max(abs(attribution.bias), torch.finfo(torch.float32).tiny)
                size = attribution.logit.double().abs().clamp(min=least)
                self.missed.extend((attribution.completeness_error() / size).flatten().tolist())
        return {method: attribution.map for method, attribution in found.items()}

    def completeness(self) -> Completeness | None:
        """Of all explanations of all processes."""
        shares = self.ranks.gather([(len(self.missed), max(self.missed, default=0.0))])
        explanations = sum(count for count, _ in shares)
        if not explanations:
            return None
        return Completeness(explanations=explanations, worst=max(worst for _, worst in shares))

    def predictions(self) -> list[Prediction]:
        """Of all images, in their order."""
        mine = self.ranks.share(range(len(self.data)))
        batches = self._counted(mine, self.reader().read(mine, self.batch_size), "predictions")
        rows = [row for batch in batches for row in predict(self.model, batch, self.predicting)]
        return self.ranks.gather(rows)

    def again(
        self, images: Sequence[Prediction], batch_size: int, what: str, *, masks: bool
    ) -> Iterator[Batch]:
        """Reads ``images`` a second time, and makes sure that they are what they were."""
        indices = [image.index for image in images]
        known = iter(images)
        batches = self.reader(masks=masks).read(indices, batch_size)
        for batch in self._counted(indices, batches, what):
            for key, label in zip(batch.keys, batch.labels.tolist(), strict=True):
                before = next(known)
                if (key, label) != (before.key, before.label):
                    raise ValueError(
                        f"Image {before.index} was {before.key!r} with label {before.label} and "
                        f"is now {key!r} with label {label}; the data must not change."
                    )
            yield batch

    def _counted(
        self, indices: Sequence[int], batches: Iterator[Batch], what: str
    ) -> Iterator[Batch]:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.indices)
            if self.progress is not None:
                self.progress(done, len(indices), what)


def _measure(
    run: _Run,
    group: Mapping[str, Metric],
    predictions: Sequence[Prediction],
    bootstrap: Bootstrap,
) -> dict[str, MetricResult]:
    """Measures metrics that compose their pictures in the same way, e.g. all of single images."""
    selected = {name: metric.select(predictions) for name, metric in group.items()}
    # Single images in the order of the data, which reads fastest.
    items = list(dict.fromkeys(item for each in selected.values() for item in each))
    first, tiles = next((name, metric.tiles) for name, metric in group.items())
    if tiles == 1:
        items.sort(key=lambda item: item[0].index)
    wanted = {name: set(each) for name, each in selected.items()}
    mine = run.ranks.share(items)
    batch_size = tiles * max(1, run.batch_size // tiles)
    what = "explanations" if tiles == 1 else first
    done: dict[Item, dict[str, _Row]] = {}
    if run.keep is not None:
        done, missed = run.keep.read(group, mine)
        run.missed.extend(missed)
    lacking = [item for item in mine if item not in done]
    scored_now = 0
    shown = [image for item in lacking for image in item]
    needs_masks = any(metric.needs_masks for metric in group.values())
    for batch in run.again(shown, batch_size, what, masks=needs_masks):
        here = lacking[scored_now : scored_now + len(batch.indices) // tiles]
        scored_now += len(here)
        missed_before = len(run.missed)
        rows = _score_batch(run, group, batch, here, wanted)
        done |= zip(here, rows, strict=True)
        if run.keep is not None:
            run.keep.add(group, here, rows, run.missed[missed_before:])
    scored = dict(zip(items, run.ranks.gather([done[item] for item in mine]), strict=True))
    found: dict[str, MetricResult] = {}
    for name, metric in group.items():
        kept = [item for item in selected[name] if name in scored[item]]
        scores = _columns([scored[item][name] for item in kept])
        left_out = len(selected[name]) - len(kept)
        found[name] = metric.result(kept, scores, bootstrap, left_out)
    return found


def _score_batch(
    run: _Run,
    group: Mapping[str, Metric],
    batch: Batch,
    items: Sequence[Item],
    wanted: Mapping[str, set[Item]],
) -> list[dict[str, _Row]]:
    """The scores of every item by metric; a metric that does not look at an item has none."""
    first = next(iter(group.values()))
    tiles = first.tiles
    which = {
        name: [
            number
            for number, item in enumerate(items)
            if item in wanted[name] and not (metric.needs_masks and batch.masks[number] is None)
        ]
        for name, metric in group.items()
    }
    # Images that no metric asks for are not explained; `at` is where the maps of the others are.
    needed = sorted({number for numbers in which.values() for number in numbers})
    results: list[dict[str, _Row]] = [{} for _ in items]
    if not needed:
        return results
    images, labels = run.on_device(batch)
    pictures, targets = first.compose(
        images.unflatten(0, (-1, tiles))[needed], labels.unflatten(0, (-1, tiles))[needed]
    )
    maps = run.maps(pictures, targets)
    if targets.ndim == 2:
        pictures = pictures.repeat_interleave(targets.shape[1], 0)
        targets = targets.flatten()
        maps = {method: each.flatten(0, 1) for method, each in maps.items()}
    each = len(pictures) // len(needed)
    at = {number: position for position, number in enumerate(needed)}
    shared: dict[Hashable, Any] = {}
    for name, metric in group.items():
        numbers = which[name]
        if not numbers:
            continue
        rows = [at[number] * each + offset for number in numbers for offset in range(each)]
        inside = None
        if metric.needs_masks:
            masks = [mask for number in numbers if (mask := batch.masks[number]) is not None]
            inside = torch.stack(masks).to(images.device)
        scores = metric.score(
            ExplainedBatch(
                model=run.model,
                images=pictures[rows],
                labels=targets[rows],
                keys=[batch.keys[number * tiles] for number in numbers],
                maps={method: map_[rows] for method, map_ in maps.items()},
                masks=inside,
                batch_size=run.batch_size,
                from_encoded=run.scoring,
                methods=run.methods,
                shared=shared,
            )
        )
        for number, row in zip(numbers, _rows(scores), strict=True):
            results[number][name] = row
    return results


def _rows(columns: Mapping[str, Tensor]) -> list[_Row]:
    """One dict of plain numbers per item: what processes exchange."""
    values = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _columns(rows: Sequence[_Row]) -> dict[str, Tensor]:
    """The inverse of `_rows`, in float64; nothing from nothing."""
    names = rows[0] if rows else {}
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in names}


def _check(
    model: AnyModel, data: Images, methods: Sequence[Method], batch_size: int, explaining: bool
) -> None:
    if any(module.training for module in model.modules()):
        raise ValueError(
            "The model is in training mode, in which it would change while it is measured; "
            "call model.eval() first."
        )
    if isinstance(methods, str) or (explaining and not methods):
        raise ValueError(
            f"methods = {methods!r} is not allowed: give a sequence of names or explainers, "
            f"such as ('inherent',)."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} is not allowed: give an integer >= 1.")
    if not len(data):
        raise ValueError("The data set is empty; give at least one image.")


def write_table(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows of equal columns as CSV with all digits; without rows the file is empty.

    Texts that begin like a formula (``=``, ``+``, ``-``, ``@``, or a control character), such as
    names of files and classes, get an apostrophe before them, so that no spreadsheet computes them.
    """
    with (
        atomic(path) as temporary,
        # Keys are often file names, which need not be valid Unicode.
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow({name: _no_formula(value) for name, value in row.items()})


def _no_formula(value: Any) -> Any:
    is_formula = isinstance(value, str) and (value[:1] in set("=+-@") or value[:1] < " ")
    return f"'{value}" if value and is_formula else value


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Writes ``summary`` as indented JSON."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")

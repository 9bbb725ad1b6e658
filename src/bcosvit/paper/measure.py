"""Measurements of finished runs, cached beside them: each is taken once for all figures.

A result holds one number per image or grid, not only means, so that figures can resample them.
Every explanation method has a file of its own, which is named after a digest of everything that the
numbers depend on, the versions of the metric and of the method included. So a method that is new or
has changed is measured without measuring the others again. Scores are kept while a measurement is
taken, so that one that was stopped goes on where it was.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bcosvit.attribution import METHODS, explainers
from bcosvit.data.labeled import LabeledImages
from bcosvit.data.transforms import EvalTransform
from bcosvit.files import atomic
from bcosvit.machine import choose_batch_size
from bcosvit.metrics import (
    METRICS,
    AccuracyResult,
    Estimate,
    Evaluation,
    GridPointingGame,
    KeptScores,
    Metric,
    MetricResult,
    NotDefinedError,
    Prediction,
    configure,
    evaluate,
    most_confident,
    name_metrics,
    write_summary,
)
from bcosvit.models.base import create_model
from bcosvit.models.registry import model_config
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.views import view
from bcosvit.paper.runs import FINAL, digest, read_json, run_folder, run_recipe, run_record
from bcosvit.paper.study import PAPER_METHODS, GivenModel, RunSpec, Study
from bcosvit.predictor import Predictor, choose_device
from bcosvit.report.provenance import machine
from bcosvit.train.resources import choose_workers

NORMS = "norms"
"""The one measurement that is not a registered metric: see `branch_ratios`."""
NORM_IMAGES = 250
"""On how many images the norms of branches are measured."""

SHOWN_GRIDS, SHOWN_SINGLES = 4, 5
"""How many grids and single images the qualitative figures draw."""


def measure_run(study: Study, spec: RunSpec, metric: str) -> dict[str, Any] | None:
    """Measures a finished run by a registered metric or ``"norms"``, unless it was measured before.

    Returns:
        The result, fit for JSON, or None, for which the study's ``missing`` gets the reason.
        Metrics of explanations have ``scores`` by method, and ``divisors`` where the mean of scores
        is divided by another mean.
    """
    return measure_options(study, spec, metric, [{}])[0]


def measure_options(
    study: Study, spec: RunSpec, metric: str, options: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any] | None]:
    """Measures a finished run by a metric with several sets of options, as `measure_run` does.

    Single images are explained once for all sets of options that lack the same methods.
    """
    if not _is_trained(study, spec):
        return [None] * len(options)
    parts = [_parts(study, spec, metric, each) for each in options]
    found = [{name: part.read() for name, part in each.items()} for each in parts]
    lacking: dict[tuple[str, ...], list[int]] = {}
    for number, each in enumerate(found):
        if names := tuple(name for name, result in each.items() if result is None):
            lacking.setdefault(names, []).append(number)
    reason = _obstacle(study, metric) if lacking else None
    jobs = list(lacking.items())
    while jobs:
        names, numbers = jobs.pop(0)
        if reason is None and study.seconds_left() <= 0:
            reason = "no time was left"
        if reason is not None:
            study.missing[f"{metric} of {spec.label}"] = reason
            break
        times = f" with {len(numbers)} sets of options" if len(numbers) > 1 else ""
        study.log(f"Measuring {metric} of {spec.label}{times}")
        began = time.monotonic()
        try:
            results = _measure(study, spec, metric, [options[each] for each in numbers], names)
        except NotDefinedError as error:
            if len(numbers) > 1:
                # The other sets of options may well have a value.
                jobs = [*((names, [number]) for number in numbers), *jobs]
            else:
                study.missing[f"{name_of(metric, options[numbers[0]])} of {spec.label}"] = str(
                    error
                )
            continue
        seconds = (time.monotonic() - began) / len(numbers) / len(names)
        for number, result in zip(numbers, results, strict=True):
            for name in names:
                found[number][name] = own = _of_method(result, name, names)
                parts[number][name].write(own, seconds, study.device)
    if not parts[0]:
        study.missing[f"{metric} of {spec.label}"] = "none of the methods applies to it"
    joined = [_joined(list(each.values())) for each in found]
    if any(each is not None for each in joined):
        study.used[spec] = None
    return joined


def load_run(study: Study, spec: RunSpec) -> tuple[Predictor, LabeledImages] | None:
    """Loads the model of a finished run, with the validation images as it sees them, or None."""
    if not _is_trained(study, spec):
        return None
    study.used[spec] = None
    return _load(study, spec)


def measured_on(study: Study, spec: RunSpec) -> list[str]:
    """Returns the machines on which a run was measured."""
    files = (run_folder(study, spec) / "measured").glob("*.json")
    found = (read_json(file) or {} for file in files)
    return sorted({each["machine"] for each in found if "machine" in each})


def branch_ratios(model: VisionTransformer, images: Tensor) -> Tensor:
    """Measures how large the input of each attention layer is, relative to what the layer adds.

    The paper compares orders of magnitude, so these are logarithms: log(‖skip‖ / ‖attention's
    output‖) [B, layers], averaged over tokens. The model is left untouched: a view of it is hooked.
    """
    found: list[Tensor] = []

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append((_log_norm(inputs[0]) - _log_norm(output)).mean(1))

    hooked = view(model, with_parameter_grad=False).eval()
    for module in hooked.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(add)
    with torch.no_grad():
        hooked(images)
    return torch.stack(found, 1)


def _log_norm(tokens: Tensor) -> Tensor:
    """[B, T]; a branch that is exactly zero counts as the smallest positive number."""
    norms = tokens.double().norm(dim=-1)
    return norms.clamp(min=torch.finfo(torch.float64).tiny).log()


def _is_trained(study: Study, spec: RunSpec) -> bool:
    if isinstance(spec, GivenModel) or run_record(study, spec) is not None:
        return True
    study.missing.setdefault(spec.label, "it was not trained")
    return False


def _metric(study: Study, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Metric:
    """A registered metric with those of its options that the study has, and others."""
    metric = METRICS.get(name)
    fields = {field.name for field in dataclasses.fields(metric)}  # type: ignore[arg-type]
    given: dict[str, Any] = {"grids": study.grids, "images": study.images}
    mine = {name: given[name] for name in given if name in fields}
    return configure(metric, {**mine, **options})


def options_label(options: Mapping[str, Any]) -> str:
    """Returns a metric's options as a reader would write them."""
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "as in the paper"


def name_of(metric: str, options: Mapping[str, Any]) -> str:
    """Returns what is said to be missing: ``perturbation (output=logit)``."""
    return f"{metric} ({options_label(options)})" if options else metric


def _measure(
    study: Study,
    spec: RunSpec,
    metric: str,
    options: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
) -> list[dict[str, Any]]:
    """Takes a measurement with each set of options."""
    if metric == NORMS:
        return [_norms(study, spec)]
    chosen = [_metric(study, metric, each) for each in options]
    return _evaluate(study, spec, chosen, methods if chosen[0].explains else ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """What is kept in one file: a measurement by one method, or one without methods."""

    path: Path
    settings: dict[str, Any]

    def read(self) -> dict[str, Any] | None:
        record = read_json(self.path)
        result: dict[str, Any] | None = None if record is None else record["result"]
        return result

    def write(self, result: dict[str, Any], seconds: float, device: str) -> None:
        record = {
            "settings": self.settings,
            "run": self.path.parents[1].name,
            "seconds": seconds,
            "machine": machine(choose_device(device)),
            "result": result,
        }
        write_summary(self.path, record)


def _parts(study: Study, spec: RunSpec, name: str, options: Mapping[str, Any]) -> dict[str, _Part]:
    """By method, or one without a name."""
    settings = _settings(study, name, options)
    each = {"": settings}
    if name != NORMS and METRICS.get(name).explains:
        each = {
            method: {**settings, "method": {method: METHODS.get(method).version}}
            for method in _methods(study, spec)
        }
    return {
        method: _Part(path=_path(study, spec, own), settings=own) for method, own in each.items()
    }


def _of_method(found: Any, method: str, methods: Sequence[str]) -> Any:
    """The part of a result that is about one method: tables by method keep one entry."""
    if not isinstance(found, dict):
        return found
    if found and found.keys() <= set(methods):
        return {method: found[method]}
    return {key: _of_method(value, method, methods) for key, value in found.items()}


def _joined(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One result of those of several methods; None if one is missing."""
    joined: dict[str, Any] = {}
    for part in parts:
        if part is None:
            return None
        joined = _merged(joined, part)
    return joined if parts else None


def _merged(first: Any, second: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    shared = {key: _merged(first[key], second[key]) for key in first.keys() & second.keys()}
    return {**first, **second, **shared}


def _obstacle(study: Study, name: str) -> str | None:
    if name == NORMS:
        return None
    return METRICS.get(name).obstacle(len(study.source.classes))


def _methods(study: Study, spec: RunSpec) -> tuple[str, ...]:
    able = spec.methods if isinstance(spec, GivenModel) else _applicable(spec.kind)
    return tuple(name for name in study.methods or PAPER_METHODS if name in able)


@cache
def _applicable(kind: str) -> tuple[str, ...]:
    """The methods that apply to a kind of transformer, by its smallest model without weights."""
    with torch.device("meta"):
        return explainers(create_model(model_config(f"{kind}_ti_38", depth=1)))


def _settings(
    study: Study, name: str, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Everything that a measurement depends on, except the run and the method."""
    settings: dict[str, Any] = {"metric": name, "split": "val", "limit": study.limit}
    if name == NORMS:
        return {**settings, "images": NORM_IMAGES}
    metric = _metric(study, name, options)
    settings |= {"version": metric.version, "options": dataclasses.asdict(metric)}  # type: ignore[call-overload]
    return settings


def _path(study: Study, spec: RunSpec, settings: dict[str, Any]) -> Path:
    return run_folder(study, spec) / "measured" / f"{settings['metric']}-{digest(settings)}.json"


def _load(study: Study, spec: RunSpec) -> tuple[Predictor, LabeledImages]:
    if isinstance(spec, GivenModel):
        predictor = Predictor.load(spec.weights, study.device)
    else:
        predictor = Predictor.load(run_folder(study, spec) / FINAL, study.device)
        crop = run_recipe(study, spec).eval_crop
        transform = EvalTransform(predictor.transform.image_size, crop)
        predictor = dataclasses.replace(predictor, transform=transform)
    return predictor, predictor.labeled(study.source, limit=study.limit)


def _evaluate(
    study: Study, spec: RunSpec, metrics: Sequence[Metric], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """Measures metrics that differ in their options alone."""
    # All metrics begin with the predictions, which are made once.
    accuracy = METRICS.get("accuracy")
    settings = {**_settings(study, accuracy.name), "metric": "predictions"}
    path = _path(study, spec, settings)
    known = _read_predictions(path)
    only_predicts = metrics[0].name == accuracy.name
    if known is not None and only_predicts:
        return [_accuracy(known)]
    predictor, images = _load(study, spec)
    kind = "bcos_vit" if isinstance(spec, GivenModel) else spec.kind
    workers = study.recipes[kind].num_workers

    def measure(
        metrics: Sequence[Metric], known: AccuracyResult | None, keep: KeptScores | None = None
    ) -> Evaluation:
        return evaluate(
            predictor.model,
            images,
            methods,
            metrics=metrics,
            batch_size=study.batch_size,
            num_workers=choose_workers(predictor.device) if workers is None else workers,
            known=known,
            keep=keep,
        )

    if known is None:
        known = measure([accuracy], None).accuracy
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(known)))
    if only_predicts:
        return [_accuracy(known)]
    keep = _kept_scores(study, spec, metrics, methods)
    found = measure(metrics, known, keep)
    keep.remove()
    return [_scores(found[name]) for name in name_metrics(metrics)]


def _kept_scores(
    study: Study, spec: RunSpec, metrics: Sequence[Metric], methods: Sequence[str]
) -> KeptScores:
    """Where the scores of a measurement are kept until all are there."""
    settings = {
        "limit": study.limit,
        "metrics": [[each.name, each.version, dataclasses.asdict(each)] for each in metrics],  # type: ignore[call-overload]
        "methods": {method: METHODS.get(method).version for method in methods},
    }
    name = f"{metrics[0].name}-{digest(settings)}.partial.jsonl"
    return KeptScores(run_folder(study, spec) / "measured" / name)


def _scores(found: MetricResult) -> dict[str, Any]:
    samples = found.samples().items()
    return {
        "summary": found.summary(),
        "scores": {method: values.tolist() for method, (values, _) in samples},
        "divisors": {method: per.tolist() for method, (_, per) in samples if per is not None},
    }


def _read_predictions(path: Path) -> AccuracyResult | None:
    found = read_json(path)
    if found is None:
        return None
    return AccuracyResult(
        predictions=tuple(Prediction(**row) for row in found["predictions"]),
        repeated=found["repeated"],
        top1=Estimate(**found["top1"]),
        top5=Estimate(**found["top5"]),
    )


def _accuracy(found: AccuracyResult) -> dict[str, Any]:
    return {
        "images": len(found.predictions),
        "top1": dataclasses.asdict(found.top1),
        "top5": dataclasses.asdict(found.top5),
        # One digit per image, from which differences between models are resampled.
        "correct": "".join("1" if each.correct else "0" for each in found.predictions),
        "shown": _shown(found),
    }


def _shown(found: AccuracyResult) -> dict[str, Any]:
    """Chooses the images of the qualitative figures by rule."""
    first: dict[int, int] = {}
    for prediction in most_confident(found.predictions):
        first.setdefault(prediction.label, prediction.index)
    game = GridPointingGame(grids=SHOWN_GRIDS)
    classes = len({prediction.label for prediction in found.predictions})
    grids = [] if game.obstacle(classes) else game.select(found.predictions)
    return {
        "singles": [first[label] for label in sorted(first)][:SHOWN_SINGLES],
        "grids": [[image.index for image in grid] for grid in grids],
    }


def _norms(study: Study, spec: RunSpec) -> dict[str, Any]:
    predictor, images = _load(study, spec)
    assert isinstance(predictor.model, VisionTransformer)
    images.limit(NORM_IMAGES, seed=0)
    reference = next(predictor.model.parameters())
    size = study.batch_size or choose_batch_size(
        predictor.device, predictor.model.config.image_size
    )

    def batches() -> Iterator[Tensor]:
        positions = range(len(images))
        for first in positions[::size]:
            batch = [images[at][0] for at in positions[first : first + size]]
            yield torch.stack(batch).to(reference)

    ratios = torch.cat([branch_ratios(predictor.model, batch).cpu() for batch in batches()])
    return {
        "images": len(ratios),
        "log_ratio": ratios.mean(1).tolist(),
        "by_layer": ratios.mean(0).exp().tolist(),
    }

"""Measurements of finished runs, kept beside them: each is taken once, whatever figures ask for it.

A result holds one number a picture or grid, not means alone, so that figures can resample them.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bcosvit.data.dataset import LabeledImages, labeled_images
from bcosvit.data.transforms import EvalTransform
from bcosvit.files import atomic
from bcosvit.metrics import (
    METRICS,
    AccuracyResult,
    Estimate,
    Evaluation,
    GridPointingGame,
    Metric,
    PixelPerturbation,
    Prediction,
    area_between,
    evaluate,
    most_confident,
    write_summary,
)
from bcosvit.metrics.grid_pointing import CELLS
from bcosvit.models.vit import VisionTransformer
from bcosvit.paper.norms import branch_ratios
from bcosvit.paper.runs import Runs, read_json
from bcosvit.paper.spec import RunSpec
from bcosvit.predictor import Predictor, choose_device
from bcosvit.report.provenance import machine

NORM_PICTURES = 250
"""On which the branches' norms are measured."""

SHOWN_GRIDS, SHOWN_SINGLES = 4, 5
"""How many pictures of either kind the qualitative figures draw."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A finished run's model and the validation pictures as it sees them."""

    predictor: Predictor
    pictures: LabeledImages


def load(runs: Runs, spec: RunSpec) -> Loaded:
    """The final model, with the crop of its training."""
    study, recipe = runs.study, runs.recipe(spec)
    predictor = Predictor.load(runs.weights(spec), study.device)
    size = predictor.transform.image_size
    crop = EvalTransform(size, recipe.eval_crop)
    predictor = dataclasses.replace(predictor, transform=crop)
    names = predictor.class_names if predictor.has_class_names else None
    pictures = labeled_images(
        runs.source, "val", names, predictor.transform, num_classes=len(predictor.class_names)
    )
    if study.limit is not None:
        pictures.limit(study.limit, seed=0)
    return Loaded(predictor=predictor, pictures=pictures)


def settings_of(runs: Runs, spec: RunSpec, metric: str) -> dict[str, Any]:
    """All that a measurement depends on but the run itself."""
    study = runs.study
    settings: dict[str, Any] = {"metric": metric, "split": "val", "limit": study.limit}
    if metric == "localization":
        settings |= {"grids": study.grids, "methods": study.methods_for(spec.family)}
    if metric == "perturbation":
        settings |= {"images": study.images, "methods": study.methods_for(spec.family)}
    if metric == "norms":
        settings |= {"pictures": NORM_PICTURES}
    return settings


def kept(runs: Runs, spec: RunSpec, metric: str) -> dict[str, Any] | None:
    """A measurement that was taken before."""
    found = read_json(_path(runs, spec, metric))
    return None if found is None else found["result"]


def measure(runs: Runs, spec: RunSpec, metric: str) -> dict[str, Any]:
    """Takes a measurement of a finished run and keeps it."""
    runs.say(f"Measuring {metric} of {spec.label}")
    began = time.monotonic()
    loaded = load(runs, spec)
    if metric == "norms":
        result = _norms(runs, loaded)
    else:
        known = _predictions(runs, spec, loaded)
        result = _RESULTS[metric](_evaluation(runs, spec, loaded, metric, known))
    path = _path(runs, spec, metric)
    settings = settings_of(runs, spec, metric)
    facts = {
        "run": path.parents[1].name,
        "seconds": time.monotonic() - began,
        "machine": machine(choose_device(runs.study.device)),
    }
    write_summary(path, {"settings": settings, **facts, "result": result})
    return result


def measured_on(runs: Runs, spec: RunSpec) -> list[str]:
    """The machines that measured a run, whatever of it."""
    files = (runs.folder(spec) / "measured").glob("*.json")
    found = (read_json(file) or {} for file in files)
    return sorted({each["machine"] for each in found if "machine" in each})


def _path(runs: Runs, spec: RunSpec, metric: str) -> Path:
    text = json.dumps(settings_of(runs, spec, metric), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return runs.folder(spec) / "measured" / f"{metric}-{digest}.json"


def _predictions(runs: Runs, spec: RunSpec, loaded: Loaded) -> AccuracyResult:
    """What the run says about every picture: made once, for all metrics begin with it."""
    path = _path(runs, spec, "predictions")
    found = read_json(path)
    if found is None:
        made = _evaluation(runs, spec, loaded, "predictions").accuracy
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(made)))
        return made
    return AccuracyResult(
        predictions=tuple(Prediction(**row) for row in found["predictions"]),
        repeated=found["repeated"],
        top1=Estimate(**found["top1"]),
        top5=Estimate(**found["top5"]),
    )


def _evaluation(
    runs: Runs, spec: RunSpec, loaded: Loaded, metric: str, known: AccuracyResult | None = None
) -> Evaluation:
    study = runs.study
    metrics: dict[str, Metric] = {
        "localization": GridPointingGame(grids=study.grids),
        "perturbation": PixelPerturbation(images=study.images),
    }
    return evaluate(
        loaded.predictor.model,
        loaded.pictures,
        study.methods_for(spec.family),
        metrics=[metrics.get(metric, METRICS.get("accuracy"))],
        batch_size=study.batch,
        num_workers=runs.recipe(spec).num_workers,
        known=known,
    )


def _accuracy(found: Evaluation) -> dict[str, Any]:
    places = [prediction.place for prediction in found.accuracy.predictions]
    return {
        "pictures": len(places),
        "top1": dataclasses.asdict(found.accuracy.top1),
        "top5": dataclasses.asdict(found.accuracy.top5),
        # A digit a picture, in their order: what differences between models are resampled from.
        "correct": "".join("1" if place == 0 else "0" for place in places),
        "shown": _shown(found.accuracy),
    }


def _shown(found: AccuracyResult) -> dict[str, Any]:
    """Which pictures the qualitative figures draw: by rule, so that none is hand-picked."""
    surest: dict[int, int] = {}
    for prediction in most_confident(found.predictions):
        surest.setdefault(prediction.label, prediction.index)
    classes = {prediction.label for prediction in found.predictions}
    game = GridPointingGame(grids=SHOWN_GRIDS)
    grids = game.select(found.predictions) if len(classes) >= CELLS else []
    return {
        "singles": [surest[label] for label in sorted(surest)][:SHOWN_SINGLES],
        "grids": [[shown.index for shown in grid] for grid in grids],
    }


def _localization(found: Evaluation) -> dict[str, Any]:
    means = found["localization"].means
    return {
        "grids": len(found["localization"].grids),
        "means": {method: dataclasses.asdict(mean) for method, mean in means.items()},
        # Whole grids: the four cells of one share a picture.
        "scores": {m: each.mean(1).tolist() for m, each in found["localization"].scores.items()},
    }


def _perturbation(found: Evaluation) -> dict[str, Any]:
    part = found["perturbation"]
    return {
        "images": len(part.images),
        "means": {method: dataclasses.asdict(mean) for method, mean in part.abc.items()},
        "areas": {
            method: area_between(each, part.metric.share).tolist()
            for method, each in part.confidences.items()
        },
        "starts": {method: each[:, 0, 0].tolist() for method, each in part.confidences.items()},
    }


def _norms(runs: Runs, loaded: Loaded) -> dict[str, Any]:
    model, study = loaded.predictor.model, runs.study
    assert isinstance(model, VisionTransformer)
    loaded.pictures.limit(NORM_PICTURES, seed=0)
    reference = next(model.parameters())
    positions = range(len(loaded.pictures))
    found = []
    for first in positions[:: study.batch]:
        images = [loaded.pictures[at][0] for at in positions[first : first + study.batch]]
        found.append(branch_ratios(model, torch.stack(images).to(reference)).cpu())
    ratios = torch.cat(found)
    return {
        "pictures": len(ratios),
        "log_ratio": ratios.mean(1).tolist(),
        "by_layer": ratios.mean(0).exp().tolist(),
    }


_RESULTS: Mapping[str, Any] = {
    "accuracy": _accuracy,
    "localization": _localization,
    "perturbation": _perturbation,
}

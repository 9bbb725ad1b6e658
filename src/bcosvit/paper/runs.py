"""Training of the runs that figures need: each once, resumed where it was interrupted.

A run lies in ``runs/NAME``. The name ends in a digest of everything that its result depends on
(data, model, recipe, backbone), so that figures which need the same run find the same folder, and a
run with other settings has another one. It is finished once ``done.json`` exists.

The model that is measured is that of the *last* epoch, ``final.safetensors``. The best one, which
training saves as well, was chosen by its accuracy on the validation images, on which it would be
measured.

With a budget, runs that would take too long are left out. How long a run takes follows from a
probe: `bcosvit.train` trains the same model on a few images for two epochs, and its log says how
fast the second one was; the rest of the time is the cost of starting. Probes are cached in
``throughput.json``.
"""

import csv
import dataclasses
import gc
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from bcosvit.data.dataset import Split
from bcosvit.data.sources import Source
from bcosvit.files import make_folder
from bcosvit.metrics import write_summary
from bcosvit.models.base import create_model, save
from bcosvit.models.config import Config, DenseNetConfig
from bcosvit.models.hub import locate
from bcosvit.models.registry import model_config, to_dict
from bcosvit.models.weights import RUN_KEY, read_metadata, save_state
from bcosvit.paper.schedule import with_epochs, with_prefix
from bcosvit.paper.study import BACKBONE_OF, GivenModel, RunSpec, Study
from bcosvit.predictor import choose_device
from bcosvit.report.provenance import machine
from bcosvit.train import checkpoints
from bcosvit.train import train as train_model
from bcosvit.train.callbacks import WEIGHTS
from bcosvit.train.plan import NEUTRAL_FIELDS, RECORD
from bcosvit.train.recipe import Recipe
from bcosvit.train.task import model_state

FINAL, DONE, THROUGHPUT = "final.safetensors", "done.json", "throughput.json"

TRAINING_SHARE = 0.75
"""Of the minutes; the rest is for measuring."""

PROBE_STEPS, PROBE_EPOCHS = 8, 2
VALIDATION_COST = 1 / 3
"""Of an image in validation, relative to one in training: there is no backward pass."""


def run_config(study: Study, spec: RunSpec) -> Config:
    """Returns the config of a run's model."""
    classes = len(study.source.classes)
    dense = with_prefix(study.settings, "densenet.")
    if spec.is_backbone:
        flavored = {"flavor": study.flavor} if spec.family == "bcos" else {}
        return model_config(spec.model, **{**flavored, **dense, "num_classes": classes})
    flavor: Any = study.flavor if spec.family == "bcos" else "conventional"
    size = run_recipe(study, spec).image_size
    options = {
        "backbone": DenseNetConfig(flavor=flavor, **dense),
        **({} if size is None else {"image_size": size}),
        **with_prefix(study.settings, "model."),
        **dict(spec.options),
        "num_classes": classes,
    }
    return model_config(spec.model, **options)


def run_recipe(study: Study, spec: RunSpec) -> Recipe:
    """Returns the recipe of a run."""
    return replace(study.recipes[spec.kind], seed=spec.seed)


def run_backbone(study: Study, spec: RunSpec) -> RunSpec | None:
    """Returns the run whose weights this one starts from, or None if there is no such run."""
    name = BACKBONE_OF[spec.family]
    complete = spec.is_backbone or isinstance(spec, GivenModel) or name in study.backbones
    return None if complete else RunSpec(model=name)


def run_name(study: Study, spec: RunSpec) -> str:
    """Returns the name of a run's folder."""
    if isinstance(spec, GivenModel):
        return f"{spec.model}-{digest([study.fingerprint, _weights_digest(spec.weights)])}"
    recipe = dataclasses.asdict(run_recipe(study, spec))
    # How many the machine needs does not change the result.
    recipe["accumulate_grad_batches"] = recipe["accumulate_grad_batches"] or 1
    init = None
    if (backbone := run_backbone(study, spec)) is not None:
        init = run_name(study, backbone)
    elif not spec.is_backbone:
        init = _weights_digest(study.backbones[BACKBONE_OF[spec.family]])
    depends_on = {
        "data": study.fingerprint,
        "model": to_dict(run_config(study, spec)),
        "recipe": {k: v for k, v in recipe.items() if k not in NEUTRAL_FIELDS},
        "init": init,
    }
    options = "".join(f"-{key}_{value}" for key, value in spec.options)
    return f"{spec.model}{options}-seed{spec.seed}-{digest(depends_on)}"


def run_folder(study: Study, spec: RunSpec) -> Path:
    """Returns the folder of a run."""
    folder = "given" if isinstance(spec, GivenModel) else study.folder
    return study.out / folder / run_name(study, spec)


def run_record(study: Study, spec: RunSpec) -> dict[str, Any] | None:
    """Returns what is known about a finished run (accuracies, seconds), or None before it is."""
    return read_json(run_folder(study, spec) / DONE)


def with_backbones(study: Study, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Returns these runs and their backbones, the backbones first, each once."""
    backbones = [found for spec in specs if (found := run_backbone(study, spec)) is not None]
    return list(dict.fromkeys([*backbones, *specs]))


def train_runs(study: Study, specs: Sequence[RunSpec]) -> None:
    """Trains runs and their backbones in order, the most important first, except those that there
    is no time for; the study's ``missing`` gets these."""
    for spec in with_backbones(study, specs):
        if run_record(study, spec) is not None:
            continue
        backbone = run_backbone(study, spec)
        if backbone is not None and run_record(study, backbone) is None:
            study.missing[spec.label] = f"its backbone {backbone.label} is missing"
            continue
        if study.minutes is not None:
            takes, left = remaining_seconds(study, spec), study.seconds_left(TRAINING_SHARE)
            if takes > left:
                reason = (
                    f"it would take {takes / 60:.1f} minutes, and {max(0.0, left) / 60:.1f} are "
                    f"left"
                )
                study.missing[spec.label] = reason
                study.log(f"Leaving out {spec.label}: {reason}")
                continue
        train_run(study, spec)


def train_run(study: Study, spec: RunSpec) -> None:
    """Trains a run, or the rest of it, unless it is finished; its backbone must be.

    Several processes may work on one study. Where another one trains this run, waits until it ends.
    """
    lock = FileLock(study.out / ".locks" / f"{run_name(study, spec)}.lock")
    make_folder(study.out / ".locks")
    with ExitStack() as held:
        # Some network file systems have no locks.
        with suppress(NotImplementedError):
            try:
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                study.log(f"Waiting for another process, which trains {spec.label}")
                held.enter_context(lock.acquire())
        if run_record(study, spec) is None:
            _train_run(study, spec)


def _train_run(study: Study, spec: RunSpec) -> None:
    folder = run_folder(study, spec)
    began = time.monotonic()
    resumes = (folder / RECORD).is_file()
    if resumes:
        study.log(f"Resuming {spec.label}")
        run = train_model(study.source, out=folder, resume=True, accelerator=_device(study))
    else:
        study.log(f"Training {spec.label}")
        # Without a record the process ended before the first step.
        shutil.rmtree(folder, ignore_errors=True)
        run = _start(study, spec, folder)
    _save_final(folder, run_config(study, spec), run.rows[-1])
    record = {
        "model": spec.label,
        "epochs": len(run.rows),
        "final_top1": run.rows[-1]["val_top1"],
        "best_top1": run.accuracy,
        # The time before a run was resumed is not known.
        "seconds": None if resumes else time.monotonic() - began,
        "recipe": dataclasses.asdict(run_recipe(study, spec)),
        "machine": machine(choose_device(study.device)),
    }
    write_summary(folder / DONE, record)
    if torch.cuda.is_available():
        # Lightning's objects refer to each other and keep memory of the device allocated.
        gc.collect()
    # Checkpoints only serve to resume, and are three times as large as the weights.
    for name in (checkpoints.LAST, checkpoints.PREVIOUS):
        (folder / name).unlink(missing_ok=True)


def _start(study: Study, spec: RunSpec, folder: Path) -> Any:
    init: str | Path | None = None
    if (backbone := run_backbone(study, spec)) is not None:
        init = run_folder(study, backbone) / FINAL
    elif not spec.is_backbone:
        init = study.backbones[BACKBONE_OF[spec.family]]
    recipe = run_recipe(study, spec)
    if recipe.cache_views and not spec.is_backbone and recipe.cache_folder is None:
        # Features of one backbone, tap and seed serve all transformers on them.
        source = run_name(study, backbone) if backbone else f"given-{spec.family}"
        name = f"{source}-{spec.tap}-seed{spec.seed}"
        recipe = replace(recipe, cache_folder=str(study.out / "features" / study.folder / name))
    return train_model(
        study.source,
        out=folder,
        model=run_config(study, spec),
        recipe=recipe,
        init=init,
        accelerator=_device(study),
    )


def _save_final(folder: Path, config: Config, row: Mapping[str, float]) -> None:
    """Saves the last epoch's weights (their average, where the recipe has one)."""
    state = model_state(checkpoints.read_checkpoint(folder / checkpoints.LAST)["state_dict"])
    metadata = read_metadata(folder / WEIGHTS)
    run = json.loads(metadata[RUN_KEY]) | {"epoch": int(row["epoch"]), "accuracy": row["val_top1"]}
    save_state(state, config, folder / FINAL, metadata={**metadata, RUN_KEY: json.dumps(run)})


def _device(study: Study) -> str:
    """Lightning's name of the one device that a run uses; several devices share a study by runs."""
    return {"cpu": "cpu", "cuda": "gpu"}.get(study.device.partition(":")[0], "auto")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """How long a model trains on this machine."""

    start_seconds: float
    """Of a run, before its first step."""
    seconds_per_image: float
    """In training."""

    def of_run(self, recipe: Recipe, source: Source) -> float:
        """Returns the seconds of a whole run."""
        epoch = len(source.train) + VALIDATION_COST * len(source.val)
        return self.start_seconds + recipe.epochs * epoch * self.seconds_per_image


def run_cost(study: Study, spec: RunSpec) -> Cost:
    """Measures the cost of a run, unless it was measured before under the same conditions."""
    recipe = run_recipe(study, spec)
    conditions: dict[str, Any] = {
        "device": study.device,
        "batch_size": recipe.batch_size,
        "accumulate_grad_batches": recipe.accumulate_grad_batches,
        "precision": recipe.precision,
        "compile": recipe.compile,
        "num_workers": recipe.num_workers,
        "cached": bool(recipe.cache_views),
    }
    path = study.out / THROUGHPUT
    found = (read_json(path) or {}).get(spec.model)
    if found is None or found["conditions"] != conditions:
        study.log(f"Timing {spec.model}")
        cost = _probe(study, spec)
        rate = 1 / cost.seconds_per_image
        found = {
            "conditions": conditions,
            **dataclasses.asdict(cost),
            "images_per_second": rate,
        }
        # Another process may have added its own meanwhile.
        write_summary(path, {**(read_json(path) or {}), spec.model: found})
    return Cost(start_seconds=found["start_seconds"], seconds_per_image=found["seconds_per_image"])


def remaining_seconds(study: Study, spec: RunSpec) -> float:
    """Returns how long an unfinished run will still take."""
    recipe = run_recipe(study, spec)
    epochs = recipe.epochs
    metrics = run_folder(study, spec) / "metrics.csv"
    if metrics.is_file():
        with metrics.open() as file:
            epochs -= sum(1 for _ in csv.DictReader(file))
    return run_cost(study, spec).of_run(with_epochs(recipe, max(1, epochs)), study.source)


def _probe(study: Study, spec: RunSpec) -> Cost:
    recipe = replace(
        run_recipe(study, spec),
        epochs=PROBE_EPOCHS,
        warmup_epochs=0,
        checkpoint_steps=None,
        checkpoint_minutes=None,
        explain_every=0,
        cache_folder=None,
    )
    count = PROBE_STEPS * recipe.batch_size
    train, val = _few(study.source.train, count), _few(study.source.val, count // 4)
    source = replace(study.source, train=train, val=val)
    study.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=study.out, prefix=".probe-") as name:
        folder, init = Path(name, "run"), None
        if not spec.is_backbone:
            # An untrained backbone is as fast as a trained one.
            init = Path(name, "backbone.safetensors")
            backbone = RunSpec(model=BACKBONE_OF[spec.family])
            save(create_model(run_config(study, backbone)), init)
        began = time.monotonic()
        train_model(
            source,
            out=folder,
            model=run_config(study, spec),
            recipe=recipe,
            init=init,
            accelerator=_device(study),
        )
        took, speed = time.monotonic() - began, _logged_speed(folder)
    images = len(train) + VALIDATION_COST * len(val)
    return Cost(
        start_seconds=max(0.0, took - PROBE_EPOCHS * images / speed), seconds_per_image=1 / speed
    )


def _logged_speed(folder: Path) -> float:
    """Images per second in the last epoch of a run, without validation and saving."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    log = EventAccumulator(str(folder / "tensorboard"))
    log.Reload()
    return float(log.Scalars("images_per_second")[-1].value)


def _few(split: Split, most: int) -> Split:
    """Some images from everywhere in a split."""
    step = max(1, len(split) // most)
    return split.select(range(len(split))[::step][:most])


def digest(value: object) -> str:
    """Returns a short hash of a value that is fit for JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


@cache
def _weights_digest(weights: str) -> str:
    return hashlib.sha256(locate(weights).read_bytes()).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns what a JSON file holds, or None if there is none that can be read."""
    with suppress(FileNotFoundError, json.JSONDecodeError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    return None

"""Time: how long runs take on this machine, and how many epochs fit into the minutes given.

A probe trains the very model on a few pictures for two epochs, by ``bcosvit.train`` itself, and
reads off its log how fast the second one was; what else it took is the price of starting. Probes
are kept in ``throughput.json``.

The epochs are fixed once for a folder, in ``schedule.json``: all its figures then share their runs,
and a command that is given again goes on with the same ones. A later command with other minutes
only does more or less of them.
"""

import csv
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bcosvit.data.dataset import Source, Split
from bcosvit.metrics import write_summary
from bcosvit.models.base import create_model, save
from bcosvit.paper.runs import Runs, read_json
from bcosvit.paper.schedule import with_epochs
from bcosvit.paper.spec import BACKBONE_OF, RunSpec
from bcosvit.paper.study import KINDS
from bcosvit.train import train as train_run
from bcosvit.train.recipe import Recipe

TRAINING_SHARE = 0.75
"""Of the minutes; the rest is for measuring."""

LEAST_EPOCHS = 5
"""Below which a run is rather left out than cut."""

PROBE_STEPS, PROBE_EPOCHS = 8, 2
VALIDATION_COST = 1 / 3
"""Of a training picture's: a forward pass without a backward one."""

THROUGHPUT, SCHEDULE = "throughput.json", "schedule.json"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What is left of the minutes."""

    minutes: float | None
    """None: as long as it takes."""
    began: float = field(default_factory=time.monotonic)

    def left(self, share: float = 1.0) -> float:
        """Seconds of the first ``share`` of the budget."""
        if self.minutes is None:
            return math.inf
        return 60 * share * self.minutes - (time.monotonic() - self.began)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a model takes on this machine."""

    start_seconds: float
    """Of a run, before its first step."""
    seconds_per_picture: float
    """In training."""

    def run(self, recipe: Recipe, source: Source) -> float:
        """Seconds of a whole run."""
        epoch = len(source.train) + VALIDATION_COST * len(source.val)
        return self.start_seconds + recipe.epochs * epoch * self.seconds_per_picture


def cost_of(runs: Runs, spec: RunSpec) -> Cost:
    """Measured now, unless it was before under the same conditions."""
    recipe = runs.recipe(spec)
    conditions: dict[str, Any] = {
        "device": runs.study.device,
        **{
            name: getattr(recipe, name)
            for name in (
                "batch_size",
                "accumulate_grad_batches",
                "precision",
                "compile",
                "num_workers",
            )
        },
        "cached": bool(recipe.cache_views),
    }
    path = runs.study.out / THROUGHPUT
    known = read_json(path) or {}
    found = known.get(spec.model)
    if found is None or found["conditions"] != conditions:
        runs.say(f"Timing {spec.model}")
        cost = _probe(runs, spec)
        rate = 1 / cost.seconds_per_picture
        found = {"conditions": conditions, **asdict(cost), "pictures_per_second": rate}
        # Read again: another process may have added its own meanwhile.
        write_summary(path, {**(read_json(path) or {}), spec.model: found})
    return Cost(
        start_seconds=found["start_seconds"], seconds_per_picture=found["seconds_per_picture"]
    )


def seconds_left(runs: Runs, spec: RunSpec) -> float:
    """What an unfinished run will still take."""
    recipe = runs.recipe(spec)
    epochs = recipe.epochs
    metrics = runs.folder(spec) / "metrics.csv"
    if metrics.is_file():
        with metrics.open() as file:
            epochs -= sum(1 for _ in csv.DictReader(file))
    return cost_of(runs, spec).run(with_epochs(recipe, max(1, epochs)), runs.source)


def fitted(
    runs: Runs,
    specs: Sequence[RunSpec],
    clock: Clock,
    *,
    trials: Sequence[tuple[RunSpec, float]] = (),
) -> tuple[dict[str, Recipe], dict[str, Any]]:
    """The recipes with as many epochs as fit, and what was cut, fit for JSON.

    ``trials`` are further runs to leave time for, each with its share of a run's epochs.
    """
    path = runs.study.out / SCHEDULE
    asked = {kind: runs.recipes[kind].epochs for kind in KINDS}
    record = read_json(path)
    if record is None or record["asked"] != asked:
        start = work = 0.0
        for spec, part in [*((spec, 1.0) for spec in specs), *trials]:
            cost = cost_of(runs, spec)
            start += cost.start_seconds
            work += part * (cost.run(runs.recipe(spec), runs.source) - cost.start_seconds)
        share = min(1.0, max(0.0, (clock.left(TRAINING_SHARE) - start) / work))
        record = {
            "minutes": clock.minutes,
            "runs": len(specs),
            "uncut_minutes": (start + work) / 60,
            "share": share,
            "asked": asked,
            "epochs": {
                kind: max(min(LEAST_EPOCHS, epochs), math.floor(share * epochs))
                for kind, epochs in asked.items()
            },
        }
        write_summary(path, record)
    return {
        kind: with_epochs(recipe, record["epochs"][kind]) for kind, recipe in runs.recipes.items()
    }, record


def _probe(runs: Runs, spec: RunSpec) -> Cost:
    source = _few(runs.source, PROBE_STEPS * runs.recipe(spec).batch_size)
    recipe = replace(
        runs.recipe(spec),
        epochs=PROBE_EPOCHS,
        warmup_epochs=0,
        checkpoint_steps=None,
        explain_every=0,
        cache_folder=None,
    )
    runs.study.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs.study.out, prefix=".probe-") as name:
        folder, init = Path(name, "run"), None
        if not spec.is_backbone:
            # As fast as a trained one.
            init = Path(name, "backbone.safetensors")
            save(create_model(runs.config(RunSpec(model=BACKBONE_OF[spec.family]))), init)
        began = time.monotonic()
        train_run(
            source,
            out=folder,
            model=runs.config(spec),
            recipe=recipe,
            init=init,
            accelerator=runs.accelerator(),
        )
        took, speed = time.monotonic() - began, _logged_speed(folder)
    pictures = len(source.train) + VALIDATION_COST * len(source.val)
    return Cost(
        start_seconds=max(0.0, took - PROBE_EPOCHS * pictures / speed),
        seconds_per_picture=1 / speed,
    )


def _logged_speed(folder: Path) -> float:
    """Pictures a second in the last epoch of a run, validation and saving left out."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    log = EventAccumulator(str(folder / "tensorboard"))
    log.Reload()
    return float(log.Scalars("images_per_second")[-1].value)


def _few(source: Source, count: int) -> Source:
    """As many pictures to train on, from everywhere in the set, and a quarter to validate on."""

    def some(split: Split, most: int) -> Split:
        step = max(1, len(split) // most)
        return split.select(range(len(split))[::step][:most])

    return replace(source, train=some(source.train, count), val=some(source.val, count // 4))

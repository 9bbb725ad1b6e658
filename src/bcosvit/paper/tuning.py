"""Choices that are made before training: how many epochs fit, and which learning rates are best.

Both are made once per folder, so that its figures share their runs and a command that is given
again continues the same ones: epochs in ``schedule.json``, learning rates in ``tuning.json``.

Learning rates are chosen on images that are set aside from the training set. Every kind of run
tries the same rates for the same share of its epochs, so that both families get the same effort.
Backbones come first, and transformers are tried on the backbones of the trials: no image that
decides was seen by either. The validation set takes no part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bcosvit.data.sources import Source, hold_out
from bcosvit.metrics import write_summary
from bcosvit.paper.runs import TRAINING_SHARE, digest, read_json, run_cost, run_record, train_run
from bcosvit.paper.runs import run_recipe as recipe_of
from bcosvit.paper.schedule import KINDS, with_epochs, with_learning_rate
from bcosvit.paper.study import RunSpec, Study
from bcosvit.train.task import DivergedError

SCHEDULE, TUNING = "schedule.json", "tuning.json"

LEAST_EPOCHS = 5
"""Runs that would have fewer are left out instead."""

RATES = (1e-4, 3e-4, 1e-3)
TRIAL_SHARE = 0.4
"""Of a run's epochs."""
HELD_OUT = 0.1
"""Of each class's training images."""


def fit_epochs(study: Study, specs: Sequence[RunSpec]) -> tuple[Study, dict[str, Any]]:
    """Cuts the epochs of all runs, backbones included, by the same share, until training (and
    tuning, where the study tunes) fits into its time.

    Returns:
        The study with as many epochs as fit, and a record of the choice.
    """
    path = study.out / SCHEDULE
    asked = {kind: study.recipes[kind].epochs for kind in KINDS}
    record = read_json(path)
    if record is None or record["asked"] != asked:
        trials = [(spec, TRIAL_SHARE) for spec in representatives(specs) for _ in RATES]
        start = work = 0.0
        for spec, part in [*((spec, 1.0) for spec in specs), *(trials if study.tune else ())]:
            cost = run_cost(study, spec)
            whole = cost.of_run(recipe_of(study, spec), study.source)
            start += cost.start_seconds
            work += part * (whole - cost.start_seconds)
        share = min(1.0, max(0.0, (study.seconds_left(TRAINING_SHARE) - start) / work))
        record = {
            "minutes": study.minutes,
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
    epochs = record["epochs"]
    recipes = {kind: with_epochs(recipe, epochs[kind]) for kind, recipe in study.recipes.items()}
    return replace(study, recipes=recipes), record


def describe_fit(record: Mapping[str, Any]) -> str:
    """Says in a few words how `fit_epochs` changed the schedule."""
    if record["share"] >= 1:
        return f"fits into {record['minutes']:g} minutes uncut"
    epochs = ", ".join(
        f"{kind} {record['epochs'][kind]} of {of}" for kind, of in record["asked"].items()
    )
    return (
        f"{record['runs']} runs that would take {record['uncut_minutes']:.0f} minutes, cut to fit "
        f"into {record['minutes']:g}: epochs {epochs}"
    )


def tune_learning_rates(study: Study, specs: Sequence[RunSpec]) -> tuple[Study, dict[str, Any]]:
    """Chooses the learning rate of every kind of run by trials.

    Returns:
        The study with the chosen rates, and a record of all trials.
    """
    source = held_out(study.source)
    short = {
        kind: with_epochs(recipe, max(1, math.ceil(TRIAL_SHARE * recipe.epochs)))
        for kind, recipe in study.recipes.items()
    }
    trials = replace(
        study, source=source, fingerprint=source.fingerprint(), recipes=short, folder="tuning"
    )
    path = study.out / TUNING
    record: dict[str, Any] = read_json(path) or {}
    for spec in representatives(specs):
        kind = spec.kind
        if kind not in record or record[kind]["conditions"] != _conditions(trials, kind):
            record[kind] = _try_rates(trials, spec)
            write_summary(path, record)
        chosen = with_learning_rate(short[kind], record[kind]["chosen"])
        trials = replace(trials, recipes={**trials.recipes, kind: chosen})
    recipes = {
        kind: with_learning_rate(recipe, record[kind]["chosen"]) if kind in record else recipe
        for kind, recipe in study.recipes.items()
    }
    return replace(study, recipes=recipes), record


def representatives(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Returns what is tried: the first run of each kind with the paper's model, backbones first."""
    first: dict[str, RunSpec] = {}
    for spec in sorted(specs, key=lambda spec: len(spec.options)):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in KINDS if kind in first]


def held_out(source: Source) -> Source:
    """Returns the training images alone: most to train on, some to decide by."""
    train, val = hold_out(source.train, HELD_OUT)
    return replace(source, train=train, val=val)


def _try_rates(trials: Study, spec: RunSpec) -> dict[str, Any]:
    recipe, found = trials.recipes[spec.kind], {}
    for rate in RATES:
        changed = {**trials.recipes, spec.kind: with_learning_rate(recipe, rate)}
        trial = replace(trials, recipes=changed)
        try:
            train_run(trial, spec)
        except DivergedError:
            found[rate] = 0.0
            continue
        record = run_record(trial, spec)
        assert record is not None
        found[rate] = record["final_top1"]
    return {
        "model": spec.label,
        "epochs": recipe.epochs,
        "top1_by_rate": {f"{rate:g}": top1 for rate, top1 in found.items()},
        # The lowest of those that are equally good.
        "chosen": max(RATES, key=lambda rate: found[rate]),
        "trained_on": len(trials.source.train),
        "decided_on": len(trials.source.val),
        "conditions": _conditions(trials, spec.kind),
    }


def _conditions(trials: Study, kind: str) -> str:
    """Distinguishes these trials from those with other data or recipes."""
    return digest([trials.fingerprint, list(RATES), asdict(trials.recipes[kind])])

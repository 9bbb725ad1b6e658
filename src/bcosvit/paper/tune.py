"""``--tune``: the learning rate, chosen on pictures that were set aside from the training set.

Every kind of run tries the same rates for the same share of its epochs, so that both families get
the same effort. Backbones come first, and the transformers that are tried stand on the backbones
that were tried: no picture that decides was seen by either. The validation set takes no part.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bcosvit.data.dataset import Source, hold_out
from bcosvit.metrics import write_summary
from bcosvit.paper.runs import Runs, read_json
from bcosvit.paper.schedule import with_epochs, with_rate
from bcosvit.paper.spec import RunSpec
from bcosvit.paper.study import KINDS
from bcosvit.train.recipe import Recipe
from bcosvit.train.task import DivergedError

RATES = (1e-4, 3e-4, 1e-3)
EPOCHS_SHARE = 0.4
HELD_OUT = 0.1
"""Of each class's training pictures."""

TUNING = "tuning.json"


def representatives(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """What is tried: of each kind, backbones first, the first run of the paper's default model."""
    first: dict[str, RunSpec] = {}
    for spec in sorted(specs, key=lambda spec: len(spec.options)):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in KINDS if kind in first]


def tuned(runs: Runs, specs: Sequence[RunSpec]) -> tuple[dict[str, Recipe], dict[str, Any]]:
    """The recipes at the rates that did best, and the record of all trials, fit for JSON.

    What was chosen before in this folder stays, so that figures share their runs.
    """
    source = held_out(runs.source)
    short = {
        kind: with_epochs(recipe, max(1, math.ceil(EPOCHS_SHARE * recipe.epochs)))
        for kind, recipe in runs.recipes.items()
    }
    trials = replace(
        runs, source=source, fingerprint=source.fingerprint(), recipes=short, folder_name="tuning"
    )
    path = runs.study.out / TUNING
    record: dict[str, Any] = read_json(path) or {}
    for spec in representatives(specs):
        kind = spec.kind
        found = record.get(kind)
        if found is None or found["conditions"] != _conditions(trials, kind):
            found = record[kind] = _try(trials, spec)
            write_summary(path, record)
        chosen = with_rate(short[kind], found["chosen"])
        trials = replace(trials, recipes={**trials.recipes, kind: chosen})
    recipes = {
        kind: with_rate(recipe, record[kind]["chosen"]) if kind in record else recipe
        for kind, recipe in runs.recipes.items()
    }
    return recipes, record


def _try(trials: Runs, spec: RunSpec) -> dict[str, Any]:
    """Trains at every rate and says which did best."""
    recipe, found = trials.recipes[spec.kind], {}
    for rate in RATES:
        trial = replace(trials, recipes={**trials.recipes, spec.kind: with_rate(recipe, rate)})
        try:
            trial.train(spec)
        except DivergedError:
            found[rate] = 0.0
            continue
        done = trial.done(spec)
        assert done is not None
        found[rate] = done["final_top1"]
    return {
        "model": spec.label,
        "epochs": recipe.epochs,
        "top1_by_rate": {f"{rate:g}": top1 for rate, top1 in found.items()},
        # Of equal ones the lowest.
        "chosen": max(RATES, key=lambda rate: found[rate]),
        "trained_on": len(trials.source.train),
        "decided_on": len(trials.source.val),
        "conditions": _conditions(trials, spec.kind),
    }


def _conditions(trials: Runs, kind: str) -> str:
    """Tells these trials from those of other data or recipes."""
    text = json.dumps([trials.fingerprint, list(RATES), asdict(trials.recipes[kind])])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def held_out(source: Source) -> Source:
    """The training pictures alone: most to train on, some to decide by."""
    train, val = hold_out(source.train, HELD_OUT)
    return replace(source, train=train, val=val)

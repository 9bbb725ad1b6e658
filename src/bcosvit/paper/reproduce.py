"""`bcosvit reproduce`: trains what is missing, measures it, and draws the paper's figures."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bcosvit.data.dataset import open_source
from bcosvit.models.base import create_model
from bcosvit.paper.budget import Clock, fitted
from bcosvit.paper.catalog import find_figures
from bcosvit.paper.figure import Outcome, PaperFigure, Row
from bcosvit.paper.lab import Lab
from bcosvit.paper.measure import measured_on
from bcosvit.paper.runs import Runs, Say
from bcosvit.paper.schedule import recipes
from bcosvit.paper.spec import BACKBONE_OF, RunSpec
from bcosvit.paper.study import Study
from bcosvit.paper.tune import EPOCHS_SHARE, RATES, representatives, tuned
from bcosvit.paper.write import INDEX, PAGE, About, write_figure, write_index
from bcosvit.predictor import choose_device
from bcosvit.report.provenance import command_line, machine, versions
from bcosvit.train.checkpoints import initialize


@dataclass(frozen=True, kw_only=True, eq=False)
class Reproduction:
    """What was made."""

    outcomes: Mapping[str, Outcome]
    """By the figure's name."""
    missing: Mapping[str, str]
    """What there was no time for, and why."""
    page: Path
    """To look at first."""


def reproduce(
    figure: str,
    study: Study,
    *,
    minutes: float | None = None,
    tune: bool = False,
    say: Say = print,
) -> Reproduction:
    """Makes one figure, or all, in ``study.out``; what is there already is not made again."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"budget = {minutes} is not allowed: give minutes above 0.")
    figures = find_figures(figure)
    clock = Clock(minutes=minutes)
    choose_device(study.device)
    asked = recipes(study)
    how = asked["bcos_vit"]
    source = open_source(study.data, val_fraction=how.val_fraction, max_skipped=how.max_skipped)
    runs = Runs(
        study=study,
        source=source,
        recipes=asked,
        fingerprint=source.fingerprint(),
        say=say,
    )
    specs = list(dict.fromkeys(spec for wanted in figures for spec in wanted.runs(study)))
    needed = runs.needed(specs)
    _check_given(runs, specs)
    decided: dict[str, Any] = {}
    if minutes is not None:
        tried = representatives(needed) if tune else []
        trials = [(spec, EPOCHS_SHARE) for spec in tried for _ in RATES]
        fitting, decided["budget"] = fitted(runs, needed, clock, trials=trials)
        runs = replace(runs, recipes=fitting)
        say(f"The schedule: {_cut(decided['budget'])}")
    if tune:
        say(f"Trying the learning rates {', '.join(f'{rate:g}' for rate in RATES)}")
        chosen, decided["tuning"] = tuned(runs, needed)
        runs = replace(runs, recipes=chosen)
    finished = sum(runs.done(spec) is not None for spec in needed)
    say(f"{len(needed)} runs: {finished} finished before, {len(needed) - finished} to train")
    lab = Lab(runs=runs, clock=clock)
    lab.train(specs)
    made: dict[PaperFigure, Outcome] = {}
    missing: dict[str, str] = {}
    for wanted in figures:
        # Each figure says what it itself lacks.
        own = replace(lab, missing=_of(wanted, lab), used={})
        made[wanted] = wanted.make(own)
        missing |= own.missing
        about = _about(own, decided)
        write_figure(study.out / wanted.name, wanted, made[wanted], about)
    page = study.out / figure / PAGE
    if figure == "all":
        page = study.out / INDEX
        write_index(page, made, _about(replace(lab, used={}), decided))
    return Reproduction(
        outcomes={wanted.name: outcome for wanted, outcome in made.items()},
        missing=missing,
        page=page,
    )


def _check_given(runs: Runs, specs: Sequence[RunSpec]) -> None:
    """That the weights given for a backbone fit, which training would find out hours later."""
    for name, file in runs.study.given.items():
        on_it = (s for s in specs if not s.is_backbone and BACKBONE_OF[s.family] == name)
        if (spec := next(on_it, None)) is not None:
            initialize(create_model(runs.config(spec)), file)


def _of(wanted: PaperFigure, lab: Lab) -> dict[str, str]:
    """What could not be trained of a figure's runs, backbones included."""
    labels = {spec.label for spec in lab.runs.needed(list(wanted.runs(lab.study)))}
    return {label: why for label, why in lab.missing.items() if label in labels}


def _about(lab: Lab, decided: Mapping[str, Any]) -> About:
    study, source = lab.study, lab.runs.source
    facts = {
        "Data": f"{source.name}: {len(source.train)} pictures to train on, {len(source.val)} to "
        f"measure on, {len(source.classes)} classes",
        "Schedule": study.recipe,
        "Seeds": str(study.seeds),
        "B-cos backbone": study.flavor,
        "Drawn on": machine(choose_device(study.device)),
        "Made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if "budget" in decided:
        facts["Fitted"] = _cut(decided["budget"])
    if "tuning" in decided:
        facts["Learning rates"] = (
            ", ".join(f"{kind} {found['chosen']:g}" for kind, found in decided["tuning"].items())
            + f" (of {', '.join(f'{rate:g}' for rate in RATES)}, decided within the training set)"
        )
    config = {
        "study": {**asdict(study), "out": str(study.out)},
        "recipes": {kind: asdict(recipe) for kind, recipe in lab.runs.recipes.items()},
        **decided,
    }
    return About(
        facts=facts,
        runs=[_run_row(lab, spec) for spec in lab.runs.needed(list(lab.used))] if lab.used else [],
        missing=lab.missing,
        config=config,
        command=command_line(),
        versions=versions(),
    )


def _run_row(lab: Lab, spec: Any) -> Row:
    done = lab.runs.done(spec)
    assert done is not None
    return {
        "run": lab.runs.name(spec),
        "epochs": done["epochs"],
        "learning rate": done["recipe"]["learning_rate"],
        "final top-1": done["final_top1"],
        "minutes": None if done["seconds"] is None else done["seconds"] / 60,
        # A folder may have been filled on one machine and drawn from on another.
        "trained on": done.get("machine"),
        "measured on": ", ".join(measured_on(lab.runs, spec)) or None,
    }


def _cut(record: Mapping[str, Any]) -> str:
    """What the minutes left of the schedule, in words."""
    if record["share"] >= 1:
        return f"fits into {record['minutes']:g} minutes uncut"
    epochs = ", ".join(
        f"{kind} {record['epochs'][kind]} of {of}" for kind, of in record["asked"].items()
    )
    return (
        f"{record['runs']} runs that would take {record['uncut_minutes']:.0f} minutes, cut to fit "
        f"into {record['minutes']:g}: epochs {epochs}"
    )

"""`reproduce`: trains what is missing, measures it, draws the paper's figures and writes pages."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bcosvit.files import atomic
from bcosvit.metrics import write_summary, write_table
from bcosvit.models.base import create_model
from bcosvit.paper.figures import FIGURES, Figure, Outcome, Row
from bcosvit.paper.measure import measured_on
from bcosvit.paper.runs import run_config, run_name, run_record, train_runs, with_backbones
from bcosvit.paper.study import BACKBONE_OF, GivenModel, RunSpec, Study, StudyOptions
from bcosvit.paper.tuning import RATES, describe_fit, fit_epochs, tune_learning_rates
from bcosvit.predictor import choose_device
from bcosvit.report.pages import cell, write_page
from bcosvit.report.provenance import Provenance, machine
from bcosvit.train.checkpoints import initialize

PAGE, INDEX = "report.html", "index.html"


@dataclass(frozen=True, kw_only=True, eq=False)
class Reproduction:
    """The figures that were made."""

    outcomes: Mapping[str, Outcome]
    """By the figure's name."""
    missing: Mapping[str, str]
    """Runs and measurements that could not be made, with the reason."""
    page: Path
    """The page to look at first."""


def reproduce(figure: str, options: StudyOptions, log: Any = print) -> Reproduction:
    """Makes figures of the paper; what exists already is not made again.

    Args:
        figure: The name of a figure, several separated by commas, or ``"all"``.
        options: Data, folder and everything else that was asked for.
        log: A function that is called with a line about each step.

    Returns:
        The figures, which are also written to ``options.out``.

    Raises:
        ValueError: If an option, the data or the weights of a backbone cannot be used.
        Stopped: If Ctrl-C or SIGTERM was received; the same call continues.

    Example:
        >>> options = StudyOptions(data="scenes", out=Path("paper"), recipe="quick")
        >>> reproduce("normalization", options).page  # doctest: +SKIP
        PosixPath('paper/normalization/report.html')
    """
    figures = _pick(figure, options)
    choose_device(options.device)
    study = Study.open(options, log)
    specs = list(dict.fromkeys(spec for each in figures for spec in each.runs(study)))
    choices: dict[str, Any] = {}
    if not study.weights:
        study, choices = _train(study, specs)
    outcomes: dict[str, Outcome] = {}
    missing: dict[str, str] = {}
    for each in figures:
        own = {spec.label for spec in with_backbones(study, each.runs(study))}
        lacking = {label: reason for label, reason in study.missing.items() if label in own}
        at_work = replace(study, missing=lacking, used={})
        outcomes[each.name] = each.make(at_work)
        missing |= at_work.missing
        _write_figure(at_work, each, outcomes[each.name], choices)
    page = study.out / figures[0].name / PAGE
    if len(figures) > 1:
        page = study.out / INDEX
        write_page(
            page,
            "paper/templates/index.html.jinja",
            figures=[(each, outcomes[each.name]) for each in figures],
            facts=_facts(study, choices),
            provenance=Provenance.of(_config(study, choices)),
        )
    return Reproduction(outcomes=outcomes, missing=missing, page=page)


def _pick(names: str, options: StudyOptions) -> list[Figure]:
    """The figures of these names, as far as they can be made."""
    figures = list(FIGURES.pick(names).values())
    if not options.weights:
        return figures
    able = [each for each in figures if each.measures_weights]
    if names != "all" and len(able) < len(figures):
        refused = next(each.name for each in figures if not each.measures_weights)
        others = ", ".join(name for name, each in FIGURES.items() if each.measures_weights)
        raise ValueError(
            f"The figure {refused!r} is about models that it trains: with given weights, choose "
            f"from {others}."
        )
    return able


def _train(study: Study, specs: Sequence[RunSpec]) -> tuple[Study, dict[str, Any]]:
    """Trains what is missing, after the choices that are made before."""
    log = study.log
    needed = with_backbones(study, specs)
    _check_backbones(study, specs)
    choices: dict[str, Any] = {}
    if study.minutes is not None:
        study, choices["budget"] = fit_epochs(study, needed)
        log(f"The schedule: {describe_fit(choices['budget'])}")
    if study.tune:
        log(f"Trying the learning rates {', '.join(f'{rate:g}' for rate in RATES)}")
        study, choices["tuning"] = tune_learning_rates(study, needed)
    finished = sum(run_record(study, spec) is not None for spec in needed)
    log(f"{len(needed)} runs: {finished} finished before, {len(needed) - finished} to train")
    train_runs(study, specs)
    return study, choices


def _check_backbones(study: Study, specs: Sequence[RunSpec]) -> None:
    """Loads given weights of backbones once: training would find hours later that they differ."""
    for name, weights in study.backbones.items():
        on_it = (spec for spec in specs if BACKBONE_OF[spec.family] == name)
        if (spec := next(on_it, None)) is not None:
            initialize(create_model(run_config(study, spec)), weights)


def _facts(study: Study, choices: Mapping[str, Any]) -> dict[str, str]:
    source = study.source
    images = f"{len(source.val)} to measure on, {len(source.classes)} classes"
    if study.weights:
        about = {"Data": f"{source.name}: {images}", "Weights": ", ".join(study.weights)}
    else:
        about = {
            "Data": f"{source.name}: {len(source.train)} images to train on, {images}",
            "Schedule": study.recipe,
            "Seeds": str(study.seeds),
            "B-cos backbone": study.flavor,
        }
    facts = {
        **about,
        "Drawn on": machine(choose_device(study.device)),
        "Date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if "budget" in choices:
        facts["Budget"] = describe_fit(choices["budget"])
    if "tuning" in choices:
        chosen = (f"{kind} {found['chosen']:g}" for kind, found in choices["tuning"].items())
        rates = ", ".join(f"{rate:g}" for rate in RATES)
        facts["Learning rates"] = (
            f"{', '.join(chosen)} (of {rates}, chosen on a part of the training set)"
        )
    return facts


def _config(study: Study, choices: Mapping[str, Any]) -> dict[str, Any]:
    if study.weights:
        return {"study": study.options()}
    recipes = {kind: asdict(recipe) for kind, recipe in study.recipes.items()}
    return {"study": study.options(), "recipes": recipes, **choices}


def _run_row(study: Study, spec: RunSpec) -> Row:
    if isinstance(spec, GivenModel):
        machines = ", ".join(measured_on(study, spec))
        return {"model": spec.model, "weights": spec.weights, "measured on": machines}
    record = run_record(study, spec)
    assert record is not None
    return {
        "run": run_name(study, spec),
        "epochs": record["epochs"],
        "learning rate": record["recipe"]["learning_rate"],
        "final top-1": record["final_top1"],
        "minutes": None if record["seconds"] is None else record["seconds"] / 60,
        # Runs may be trained on one machine and measured on another.
        "trained on": record["machine"],
        "measured on": ", ".join(measured_on(study, spec)) or None,
    }


def _write_figure(
    study: Study, figure: Figure, outcome: Outcome, choices: Mapping[str, Any]
) -> None:
    folder = study.out / figure.name
    for chart in outcome.charts:
        _write_bytes(folder / f"{chart.name}.png", chart.png)
        _write_bytes(folder / f"{chart.name}.svg", chart.svg)
    for panel in outcome.panels:
        _write_bytes(folder / f"{panel.name}.png", panel.picture.data)
    runs = [_run_row(study, spec) for spec in with_backbones(study, list(study.used))]
    facts, provenance = _facts(study, choices), Provenance.of(_config(study, choices))
    headlines = [
        {"claim": line.claim, "paper": line.paper, "ours": line.ours} for line in outcome.headlines
    ]
    estimates = [
        line.value and _finite(asdict(line.value.estimate())) for line in outcome.headlines
    ]
    write_table(folder / "table.csv", [_finite(row) for row in outcome.rows])
    write_summary(
        folder / "table.json",
        {
            "figure": figure.name,
            "headlines": [
                {**line, "estimate": estimate}
                for line, estimate in zip(headlines, estimates, strict=True)
            ],
            "rows": [_finite(row) for row in outcome.rows],
            "missing": study.missing,
            "notes": list(outcome.notes),
            "runs": [_finite(row) for row in runs],
            "facts": facts,
            **asdict(provenance),
        },
    )
    missing = [{"missing": what, "reason": why} for what, why in study.missing.items()]
    parts = [
        f"# {figure.title}",
        figure.about,
        *(_markdown_table(rows) for rows in (headlines, missing, outcome.rows) if rows),
        *outcome.notes,
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
    ]
    _write_bytes(folder / "table.md", ("\n\n".join(parts) + "\n").encode())
    write_page(
        folder / PAGE,
        "paper/templates/figure.html.jinja",
        title=figure.title,
        figure=figure,
        outcome=outcome,
        missing=study.missing,
        runs=runs,
        facts=facts,
        provenance=provenance,
    )


def _markdown_table(rows: Sequence[Row]) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(each).replace("|", "\\|") for each in cells) + " |"

    header = list(rows[0])
    body = [line([cell(value) for value in row.values()]) for row in rows]
    return "\n".join([line(header), line(["---"] * len(header)), *body])


def _finite(row: Row) -> dict[str, Any]:
    """Replaces infinity, which JSON and CSV do not know, e.g. of a ratio without upper bound."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)

"""A figure on disk: plots, panels, a table three times, and one page with all of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bcosvit.files import atomic
from bcosvit.metrics import write_summary, write_table
from bcosvit.paper.figure import Outcome, PaperFigure, Row
from bcosvit.report.images import Picture
from bcosvit.report.pages import cell, write_page
from bcosvit.report.provenance import Provenance

PAGE, TABLE, INDEX = "report.html", "table", "index.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a page says beside the figure."""

    facts: Mapping[str, str]
    """Data, schedule, time."""
    runs: Sequence[Row]
    """What the figure was made of."""
    missing: Mapping[str, str]
    config: Mapping[str, Any]
    command: str
    versions: Mapping[str, str]


def write_figure(folder: Path, wanted: PaperFigure, outcome: Outcome, about: About) -> None:
    """Everything about one figure, each file whole or absent."""
    for chart in outcome.charts:
        _bytes(folder / f"{chart.name}.png", chart.png)
        _bytes(folder / f"{chart.name}.svg", chart.svg)
    for shown in outcome.panels:
        _bytes(folder / f"{shown.name}.png", shown.png)
    write_table(folder / f"{TABLE}.csv", [_blank(row) for row in outcome.rows])
    with atomic(folder / f"{TABLE}.md") as temporary:
        temporary.write_text(_markdown(wanted, outcome, about), "utf-8")
    write_summary(folder / f"{TABLE}.json", _summary(wanted, outcome, about))
    _page(folder / PAGE, wanted, outcome, about)


def write_index(path: Path, made: Mapping[PaperFigure, Outcome], about: About) -> None:
    """What the paper says and what was found, figure by figure."""
    template = "paper/templates/index.html.jinja"
    write_page(path, template, made=made, about=about, provenance=_provenance(about))


def _page(path: Path, wanted: PaperFigure, outcome: Outcome, about: About) -> None:
    write_page(
        path,
        "paper/templates/figure.html.jinja",
        title=wanted.title,
        figure=wanted,
        outcome=outcome,
        pictures=[
            Picture(data=shown.png, alt=shown.caption, width=shown.size[0], height=shown.size[1])
            for shown in outcome.panels
        ],
        about=about,
        provenance=_provenance(about),
    )


def _provenance(about: About) -> Provenance:
    return Provenance(command=about.command, versions=about.versions, config=about.config)


def _markdown(wanted: PaperFigure, outcome: Outcome, about: About) -> str:
    parts = [f"# {wanted.title}", wanted.about]
    lines = [{"claim": h.claim, "paper": h.paper, "here": h.ours} for h in outcome.headlines]
    parts.append(_markdown_table(lines))
    if about.missing:
        missing = [{"missing": what, "why": why} for what, why in about.missing.items()]
        parts.append(_markdown_table(missing))
    if outcome.rows:
        parts.append(_markdown_table(outcome.rows))
    parts += outcome.notes
    parts.append("\n".join(f"- {name}: {value}" for name, value in about.facts.items()))
    return "\n\n".join(parts) + "\n"


def _markdown_table(rows: Sequence[Row]) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    header = list(rows[0])
    body = [line([cell(value) for value in row.values()]) for row in rows]
    return "\n".join([line(header), line(["---"] * len(header)), *body])


def _summary(wanted: PaperFigure, outcome: Outcome, about: About) -> dict[str, Any]:
    headlines = []
    for line in outcome.headlines:
        value = None if line.value is None else dataclasses.asdict(line.value.estimate())
        said = {"claim": line.claim, "paper": line.paper, "ours": line.ours}
        headlines.append({**said, "estimate": value and _blank(value)})
    return {
        "figure": wanted.name,
        "headlines": headlines,
        "rows": [_blank(row) for row in outcome.rows],
        "missing": dict(about.missing),
        "notes": list(outcome.notes),
        "runs": [_blank(row) for row in about.runs],
        "facts": dict(about.facts),
        "config": dict(about.config),
        "versions": dict(about.versions),
        "command": about.command,
    }


def _blank(row: Row) -> dict[str, Any]:
    """JSON and CSV know no infinity: a ratio without an upper bound has none written."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)

"""A figure on disk: plots, panels, a table three times, and one page with all of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bcosvit.files import atomic
from bcosvit.metrics import write_summary, write_table
from bcosvit.paper.figure import Headline, Outcome, PaperFigure, Row
from bcosvit.report.html import (
    Html,
    definitions,
    element,
    figure,
    foot,
    page,
    paragraph,
    picture,
    table,
    text,
)

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
    lead = Html(definitions(about.facts))
    ending = foot(about.command, about.config, about.versions)
    with page(path, "The paper's figures, reproduced", lead, ending) as write:
        for wanted, outcome in made.items():
            link = element("a", text(wanted.title), href=f"{wanted.name}/{PAGE}")
            write(element("section", element("h2", link), _headlines(outcome.headlines)))


def _page(path: Path, wanted: PaperFigure, outcome: Outcome, about: About) -> None:
    lead = Html(paragraph(wanted.about) + definitions(about.facts))
    ending = foot(about.command, about.config, about.versions)
    with page(path, wanted.title, lead, ending) as write:
        write(_section("The paper and this reproduction", _headlines(outcome.headlines)))
        if about.missing:
            rows = list(about.missing.items())
            unmade = table("Drawn without these.", ("Run or measurement", "Why"), rows)
            write(_section("Missing", unmade))
        if outcome.charts:
            drawn = [
                figure(chart.inline, text(chart.caption), wide=chart.wide)
                for chart in outcome.charts
            ]
            write(_section("Plots", element("div", *drawn, class_="charts")))
        for shown in outcome.panels:
            image = picture(shown.png, shown.caption, shown.size)
            write(element("section", figure(image, text(shown.caption))))
        if outcome.rows:
            link = element("a", text(f"{TABLE}.csv"), href=f"{TABLE}.csv")
            about_it = "Intervals are 95 %, by resampling pictures (whole grids in the grid game)."
            numbers = _table(about_it, outcome.rows)
            if outcome.means:
                every = text(f"All {len(outcome.rows)} rows")
                folded = element("details", element("summary", every), numbers)
                numbers = Html(_table("Means over models.", outcome.means) + folded)
            write(_section("Table", numbers, element("p", link)))
        if outcome.notes:
            write(_section("Notes", *(paragraph(note) for note in outcome.notes)))
        if about.runs:
            write(_section("Runs", _table("What this figure was made of.", about.runs)))


def _headlines(headlines: Sequence[Headline]) -> Html:
    rows = [(line.claim, line.paper, line.ours) for line in headlines]
    return table("Means with 95 % intervals.", ("Claim", "Paper", "Here"), rows)


def _section(heading: str, *content: Html) -> Html:
    return element("section", element("h2", text(heading)), *content)


def _table(caption: str, rows: Sequence[Row]) -> Html:
    header = list(rows[0])
    numbers = [at for at, name in enumerate(header) if not isinstance(rows[0][name], str)]
    body = [[_shown(value) for value in row.values()] for row in rows]
    return table(caption, header, body, numbers=numbers)


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
    body = [line([_shown(value) for value in row.values()]) for row in rows]
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


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)


def _bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)

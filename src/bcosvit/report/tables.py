"""What tables show, in the terminal and on pages."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from bcosvit.metrics import Estimate, Evaluation
from bcosvit.metrics.accuracy import ClassAccuracy
from bcosvit.models.summary import ModelSummary
from bcosvit.report.pages import cell

MATRIX = 20
"""Classes up to which a confusion matrix is shown."""


def confusion_matrix(
    accuracies: Sequence[ClassAccuracy],
) -> tuple[list[int], list[list[int]]] | None:
    """Counts how often pictures of each class are taken for each class.

    Args:
        accuracies: What is predicted for each class.

    Returns:
        The classes of columns, and a row of counts for each of ``accuracies``; None where there are
        more than `MATRIX` classes.
    """
    taken = [{each.label: each.correct, **dict(each.taken_for)} for each in accuracies]
    labels = sorted({label for each in taken for label in each})
    if len(labels) > MATRIX:
        return None
    return labels, [[each.get(label, 0) for label in labels] for each in taken]


def metric_columns(found: Evaluation) -> dict[str, Mapping[str, Estimate]]:
    """Returns the means of all metrics by column title and method."""
    return {
        title: values
        for result in found.results.values()
        for title, values in result.columns().items()
    }


def evaluation_table(found: Evaluation) -> RenderableType:
    """Tabulates an evaluation: what does not depend on a method, then metrics by method."""
    facts = Table(show_header=False, box=None)
    for result in found.results.values():
        for title, value in result.facts().items():
            facts.add_row(escape(title), escape(str(value)))
    if found.completeness is not None:
        facts.add_row("Contributions", str(found.completeness))
    columns = metric_columns(found)
    if not columns:
        return facts
    table = Table("Method")
    for title in columns:
        table.add_column(escape(title), justify="right")
    for method in found.settings["methods"]:
        cells = [values.get(method) for values in columns.values()]
        # The interval is below the mean, where narrow terminals have room for it.
        table.add_row(escape(method), *(escape(cell(each).replace(" [", "\n[")) for each in cells))
    return Group(facts, table)


def list_table(title: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """Tabulates names, each with what is known about it."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def summary_table(name: str, summary: ModelSummary) -> RenderableType:
    """Tabulates the parts of a model with their cost, then the memory of a batch."""
    parts = Table(title=name, title_justify="left", title_style="bold")
    parts.add_column("part")
    for column in ("layers", "parameters", "trained", "GFLOPs / image"):
        parts.add_column(column, justify="right")
    for part in summary.parts:
        parts.add_row(
            part.name,
            f"{part.layers:,}",
            f"{part.parameters:,}",
            f"{part.trained:,}",
            f"{part.flops / 1e9:.2f}",
        )
    parts.add_section()
    parts.add_row(
        "all",
        f"{sum(part.layers for part in summary.parts):,}",
        f"{sum(part.parameters for part in summary.parts):,}",
        f"{sum(part.trained for part in summary.parts):,}",
        f"{sum(part.flops for part in summary.parts) / 1e9:.2f}",
    )
    batch = Table(show_header=False, box=None)
    batch.add_row("image", f"{summary.image_size[0]}×{summary.image_size[1]} pixels")
    if summary.grid is not None:
        rows, columns = summary.grid
        batch.add_row("tokens", f"{rows}×{columns} = {rows * columns}")
    batch.add_row("weights", _size(summary.weights_bytes))
    batch.add_row(f"inference, batch {summary.batch}", _size(summary.inference_bytes))
    batch.add_row(f"training, batch {summary.batch}", _size(summary.training_bytes))
    batch.add_row("", "[dim]float32, estimated from shapes[/]")
    return Group(parts, batch)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

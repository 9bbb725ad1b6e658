"""Every metric by every method: the one table that pages and terminals show."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from bcosvit.metrics import Estimate, Evaluation

Columns = dict[str, Mapping[str, Estimate]]


def metric_columns(found: Evaluation) -> Columns:
    """By metric and method; a metric that found nothing to measure has no methods."""
    return {
        title: values
        for result in found.results.values()
        for title, values in result.columns().items()
    }


def evaluation_table(found: Evaluation) -> RenderableType:
    """For the terminal, the accuracy above it."""
    accuracy = Table(show_header=False, box=None)
    for result in found.results.values():
        for title, value in result.facts().items():
            accuracy.add_row(title, escape(str(value)))
    if (complete := found.completeness) is not None:
        accuracy.add_row("Contributions", str(complete))
    columns = metric_columns(found)
    if not columns:
        return accuracy
    table = Table("Method")
    for name in columns:
        table.add_column(name, justify="right")
    for method in found.settings["methods"]:
        cells = [values.get(method) for values in columns.values()]
        table.add_row(method, *("–" if cell is None else escape(str(cell)) for cell in cells))
    return Group(accuracy, table)

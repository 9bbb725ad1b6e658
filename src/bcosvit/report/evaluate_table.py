"""Every metric by every method: the one table that pages and terminals show."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from bcosvit.metrics import Completeness, Estimate, Evaluation

Columns = dict[str, Mapping[str, Estimate]]


def metric_columns(found: Evaluation) -> Columns:
    """By metric and method; a metric that found nothing to measure has no methods."""
    columns: Columns = {}
    if found.localization is not None:
        columns["Localization"] = found.localization.means
    if found.perturbation is not None:
        columns["Perturbation (ABC)"] = found.perturbation.abc
    if found.masks is not None:
        means = found.masks.means
        columns["Energy in the mask"] = {method: each["energy"] for method, each in means.items()}
        columns["Pointing"] = {method: each["pointing"] for method, each in means.items()}
    return columns


def completeness(found: Completeness) -> str:
    """For people."""
    count = f"{found.explanations} explanations"
    return f"miss logits by at most {found.worst:.1e} of logit or bias, the larger ({count})"


def evaluation_table(found: Evaluation) -> RenderableType:
    """For the terminal, the accuracy above it."""
    accuracy = Table(show_header=False, box=None)
    accuracy.add_row("Top-1 accuracy", escape(str(found.accuracy.top1)))
    accuracy.add_row("Top-5 accuracy", escape(str(found.accuracy.top5)))
    if (complete := found.completeness) is not None:
        accuracy.add_row("Contributions", completeness(complete))
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

"""Tables for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table

from bcosvit.models.summary import ModelSummary


def summary_table(name: str, summary: ModelSummary) -> RenderableType:
    """A model's parts with their cost, then what a batch takes."""
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


def list_table(names: list[str]) -> Table:
    """Every model name, one a row."""
    table = Table(title="models", title_justify="left", title_style="bold", show_header=False)
    for name in names:
        table.add_row(name)
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

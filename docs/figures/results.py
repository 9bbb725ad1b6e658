"""Draws plots of the tables in `docs/results.md`, so that plots and tables cannot differ.

    python docs/figures/results.py

Every row of a table is a group of bars and every column a series. Intervals are those in the
cells; accuracies without one get that of a share of the validation photographs.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from bcosvit.metrics import Bootstrap, Estimate
from bcosvit.metrics.perturbation import OUTPUTS
from bcosvit.paper.charts import grouped_bars

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "results.md"
PHOTOGRAPHS = 3925
"""In Imagenette's validation set."""
NUMBER = r"(-?[\d.]+)"
CELL = re.compile(rf"{NUMBER}(?: ?%)?(?: \[{NUMBER}, {NUMBER}\])?")


def main() -> None:
    accuracy = "top-1 accuracy, %"
    draw("positional", "Positional information", ["none", "emb", "add", "mul"], accuracy)
    variants = ["B-cos, MaxOut 2", "B-cos, no MaxOut", "conventional"]
    backbones = ["on v1", "on v2", "conventional"]
    draw("localization", "Localization", backbones, "localization")
    draw("perturbation", "Perturbation", backbones, "area between the curves")
    draw("accuracy", "Accuracy", backbones, accuracy)
    outputs = [f"perturbation, {output}" for output in OUTPUTS]
    methods = ("inherent", "LibraGrad", "GradSAM", "input × gradient", "Rollout")
    draw("default-perturbation", "The default model", outputs, "area", methods)
    every = [*backbones, "default model"]
    draw("insertion", "Deletion and insertion", every, "insertion − deletion")
    draw("additivity", "Additivity", every, "R²")
    draw("maxout", "MaxOut", variants, accuracy)
    branches = ["skip ÷ attention branch"]
    draw("attention", "Attention", branches, "‖skip‖ ÷ ‖attention‖", logarithmic=True)
    models = ["v1", "v2", "Ti-87", "default model"]
    axis = "inherent ÷ the best other method"
    draw("options", "Which conclusion depends on what", models, axis, logarithmic=True)


def draw(
    name: str,
    heading: str,
    columns: list[str],
    axis: str,
    rows: Sequence[str] | None = None,
    *,
    logarithmic: bool = False,
) -> None:
    """Draws some columns, and all or some rows, of the first table below a heading."""
    groups = {
        label: {column: estimate(cells[column]) for column in columns if estimate(cells[column])}
        for label, cells in table(heading).items()
        if rows is None or label in rows
    }
    chart = grouped_bars(name, heading, axis, groups, series=columns, logarithmic=logarithmic)
    (FOLDER / f"{name}.svg").write_bytes(chart.svg)


def table(heading: str) -> dict[str, dict[str, str]]:
    """The cells of the first table below a heading, by row and column."""
    text = re.split(rf"^#+ {re.escape(heading)}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    parts = text.split("\n\n")
    lines = next(part for part in parts if part.lstrip().startswith("|")).split("\n")
    header, _, *rows = (
        [cell.strip().strip("`*") for cell in line.strip("| ").split("|")]
        for line in lines
        if line.strip()
    )
    # The corner of a table is often empty and is lost with the bars of the line.
    names = header[-(len(rows[0]) - 1) :]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}


def estimate(cell: str) -> Estimate | None:
    """The number of a cell with its interval; None where there is no number."""
    found = CELL.match(cell.replace("*", "").replace("−", "-"))
    if found is None:
        return None
    mean, low, high = (None if part is None else float(part) for part in found.groups())
    if low is None and "%" in cell:
        right = torch.zeros(PHOTOGRAPHS)
        right[: round(mean / 100 * PHOTOGRAPHS)] = 100
        return Bootstrap().mean(right)
    if low is None or high is None:
        low = high = mean
    return Estimate(mean=mean, low=low, high=high, count=0)


if __name__ == "__main__":
    main()

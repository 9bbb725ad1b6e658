"""Plots the sweep that ``benchmarks/gpu.py`` measured, and prints the slopes.

    python benchmarks/gpu.py --only sweep --json gpu.json
    python benchmarks/gpu_plot.py gpu.json docs/figures/cost.svg

Both axes are logarithmic: where a curve is straight, the cost grows like size^slope. The slope is
fitted to the upper half of an axis, where the GPU is fully used.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

AXES = {"batch": "images per batch", "tokens": "tokens per image", "width": "width"}
KINDS = {"training": "#c0392b", "inference": "#2563a8"}


def slope(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Fits the slope of log y over log x to the upper half of the axis."""
    half = len(x) // 2
    return float(np.polyfit(np.log(x[half:]), np.log(y[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    results = json.loads(args.json.read_text())
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cost", "font.size": 9})
    figure, panels = plt.subplots(1, len(AXES), figsize=(9, 3), layout="constrained")
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        swept = "side" if axis == "tokens" else axis
        rows = [row for row in results["sweep"] if row["axis"] == swept]
        x = np.array([row[axis] for row in rows], float)
        for kind, color in KINDS.items():
            y = np.array([row[kind] for row in rows])
            steep = slope(x, y)
            print(f"{kind:9} over {axis:6}: slope {steep:.2f}")
            panel.loglog(x, y, "o-", color=color, label=f"{kind}, slope {steep:.2f}")
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
        panel.set_xlabel(label)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds")
    figure.savefig(args.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()

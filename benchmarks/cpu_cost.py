"""Measures and plots what explanations cost on a CPU over batch, tokens, classes and picture size.

    python benchmarks/cpu_cost.py --out docs/figures/cost-cpu.svg [--rounds 3] [--json cost.json]

The model is bcos_vit_ti_38 without MaxOut in its transformer, with random weights, in float32. The
time is that of the process with one thread, which other load on the machine hardly changes: the
smallest of the rounds. Tokens are measured with the transformer alone, since they grow with the
picture otherwise. Both axes are logarithmic, so that a slope of 1 means proportional.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

from bcosvit import create_model, explain
from bcosvit.models import VisionTransformer
from bcosvit.nn import frozen_view, prepared_view

AXES = {
    "batch": "pictures at once",
    "tokens": "tokens (transformer alone)",
    "classes": "classes of one picture",
    "size": "pixels a side",
}
KINDS = {"predicting": "#2563a8", "explaining": "#c0392b"}
Row = dict[str, float | str]


def seconds(rounds: int, run: Callable[[], object]) -> float:
    """Returns the smallest time; the first call is a warm-up."""
    times = []
    for turn in range(rounds + 1):
        start = time.process_time()
        run()
        if turn:
            times.append(time.process_time() - start)
    return min(times)


def model(size: int) -> VisionTransformer:
    made = create_model("bcos_vit_ti_38", num_classes=10, maxout=1, image_size=size)
    assert isinstance(made, VisionTransformer)
    return prepared_view(made)


def sweep(rounds: int) -> list[Row]:
    rows: list[Row] = []

    def add(
        axis: str, value: int, predict: Callable[[], object], run: Callable[[], object]
    ) -> None:
        row: Row = {"axis": axis, "value": value}
        row["predicting"] = seconds(rounds, torch.no_grad()(predict))
        row["explaining"] = seconds(rounds, run)
        rows.append(row)
        print(row, flush=True)

    usual = model(224)
    for batch in (1, 2, 4, 8, 16):
        images = torch.rand(batch, 3, 224, 224)
        add("batch", batch, partial(usual, images), partial(explain, usual, images, 3))
    image = torch.rand(1, 3, 224, 224)
    for count in (1, 2, 5, 10):
        classes = torch.arange(count)[None]
        add("classes", count, partial(usual, image), partial(explain, usual, image, classes))
    for size in (112, 160, 224, 320, 448):
        sized, picture = model(size), torch.rand(1, 3, size, size)
        add("size", size, partial(sized, picture), partial(explain, sized, picture, 3))
        transformer(add, sized)
    return rows


def transformer(add: Callable[..., None], sized: VisionTransformer) -> None:
    """Measures the blocks and the head of a model, on made-up tokens."""
    count, width = sized.config.grid[0] * sized.config.grid[1], sized.config.token_width
    tokens, frozen = torch.rand(1, count, width), frozen_view(sized, with_parameter_grad=False)

    def rows() -> torch.Tensor:
        x = tokens.clone().requires_grad_()
        return torch.autograd.grad(frozen.from_tokens(x)[:, 3].sum(), x)[0]

    add("tokens", count, lambda: sized.from_tokens(tokens), rows)


def slope(x: np.ndarray, y: np.ndarray) -> float:  # type: ignore[type-arg]
    half = len(x) // 2
    return float(np.polyfit(np.log(x[half:]), np.log(y[half:]), 1)[0])


def draw(rows: list[Row], out: Path) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cost", "font.size": 9})
    figure, panels = plt.subplots(1, len(AXES), figsize=(11, 3), layout="constrained")
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        measured = [row for row in rows if row["axis"] == axis]
        x = np.array([row["value"] for row in measured], float)
        for kind, color in KINDS.items():
            y = 1000 * np.array([row[kind] for row in measured], float)
            name = kind if axis == "classes" else f"{kind}, slope {slope(x, y):.2f}"
            panel.loglog(x, y, "o-", color=color, label=name)
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
        panel.set_xlabel(label)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds of one core")
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = sweep(args.rounds)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    draw(rows, args.out)


if __name__ == "__main__":
    main()

"""The run's numbers, epoch by epoch: ``metrics.csv`` and ``curves.png``.

The rows live in the checkpoint and the files are drawn from them, never appended to. So a run that
resumes forgets what happened after its checkpoint, and its files read as if it had never stopped.
For the same reason there are no times in them.
"""

import csv
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from bcosvit.files import atomic
from bcosvit.train.task import Task

Row = dict[str, float]

METRICS = {
    "train/loss": "train_loss",
    "train/top1": "train_top1",
    "val/loss": "val_loss",
    "val/top1": "val_top1",
    "val/top5": "val_top5",
}
"""What is logged, and the column it becomes."""

_CURVES_EVERY = 60.0
_TRAIN, _VAL = "#8c96a6", "#c8302f"


class History(Callback):
    """Collects a row per epoch and keeps the files up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self._drawn = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Asked for on every process: the metrics are reduced over them when read.
        logged = trainer.callback_metrics
        assert isinstance(pl_module, Task)
        row: Row = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "learning_rate": pl_module.rate_at(trainer.global_step - 1),
        }
        row |= {column: logged[name].item() for name, column in METRICS.items() if name in logged}
        self.rows.append(row)
        if trainer.is_global_zero:
            self._write_csv()
            if time.monotonic() - self._drawn > _CURVES_EVERY:
                self._write_curves()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.rows:
            self._write_csv()
            self._write_curves()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def _write_csv(self) -> None:
        with atomic(self.folder / "metrics.csv") as temporary, temporary.open("w") as file:
            writer = csv.DictWriter(file, self.rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def _write_curves(self) -> None:
        with atomic(self.folder / "curves.png") as temporary:
            curves(self.rows).savefig(temporary, dpi=120)
        self._drawn = time.monotonic()


def curves(rows: list[Row]) -> Figure:
    """Loss, accuracy and learning rate over epochs."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    _line(loss, rows, "train_loss", "training", _TRAIN)
    _line(loss, rows, "val_loss", "validation", _VAL)
    loss.set(title="loss", yscale="log")
    _line(accuracy, rows, "train_top1", "training", _TRAIN)
    _line(accuracy, rows, "val_top1", "validation", _VAL)
    _line(accuracy, rows, "val_top5", "validation, top 5", _VAL, linestyle=":")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    best = max(rows, key=lambda row: row["val_top1"])
    accuracy.plot(best["epoch"], best["val_top1"], "o", color=_VAL)
    accuracy.set(title=f"accuracy, best {best['val_top1']:.1%}", ylim=(0, 1.02))
    _line(rate, rows, "learning_rate", "", _TRAIN)
    rate.set(title="learning rate", ylim=(0, None))
    for axes in (loss, accuracy, rate):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for axes in (loss, accuracy):
        axes.legend(frameon=False)
    return figure


def _line(
    axes: Axes, rows: list[Row], column: str, label: str, color: str, linestyle: str = "-"
) -> None:
    if column in rows[0]:
        marker = "." if len(rows) < 3 else ""
        x, y = [row["epoch"] for row in rows], [row[column] for row in rows]
        axes.plot(x, y, linestyle, color=color, label=label, marker=marker)

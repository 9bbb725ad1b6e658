"""What one sees of a run while it runs: a bar, and a line per epoch that stays."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.progress
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomBarColumn,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from bcosvit.train.task import Task

_REFRESH = 0.25
"""Seconds between looks at the metrics, each of which waits for the device."""


class Progress(RichProgressBar):
    """Loss and accuracy of the epoch so far, images per second, and time left for the whole run.

    Where the output is no terminal there are only the lines.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=4)
        self.console = Console()
        if not self.console.is_terminal:
            self.disable()
        self._began = self._epoch_began = self._looked = time.monotonic()
        self._steps_before = self._epoch_steps_before = 0
        self._speed = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = self._epoch_began = time.monotonic()
        self._steps_before = self._epoch_steps_before = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._epoch_began = time.monotonic()
        self._epoch_steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        is_last = batch_idx + 1 == trainer.num_training_batches
        if self.is_enabled and (is_last or now - self._looked > _REFRESH):
            self._looked = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        # Kept before validation's own time enters into it.
        self._speed = self._images_per_second(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics({"images_per_second": self._speed}, trainer.global_step)
        if not trainer.is_global_zero:
            return
        logged = trainer.callback_metrics
        epochs, epoch = trainer.max_epochs, trainer.current_epoch + 1
        (self._console or self.console).print(
            f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
            f"  loss {logged['train/loss']:.4f}, validation {logged['val/loss']:.4f}"
            f"  accuracy {logged['train/top1']:.1%}, validation {logged['val/top1']:.1%}"
            f"  {self._speed:.0f} images/s  {self._time_left(trainer, pl_module)} left",
            highlight=False,
            soft_wrap=True,
        )

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        assert isinstance(pl_module, Task)
        loss, top1 = pl_module.train_means["loss"], pl_module.train_means["top1"]
        # This process's own: reducing them would hold up all others.
        return {
            "loss": f"{loss.total.item() / max(loss.weight.item(), 1):.4f}",
            "accuracy": f"{top1.total.item() / max(top1.weight.item(), 1):.1%}",
            "images/s": f"{self._images_per_second(trainer, pl_module):.0f}",
            "left": self._time_left(trainer, pl_module),
        }

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        return [
            TextColumn("[progress.description]{task.description}"),
            CustomBarColumn(complete_style="#c8302f", finished_style="#c8302f"),
            BatchesProcessedColumn(style=""),
        ]

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {current_epoch + 1}/{self.trainer.max_epochs}"

    def _images_per_second(self, trainer: Trainer, pl_module: LightningModule) -> float:
        assert isinstance(pl_module, Task)
        steps = trainer.global_step - self._epoch_steps_before
        return steps * pl_module.recipe.batch_size / (time.monotonic() - self._epoch_began)

    def _time_left(self, trainer: Trainer, pl_module: LightningModule) -> str:
        assert isinstance(pl_module, Task)
        done = trainer.global_step - self._steps_before
        total = pl_module.steps_per_epoch * pl_module.recipe.epochs
        per_step = (time.monotonic() - self._began) / max(done, 1)
        minutes, seconds = divmod(round(per_step * (total - trainer.global_step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


@contextmanager
def counter(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for what is done before a run; to be told how much is done, of how much."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with rich.progress.Progress(*columns) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

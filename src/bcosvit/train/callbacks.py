"""Lightning callbacks: the best model, history and curves, images of contributions, progress, the
list of unreadable images, and regular checkpoints with a clean stop at Ctrl-C."""

import csv
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EMAWeightAveraging, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomBarColumn,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image
from rich.console import Console
from rich.progress import TextColumn
from torch import Tensor

from bcosvit.attribution import explain
from bcosvit.data.dataset import Skipped, Split, write_skipped
from bcosvit.data.labeled import LabeledImages
from bcosvit.files import atomic
from bcosvit.metrics import GridPointingGame, MaskOverlap, Metric, evaluate
from bcosvit.metrics.evaluation import obstacles
from bcosvit.models.card import model_card
from bcosvit.models.unknown import fit_known
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY, UNLIKE_KEY, save_state
from bcosvit.progress import PlainLines, duration
from bcosvit.report.evaluate import progress_bars
from bcosvit.report.images import Tile, contribution_image, panel, photo_image
from bcosvit.train.checkpoints import LAST
from bcosvit.train.plan import Plan
from bcosvit.train.recipe import Recipe
from bcosvit.train.task import Task, model_state

WEIGHTS, CARD = "best.safetensors", "README.md"

Row = dict[str, float]

METRICS = {
    "train/loss": "train_loss",
    "train/top1": "train_top1",
    "val/loss": "val_loss",
    "val/top1": "val_top1",
    "val/top5": "val_top5",
}
"""Logged metrics, and their columns in ``metrics.csv``."""

_CURVES_EVERY = 60.0
"""Seconds between drawings of ``curves.png``."""
_REFRESH = 0.25
"""Seconds between updates of the progress bar, each of which waits for the device."""
_PLAIN_PAUSE = 60.0
"""Seconds between plain lines within an epoch."""
SHOWN_IMAGES = 8
_LOCALIZED_IMAGES, _LOCALIZED_GRIDS = 128, 20
_TRAIN, _VAL, _LOCALIZATION = "#8c96a6", "#c8302f", "#2f6fc8"


class BestModel(Callback):
    """Saves the model, with its class names and a model card, when its validation accuracy is the
    highest so far; of a converted model, only where its constants have faded.

    It must come before the callback that averages weights, which restores the trained weights at
    the same hook: what is saved is what was validated. Lightning's ``ModelCheckpoint`` would save
    a whole checkpoint instead of a weights file.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.accuracy = -1.0
        self.epoch = 0

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        # In every process: the metric is reduced, and sharded weights are gathered.
        pl_module.check_validated()
        accuracy = pl_module.val_means["top1"].compute().item()
        if accuracy <= self.accuracy or not pl_module.is_final:
            return
        self.accuracy, self.epoch = accuracy, trainer.current_epoch + 1
        state = trainer.strategy.lightning_module_state_dict()
        pl_module.check_weights(model_state(state))
        if not trainer.is_global_zero:
            return
        weights, metadata = model_state(state), self._metadata()
        if len(pl_module.largest_logits) > 1:
            # Of the first process, where there are several: an even share of the images.
            unlike = fit_known(torch.tensor(pl_module.largest_logits)[:, None])
            metadata[UNLIKE_KEY] = unlike.dumps()
        save_state(weights, self.plan.model, self.folder / WEIGHTS, metadata=metadata)
        with atomic(self.folder / CARD) as temporary:
            temporary.write_text(self._card(), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.accuracy, self.epoch = state_dict["accuracy"], state_dict["epoch"]

    def _metadata(self) -> dict[str, str]:
        run = {
            "data": self.plan.data,
            "recipe": self.plan.recipe_name,
            "epoch": self.epoch,
            "accuracy": self.accuracy,
            # How images must be cropped to be seen as in validation.
            "eval_crop": self.plan.recipe.eval_crop,
        }
        if self.plan.image_size != self.plan.model.image_size[0]:
            run["image_size"] = self.plan.image_size
        return {CLASSES_KEY: json.dumps(self.plan.classes), RUN_KEY: json.dumps(run)}

    def _card(self) -> str:
        plan = self.plan
        return model_card(
            plan.model,
            self._metadata(),
            weights=WEIGHTS,
            details={
                "input": f"RGB in [0, 1], {plan.image_size}×{plan.image_size} pixels",
                "epochs": f"{plan.recipe.epochs} (`run.yaml` has the whole recipe)",
                "images": f"{plan.train_images} for training, {plan.val_images} for validation",
            },
        )


class History(Callback):
    """Collects one row per epoch, and writes ``metrics.csv`` and ``curves.png``.

    The rows are part of the checkpoint, and the files are always written as a whole. A run that
    resumes therefore drops what happened after its checkpoint, and its files are those of a run
    that never stopped. For the same reason they contain no times. (Lightning's ``CSVLogger``
    appends.)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self._drawn = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Read in every process: metrics are reduced when they are read.
        logged = trainer.callback_metrics
        assert isinstance(pl_module, Task)
        row: Row = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "learning_rate": pl_module.lr_at(trainer.global_step - 1),
        }
        row |= {column: logged[name].item() for name, column in METRICS.items() if name in logged}
        row |= pl_module.measured
        self.rows.append(row)
        for logger in trainer.loggers if pl_module.measured else []:
            logger.log_metrics(pl_module.measured, trainer.global_step)
        if trainer.is_global_zero:
            self._write_csv()
            if time.monotonic() - self._drawn > _CURVES_EVERY:
                self._write_curves()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Also where a run was killed after its last step, and there is nothing left to train.
        if trainer.is_global_zero and self.rows:
            self._write_csv()
            self._write_curves()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def _write_csv(self) -> None:
        with atomic(self.folder / "metrics.csv") as temporary, temporary.open("w") as file:
            # Some columns are not measured in every epoch, or only since the run was resumed.
            columns = dict.fromkeys(column for row in self.rows for column in row)
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def _write_curves(self) -> None:
        with atomic(self.folder / "curves.png") as temporary:
            plot_curves(self.rows).savefig(temporary, dpi=120)
        self._drawn = time.monotonic()


def plot_curves(rows: list[Row]) -> Figure:
    """Plots loss, accuracy and learning rate over epochs."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    _line(loss, rows, "train_loss", "training", _TRAIN)
    _line(loss, rows, "val_loss", "validation", _VAL)
    loss.set(title="loss", yscale="log")
    _line(accuracy, rows, "train_top1", "training", _TRAIN)
    _line(accuracy, rows, "val_top1", "validation", _VAL)
    _line(accuracy, rows, "val_top5", "validation, top 5", _VAL, linestyle=":")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    _line(accuracy, rows, "val_localization", "localization", _LOCALIZATION)
    _line(accuracy, rows, "val_energy", "energy in the mask", _LOCALIZATION, linestyle=":")
    final = [row for row in rows if row.get("fade", 0.0) == 0] or rows
    best = max(final, key=lambda row: row["val_top1"])
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
    rows = [row for row in rows if column in row]
    if rows:
        marker = "." if len(rows) < 3 else ""
        x, y = [row["epoch"] for row in rows], [row[column] for row in rows]
        axes.plot(x, y, linestyle, color=color, label=label, marker=marker)


class ContributionImages(Callback):
    """Writes ``explanations/epoch-0005.png`` every few epochs: the same validation images each
    time, beside the contributions to their true class, or to the teacher's where images have no
    labels. For B-cos models only."""

    def __init__(self, folder: Path, val: Split, classes: tuple[str, ...], every: int) -> None:
        self.folder, self.val, self.classes, self.every = folder, val, classes, every

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        epoch = trainer.current_epoch + 1
        due = epoch % self.every == 0 or epoch in (1, trainer.max_epochs)
        if not due or not trainer.is_global_zero:
            return
        images, labels = (each.to(pl_module.device) for each in self._samples())
        drawn = self.draw(pl_module, images, pl_module.known_labels(images, labels))
        with atomic(self.folder / f"epoch-{epoch:04}.png") as temporary:
            drawn.save(temporary)

    def draw(self, task: Task, images: Tensor, labels: Tensor) -> Image.Image:
        """Draws images and their contributions, two pairs per row."""
        with torch.no_grad():
            predictions = task.model(images).argmax(1).tolist()
        attribution = explain(task.model, images, labels)
        tiles = []
        for image, map_, label, predicted in zip(
            images, attribution.map, labels.tolist(), predictions, strict=True
        ):
            name, seen = self.classes[label], self.classes[predicted]
            verdict = f"{name}: correct" if predicted == label else f"{name}: seen as {seen}"
            tiles.append(Tile(image=photo_image(image), label=verdict))
            tiles.append(Tile(image=contribution_image(map_), label=f"what speaks for {name}"))
        return panel([tiles[start : start + 4] for start in range(0, len(tiles), 4)])

    def _samples(self) -> tuple[Tensor, Tensor]:
        # Spread over the split, whose images are often sorted by class.
        count = min(SHOWN_IMAGES, len(self.val))
        positions = [round(k * (len(self.val) - 1) / max(count - 1, 1)) for k in range(count)]
        samples = [self.val[position, 0] for position in positions]
        images = [image for image, _, _ in samples if isinstance(image, Tensor)]
        return torch.stack(images), torch.tensor([label for _, label, _ in samples])


class AveragedWeights(EMAWeightAveraging):
    """Averages the trained weights exponentially; validation and saving use the average.

    Until the step ``start`` the average is the trained weights themselves: while the constants of a
    converted model fade, weights of earlier steps belong to another λ and B.
    """

    def __init__(self, decay: float, start: int = 0) -> None:
        super().__init__(decay=decay)
        self.start = start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step <= self.start:
            assert self._average_model is not None
            # The first update of an average is a copy.
            self._average_model.n_averaged.zero_()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class Localization(Callback):
    """Measures every few epochs where inherent explanations point, on the same validation images.

    The task gets ``val_localization``, the mean of the grid pointing game, and ``val_energy``, the
    share of the positive contribution that falls on the object where the data have masks. The
    images are few: the numbers are good enough to see alignment emerge, not to be reported.
    """

    def __init__(self, images: LabeledImages, every: int) -> None:
        self.images, self.every = images.limit(_LOCALIZED_IMAGES), every
        self._labeled = False

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        epoch = trainer.current_epoch + 1
        if epoch % self.every == 0 or epoch in (1, trainer.max_epochs):
            pl_module.measured |= self.measure(pl_module)

    def measure(self, task: Task) -> Row:
        """Measures what can be measured; in every process, since they share the work."""
        if not self._labeled:
            # The teacher decides where the data have no labels.
            labels = [self._label(task, number) for number in range(len(self.images))]
            self.images, self._labeled = self.images.relabeled(labels), True
        images, masks = self.images, self.images.masks()
        metrics: list[Metric] = [GridPointingGame(grids=_LOCALIZED_GRIDS), MaskOverlap()]
        left_out = obstacles(metrics, task.model, images, has_masks=masks is not None)
        metrics = [metric for metric in metrics if metric.name not in left_out]
        found: Row = {}
        if metrics:
            batch_size = min(task.recipe.batch_size, 32)
            result = evaluate(
                task.model, images, metrics=metrics, masks=masks, batch_size=batch_size
            ).results
            if "localization" in result:
                means = result["localization"].columns()["Localization"]
                # There is no grid where the model is right about too few classes.
                found["val_localization"] = means["inherent"].mean if means else float("nan")
            if "masks" in result:
                means = result["masks"].columns()["Energy in the mask"]
                found["val_energy"] = means["inherent"].mean if means else float("nan")
        return found

    def _label(self, task: Task, number: int) -> int:
        image, label, _ = self.images[number]
        tensors = image[None].to(task.device), torch.tensor([label], device=task.device)
        return int(task.known_labels(*tensors))


class ProgressBar(RichProgressBar):
    """Shows loss and accuracy of the current epoch, images per second, and the time left for the
    whole run, and prints one line per epoch. Without a terminal there are only the lines, and one
    more per minute within an epoch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=4)
        self.console = Console()
        if not self.console.is_terminal:
            self.disable()
        self._began = self._epoch_began = self._refreshed = time.monotonic()
        self._steps_before = self._epoch_steps_before = 0
        self._speed = 0.0
        self._lines = PlainLines("epoch", self.console, _PLAIN_PAUSE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = self._epoch_began = time.monotonic()
        self._steps_before = self._epoch_steps_before = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._epoch_began = time.monotonic()
        self._epoch_steps_before = trainer.global_step
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, steps"
        self._lines = PlainLines(epoch, self.console, _PLAIN_PAUSE)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        is_last = batch_idx + 1 == trainer.num_training_batches
        if not self.console.is_terminal and trainer.is_global_zero:
            self._lines(batch_idx + 1, int(trainer.num_training_batches))
        if self.is_enabled and (is_last or now - self._refreshed > _REFRESH):
            self._refreshed = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        # Measured before validation, which does not count.
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
            f"{_described(pl_module)}"
            f"  {self._speed:.0f} images/s  {self._time_left(trainer, pl_module)} left",
            highlight=False,
            soft_wrap=True,
        )

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        assert isinstance(pl_module, Task)
        loss, top1 = pl_module.train_means["loss"], pl_module.train_means["top1"]
        # Only those of this process: reducing them would make all processes wait.
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
        return duration(per_step * (total - trainer.global_step))


def _described(task: LightningModule) -> str:
    """What was measured beside loss and accuracy, for the line of an epoch."""
    assert isinstance(task, Task)
    names = {
        "fade": "λ {:.2f}",
        "b": "B {:.2f}",
        "val_localization": "localization {:.1%}",
        "val_energy": "energy {:.1%}",
    }
    # A number is nan where there was nothing to measure, as without a grid.
    known = {column: value for column, value in task.measured.items() if value == value}
    shown = [names[column].format(value) for column, value in known.items()]
    return f"  {', '.join(shown)}" if shown else ""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar for what is done before training.

    Yields:
        A function that takes how much is done, and how much there is to do.
    """
    with progress_bars(Console()) as show:
        assert show is not None
        yield lambda done, total: show(done, total, title)


class SkippedFiles(Callback):
    """Writes ``skipped.txt`` after each epoch: the unreadable images that any process has met."""

    def __init__(self, folder: Path, *splits: Split) -> None:
        self.folder, self.splits = folder, splits

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [skipped for split in self.splits for skipped in split.skipped()]
        gathered: list[list[Skipped] | None] = [found]
        if trainer.world_size > 1:
            gathered = [None] * trainer.world_size
            dist.all_gather_object(gathered, found)
        by_key = {skipped.key: skipped for some in gathered for skipped in some or []}
        if by_key and trainer.is_global_zero:
            write_skipped(self.folder / "skipped.txt", by_key.values())


class Stopped(Exception):
    """A run was stopped by a signal and has saved its state; the message says how to continue.

    The message is empty in all processes of a run but the first.
    """


class StopSignals:
    """Records that Ctrl-C or SIGTERM asked the process to stop.

    Lightning would stop at once, without saving the state of the current epoch. Only the first
    signal is caught: then the usual handlers are restored, and a second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Replaces the handlers of both signals, where Python allows it (in the main thread)."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)

    def release(self) -> None:
        """Restores the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        for caught in (signal.SIGINT, signal.SIGTERM):
            signal.signal(caught, signal.default_int_handler)
        # Unlike print, this cannot wait for a lock that the interrupted code holds.
        os.write(2, b"\nStopping after this step; again to stop at once, without saving.\n")


class Checkpoints(Checkpoint):
    """Saves regularly and, when the run is asked to stop, once more.

    It never saves between the last step of an epoch and its validation: a run resumed from such a
    checkpoint would leave out the validation, as it would with Lightning's ``ModelCheckpoint``.
    """

    def __init__(self, folder: Path, recipe: Recipe, signals: StopSignals) -> None:
        self.path = folder / LAST
        self.recipe = recipe
        self.signals = signals
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.catch()
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1
        if (
            done % (self.recipe.accumulate_grad_batches or 1)
            or done == trainer.num_training_batches
        ):
            return
        every = self.recipe.checkpoint_steps
        stop = self._asked_to_stop(trainer)
        due = every is not None and trainer.global_step % every == 0
        if stop or due or self._is_time(trainer):
            self._save(trainer)
        if stop:
            raise Stopped

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        stop = self._asked_to_stop(trainer) and epoch < self.recipe.epochs
        due = epoch % self.recipe.checkpoint_epochs == 0 or epoch == self.recipe.epochs
        if stop or due:
            self._save(trainer)
        if stop:
            raise Stopped

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_at = time.monotonic()

    def _is_time(self, trainer: Trainer) -> bool:
        minutes = self.recipe.checkpoint_minutes
        if minutes is None:
            return False
        # Clocks differ; all processes have to save in the same step.
        late = time.monotonic() - self._saved_at >= 60 * minutes
        return trainer.strategy.reduce_boolean_decision(late, all=False)

    def _asked_to_stop(self, trainer: Trainer) -> bool:
        # A signal may reach one process only, or all of them in different steps.
        return trainer.strategy.reduce_boolean_decision(self.signals.received, all=False)

    # Released before Lightning restores the handlers that it found, which are older than ours.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.signals.release()

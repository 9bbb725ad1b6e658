"""Checkpoints that survive: written whole or not at all, and known to be whole when read.

``last.ckpt`` is the newest; ``previous.ckpt`` is the one before it, in case the newest should turn
out damaged. Each is an ordinary file of ``torch.save`` with one line more at its end, the SHA-256
of all before it, which torch's readers ignore. Nothing is ever unpickled but tensors and plain
values.
"""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from bcosvit.files import atomic
from bcosvit.train.recipe import Recipe
from bcosvit.train.signals import Signals, Stopped

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
_MARK = b"\nsha256 "
_TRAILER = len(_MARK) + 64 + 1


class DamagedError(ValueError):
    """A checkpoint that is not what was written."""


class CheckedIO(CheckpointIO):
    """How Lightning writes and reads checkpoints here."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        body = buffer.getbuffer()
        try:
            with atomic(path) as temporary:
                with temporary.open("wb") as file:
                    file.write(body)
                    file.write(_trailer(body))
                    file.flush()
                    # A full disk must show before the older checkpoints are touched.
                    os.fsync(file.fileno())
                if path.exists():
                    os.replace(path, path.with_name(PREVIOUS))
        except OSError as error:
            raise ValueError(
                f"The checkpoint of step {checkpoint['global_step']} could not be saved "
                f"({error.strerror or error}): what was saved before is untouched; make room in "
                f"{path.parent} and go on with --resume."
            ) from error

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read(Path(path))

    def remove_checkpoint(self, path: _PATH) -> None:
        Path(path).unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, checked against its checksum."""
    data = memoryview(path.read_bytes())
    body, trailer = data[:-_TRAILER], bytes(data[-_TRAILER:])
    if trailer != _trailer(body):
        raise DamagedError(
            f"{path} is damaged: its {len(data)} bytes do not match the checksum at its end."
        )
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return checkpoint


def _trailer(body: memoryview) -> bytes:
    return _MARK + hashlib.sha256(body).hexdigest().encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and what is to be said about others that are not."""

    path: Path
    step: int
    complaint: str | None = None


def newest(folder: Path) -> Found | None:
    """The newest whole checkpoint of a run; ``None`` before the first one was written.

    Where there are some, but none is whole, that is an error.
    """
    complaint = None
    for path in (folder / LAST, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            step = read(path)["global_step"]
        except DamagedError as error:
            complaint = str(error) if complaint is None else f"{complaint} {error}"
        else:
            return Found(path=path, step=step, complaint=complaint)
    if complaint is not None:
        raise ValueError(f"{complaint} There is no other: start a new run.")
    return None


class Checkpoints(Checkpoint):
    """Saves every so often and, when the run is asked to stop, once more.

    Never after the last step of an epoch before its validation: such a checkpoint could only be
    resumed with the validation left out.
    """

    def __init__(self, folder: Path, recipe: Recipe, signals: Signals) -> None:
        self.path = folder / LAST
        self.recipe = recipe
        self.signals = signals

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.catch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1
        if done % self.recipe.accumulate or done == trainer.num_training_batches:
            return
        every = self.recipe.checkpoint_steps
        stop = self._asked_to_stop(trainer)
        if stop or (every is not None and trainer.global_step % every == 0):
            trainer.save_checkpoint(self.path)
        if stop:
            raise Stopped

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        stop = self._asked_to_stop(trainer) and epoch < self.recipe.epochs
        due = epoch % self.recipe.checkpoint_epochs == 0 or epoch == self.recipe.epochs
        if stop or due:
            trainer.save_checkpoint(self.path)
        if stop:
            raise Stopped

    def _asked_to_stop(self, trainer: Trainer) -> bool:
        # A signal may reach one process, or all of them in different steps.
        return trainer.strategy.reduce_boolean_decision(self.signals.received, all=False)

    # Before Lightning gives back what it found, which was there before ours.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.signals.release()

"""Pictures that could not be read while training: ``skipped.txt``."""

from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from bcosvit.data.dataset import Skipped, Split, write_skipped


class SkippedFiles(Callback):
    """Lists, after each epoch, the pictures that any process has met and left out so far."""

    def __init__(self, folder: Path, *splits: Split) -> None:
        self.folder, self.splits = folder, splits

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [skipped for split in self.splits for skipped in split.skipped()]
        everyone: list[list[Skipped] | None] = [found]
        if trainer.world_size > 1:
            everyone = [None] * trainer.world_size
            dist.all_gather_object(everyone, found)
        by_key = {skipped.key: skipped for some in everyone for skipped in some or []}
        if by_key and trainer.is_global_zero:
            write_skipped(self.folder / "skipped.txt", by_key.values())

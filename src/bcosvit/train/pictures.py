"""Every few epochs a picture of contributions, so that one sees alignment emerge."""

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor

from bcosvit.attribution import explain
from bcosvit.data.dataset import Split
from bcosvit.files import atomic
from bcosvit.report.figures import Tile, contribution_image, panel, photo_image
from bcosvit.train.task import Task

COUNT = 8


class ContributionPictures(Callback):
    """Writes ``pictures/epoch-0005.png``: validation images, always the same, and what speaks
    for and against their true class. B-cos models only."""

    def __init__(self, folder: Path, val: Split, classes: tuple[str, ...], every: int) -> None:
        self.folder, self.val, self.classes, self.every = folder, val, classes, every

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        epoch = trainer.current_epoch + 1
        due = epoch % self.every == 0 or epoch in (1, trainer.max_epochs)
        if not due or not trainer.is_global_zero:
            return
        images, labels = self._samples()
        picture = self.draw(pl_module, images.to(pl_module.device), labels.to(pl_module.device))
        with atomic(self.folder / f"epoch-{epoch:04}.png") as temporary:
            picture.save(temporary)

    def draw(self, task: Task, images: Tensor, labels: Tensor) -> Image.Image:
        """Photograph | contributions, two pairs a row."""
        with torch.no_grad():
            guesses = task.model(images).argmax(1).tolist()
        attribution = explain(task.model, images, labels)
        pairs = [
            (
                Tile(image=photo_image(image), label=self.classes[label]),
                Tile(image=contribution_image(map_), label=self._verdict(label, guess)),
            )
            for image, map_, label, guess in zip(
                images, attribution.map, labels.tolist(), guesses, strict=True
            )
        ]
        flat = [tile for pair in pairs for tile in pair]
        return panel([flat[start : start + 4] for start in range(0, len(flat), 4)])

    def _verdict(self, label: int, guess: int) -> str:
        return "recognized" if guess == label else f"taken for {self.classes[guess]}"

    def _samples(self) -> tuple[Tensor, Tensor]:
        # Spread over the split, whose pictures often lie class by class.
        count = min(COUNT, len(self.val))
        positions = [round(k * (len(self.val) - 1) / max(count - 1, 1)) for k in range(count)]
        samples = [self.val[position, 0] for position in positions]
        images = [image for image, _, _ in samples if isinstance(image, Tensor)]
        return torch.stack(images), torch.tensor([label for _, label, _ in samples])

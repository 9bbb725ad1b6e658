"""The Lightning module: loss, metrics, optimizer and schedule of a recipe.

Sums, not means, are kept over an epoch (torchmetrics reduces them over processes), weighted so
that samples which only fill a place count for nothing. Training's sums travel in the checkpoint: a
run that resumes in the middle of an epoch reports the same curve as one that was never stopped.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from bcosvit.models.base import Classifier
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn import CUDAGraphRunner
from bcosvit.train.clipping import clip_adaptively
from bcosvit.train.data import Batch
from bcosvit.train.recipe import Recipe

SUMS = "bcosvit.train_sums"
"""Where a checkpoint keeps training's running sums."""


class DivergedError(ValueError):
    """A run whose loss is no number any more."""


class Mean(Metric):
    """A weighted mean.

    torchmetrics' own either looks for nan, which waits for the device in every step, or forgets
    the weights.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        return self.total / self.weight


class Means(nn.ModuleDict):
    """Means by name."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: Mean() for name in names})

    def __getitem__(self, key: str) -> Mean:
        mean = super().__getitem__(key)
        assert isinstance(mean, Mean)
        return mean


class Task(LightningModule):
    """Trains ``model`` by ``recipe``, on images or on its backbone's cached features."""

    def __init__(
        self,
        model: Classifier[Any],
        recipe: Recipe,
        steps_per_epoch: int,
        *,
        inputs: Literal["images", "features"] = "images",
    ) -> None:
        super().__init__()
        self.model = model
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.recipe = recipe
        self.steps_per_epoch = steps_per_epoch
        self.inputs = inputs
        self.classes = model.config.num_classes
        self.train_means = Means("loss", "top1")
        # Five guesses among five classes are never wrong.
        self.val_means = Means("loss", "top1", *(["top5"] if self.classes > 5 else []))
        if recipe.compile:
            # In place: a wrapper would change the names of the weights. Cached features enter
            # behind the model's own call.
            compiled = self.model if inputs == "images" else self.model.get_submodule("blocks")
            compiled.compile()
        self._replay = CUDAGraphRunner(self.model, self._logits) if recipe.graphs else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.recipe.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self._logits(inputs) if self._replay is None else self._replay(inputs)

    def _logits(self, inputs: Tensor) -> Tensor:
        if self.inputs == "images":
            return self.model(inputs)
        assert isinstance(self.model, VisionTransformer)
        return self.model.from_features(inputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch.inputs)
        losses = self.losses(logits, batch.labels)
        self._count("train", self.train_means, logits, losses, batch)
        loss = (losses * batch.weights).sum()
        self.log("step/loss", loss.detach(), on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch.inputs)
        losses = self.losses(logits, batch.labels)
        self._count("val", self.val_means, logits, losses, batch)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One per sample."""
        if self.recipe.loss == "ce":
            return F.cross_entropy(logits, labels, reduction="none")
        targets = F.one_hot(labels, self.classes).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)

    def _count(
        self, stage: str, means: Means, logits: Tensor, losses: Tensor, batch: Batch
    ) -> None:
        counted = (batch.weights > 0).float()
        guesses = logits.detach().topk(min(5, self.classes)).indices == batch.labels[:, None]
        values = {
            "loss": losses.detach(),
            "top1": guesses[:, 0].float(),
            "top5": guesses.any(1).float(),
        }
        for name in means:
            means[name].update(values[name], counted)
            self.log(f"{stage}/{name}", means[name], on_step=False, on_epoch=True)

    def on_train_epoch_start(self) -> None:
        # Not called where an epoch is resumed in its middle.
        for name in self.train_means:
            self.train_means[name].reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        recipe = self.recipe
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = Adam(
            trained,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.adam_eps,
            weight_decay=recipe.weight_decay,
        )
        schedule = LambdaLR(optimizer, lambda step: self.rate_at(step) / recipe.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def rate_at(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 0 over the whole run."""
        # That of its middle, so that the first step of a warm-up moves, too.
        return self.recipe.rate_at((step + 0.5) / self.steps_per_epoch)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.recipe.clip == "norm":
            self.clip_gradients(optimizer, self.recipe.clip_value, "norm")
        elif self.recipe.clip == "adaptive":
            clip_adaptively(self.parameters(), self.recipe.clip_value)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        sums = {}
        for name in self.train_means:
            mean = self.train_means[name]
            with mean.sync_context():
                sums[name] = (mean.total.item(), mean.weight.item())
        if not math.isfinite(sums["loss"][0]):
            raise DivergedError(
                f"Training diverged: the loss in epoch {self.current_epoch + 1} is not finite; "
                f"lower learning_rate, or set clip=adaptive. This state is not saved."
            )
        checkpoint[SUMS] = sums

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The sums are those of all processes together: one of them goes on with them.
        if self.global_rank == 0:
            for name, (total, weight) in checkpoint[SUMS].items():
                self.train_means[name].total.fill_(total)
                self.train_means[name].weight.fill_(weight)


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's part of a task's state dict."""
    prefix = "model."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

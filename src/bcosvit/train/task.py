"""The Lightning module: forward pass, metrics, optimizer, schedule and gradient clipping.

Metrics are sums over an epoch (torchmetrics reduces them over processes), weighted so that samples
of weight zero do not count. The sums of training are part of the checkpoint: a run that resumes in
the middle of an epoch reports the same curve as one that was never stopped.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from bcosvit.messages import and_more
from bcosvit.models.base import Classifier
from bcosvit.models.bcosify import BcosifySchedule
from bcosvit.models.vit import VisionTransformer
from bcosvit.models.weights import is_finite
from bcosvit.nn import CUDAGraphRunner
from bcosvit.train.data import Batch, DataModule, derive_seed
from bcosvit.train.losses import LOSSES, Loss
from bcosvit.train.recipe import Recipe

SUMS = "bcosvit.train_sums"
"""The checkpoint's key for the running sums of training."""

CLIPPING_FLOOR = 1e-3
"""Adaptive clipping takes the norm of weights to be at least this, so that units that start at zero
can move."""


LOOK_EVERY = 50
"""Steps between two looks at whether the loss is finite, where a look waits for a device."""


class DivergedError(ValueError):
    """The loss or the weights of a run are not finite anymore."""


class Mean(Metric):
    """A weighted mean.

    torchmetrics' own ``MeanMetric`` either checks for nan, which waits for the device in every
    step, or ignores the weights.
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
    """Trains a model according to a recipe.

    Args:
        model: The model to train.
        recipe: Loss, optimizer, schedule and clipping.
        steps_per_epoch: Optimizer steps per epoch.
        inputs: Whether batches hold images, or cached features of the model's backbone.
        loss: What to minimize; by default the recipe's registered loss.
    """

    def __init__(
        self,
        model: Classifier[Any],
        recipe: Recipe,
        steps_per_epoch: int,
        *,
        inputs: Literal["images", "features"] = "images",
        loss: Loss | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.recipe = recipe
        self.steps_per_epoch = steps_per_epoch
        self.inputs = inputs
        self.loss = loss or LOSSES.get(recipe.loss)()
        self.loss.recipe = recipe
        self.fading = (
            None
            if recipe.fade_until is None
            else BcosifySchedule(end=recipe.fade_until, b=recipe.b)
        )
        self._bad_step: Tensor | None = None
        """The first step whose loss was not finite, or infinity; on the device, so that nothing
        waits for it."""
        self.measured: dict[str, float] = {}
        """What validation has measured beside loss and accuracy, by columns of ``metrics.csv``."""
        self.largest_logits: list[float] = []
        """Of the images that this process has validated on, for the score of unknown kinds."""
        self.num_classes = model.config.num_classes
        self.train_means = Means("loss", "top1")
        # With at most five classes the top five are always right.
        self.val_means = Means("loss", "top1", *(["top5"] if self.num_classes > 5 else []))
        if recipe.compile:
            # In place: a wrapper would change the names of the weights. Cached features do not
            # pass through the model's own forward method.
            compiled: nn.Module = self.model
            if inputs == "features" and recipe.head_only:
                compiled = self.model.get_classifier()
            elif inputs == "features":
                compiled = self.model.get_submodule("blocks")
            compiled.compile()
        self._graph = CUDAGraphRunner(self.model, self._logits) if recipe.cuda_graphs else None

    def forward(self, inputs: Tensor) -> Tensor:
        # What a head takes has no channels in space.
        if self.recipe.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self._logits(inputs) if self._graph is None else self._graph(inputs)

    def _logits(self, inputs: Tensor) -> Tensor:
        if self.inputs == "images":
            return self.model(inputs)
        if self.recipe.head_only:
            return self.model.from_head_inputs(inputs)
        assert isinstance(self.model, VisionTransformer)
        return self.model.from_features(inputs)

    def on_fit_start(self) -> None:
        self.loss.setup(self.model, self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        epoch = (self.trainer.global_step + 0.5) / self.steps_per_epoch
        if self.fading is not None:
            self.fading.apply(self.model, epoch / self.recipe.epochs)
        self.loss.before_step(self.model, epoch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.recipe.mixup:
            place = (self.trainer.current_epoch, batch_idx, self.global_rank)
            batch = mix(batch, self.recipe.mixup, self.num_classes, (self.recipe.seed, *place))
        batch = self.loss.prepare(batch)
        logits = self(batch.inputs)
        losses = self.loss(logits, batch)
        self._update_means("train", self.train_means, logits, losses, batch)
        loss = (losses * batch.weights).sum()
        self._look_at(loss.detach())
        self.log("step/loss", loss.detach(), on_step=True, on_epoch=False)
        return loss

    def _look_at(self, loss: Tensor) -> None:
        step = self.trainer.global_step
        bad = torch.where(loss.isfinite(), math.inf, float(step))
        self._bad_step = bad if self._bad_step is None else torch.minimum(self._bad_step, bad)
        waits = self.device.type != "cpu" or self.trainer.world_size > 1
        if not waits or step % LOOK_EVERY == LOOK_EVERY - 1:
            self.check_loss()

    def known_labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the labels [B] of images, with those of the teacher where they have none."""
        return self.loss.prepare(Batch(images, labels, torch.ones(len(labels)))).labels

    def check_loss(self) -> None:
        """Checks the losses of all steps so far; in all processes at once.

        Raises:
            DivergedError: One was not finite; the message names the step and its images.
        """
        if self._bad_step is None:
            return
        first = self._bad_step.clone()
        if self.trainer.world_size > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        if first.isfinite():
            raise DivergedError(self._diverged(int(first)))

    def _diverged(self, step: int) -> str:
        epoch, number = divmod(step, self.steps_per_epoch)
        data = getattr(self.trainer, "datamodule", None)
        images = data.images_of(epoch, number) if isinstance(data, DataModule) else []
        batch = f" on the batch of {and_more(images)}" if images else ""
        return f"the loss of step {step + 1}, epoch {epoch + 1},{batch} is not finite"

    def check_weights(self, *states: Mapping[str, Any]) -> None:
        """Checks weights that are about to be saved; in all processes at once.

        Raises:
            DivergedError: Some are not finite.
        """
        bad = [key for state in states for key, tensor in state.items() if not is_finite(tensor)]
        if self.trainer.strategy.reduce_boolean_decision(bool(bad), all=False):
            which = f" ({and_more(key.removeprefix('model.') for key in bad)})" if bad else ""
            step, epoch = self.trainer.global_step, self.trainer.current_epoch + 1
            raise DivergedError(f"weights{which} are not finite after step {step}, epoch {epoch}")

    def check_validated(self) -> None:
        """Checks what was validated before anything is done with it.

        Raises:
            DivergedError: The loss is not finite.
        """
        self.check_loss()
        if not self.val_means["loss"].compute().isfinite():
            epoch = self.trainer.current_epoch + 1
            raise DivergedError(f"the validation loss after epoch {epoch} is not finite")

    def on_validation_epoch_start(self) -> None:
        self.check_loss()
        self.measured.clear()
        self.largest_logits = []
        if self.fading is not None:
            # Averaged weights would come with averages of λ and B.
            self.fading.apply(self.model, self.progress)
            fade, b = self.fading.at(self.progress)
            self.measured |= {"fade": fade, "b": b}

    @property
    def progress(self) -> float:
        """The share of the run's steps that are done."""
        return self.trainer.global_step / (self.steps_per_epoch * self.recipe.epochs)

    @property
    def is_final(self) -> bool:
        """Whether the model is what it is meant to become: no constant of it still fades."""
        return self.fading is None or self.progress >= self.fading.end

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        batch = self.loss.prepare(batch)
        logits = self(batch.inputs)
        losses = self.loss(logits, batch)
        self._update_means("val", self.val_means, logits, losses, batch)
        self.largest_logits += logits.amax(1)[batch.weights > 0].tolist()

    def _update_means(
        self, stage: str, means: Means, logits: Tensor, losses: Tensor, batch: Batch
    ) -> None:
        counted = (batch.weights > 0).float()
        hits = logits.detach().topk(min(5, self.num_classes)).indices == batch.labels[:, None]
        values = {
            "loss": losses.detach(),
            "top1": hits[:, 0].float(),
            "top5": hits.any(1).float(),
        }
        for name in means:
            means[name].update(values[name], counted)
            self.log(f"{stage}/{name}", means[name], on_step=False, on_epoch=True)

    def on_train_epoch_start(self) -> None:
        # Lightning does not call this where an epoch is resumed in its middle.
        for name in self.train_means:
            self.train_means[name].reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        recipe = self.recipe
        optimizer = Adam(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.adam_eps,
            weight_decay=recipe.weight_decay,
        )
        schedule = LambdaLR(optimizer, lambda step: self.lr_at(step) / recipe.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of an optimizer step, counted from 0 over the whole run."""
        # The rate in the middle of the step, so that the first step of a warm-up is not zero.
        return self.recipe.lr_at((step + 0.5) / self.steps_per_epoch)

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
        self.check_loss()
        # A gradient that is not finite shows in the weights before it shows in a loss.
        self.check_weights(checkpoint["state_dict"], checkpoint.get("current_model_state", {}))
        checkpoint[SUMS] = sums

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # These are the sums of all processes together, so that only one process continues them.
        if self.global_rank == 0:
            for name, (total, weight) in checkpoint[SUMS].items():
                self.train_means[name].total.fill_(total)
                self.train_means[name].weight.fill_(weight)


def mix(batch: Batch, share: float, num_classes: int, seed: tuple[int, ...]) -> Batch:
    """Mixes some images, or features, of a batch with their neighbors (mixup; Zhang et al. 2018).

    Args:
        batch: Inputs and labels.
        share: How many of the images are mixed. The neighbor's part is uniform in [0, 1/2], so
            that a label stays that of the larger part.
        num_classes: The number of classes.
        seed: Determines which images are mixed, and how.

    Returns:
        The batch with the shares of the classes as ``targets``.
    """
    generator = torch.Generator().manual_seed(derive_seed(*seed))
    chosen, part = torch.rand(2, len(batch.inputs), generator=generator)
    part = torch.where(chosen < share, part / 2, 0.0).to(batch.inputs)
    # Images without labels have the label -1, and a loss that does not look at these targets.
    targets = F.one_hot(batch.labels.clamp_min(0), num_classes).to(batch.inputs)
    inputs, targets = (
        torch.lerp(x, x.roll(1, 0), part.view(-1, *[1] * (x.ndim - 1)))
        for x in (batch.inputs, targets)
    )
    return batch._replace(inputs=inputs, targets=targets)


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model's part of the state dict of a `Task`."""
    prefix = "model."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clips gradients in place, unit by unit (Brock et al. 2021, Eq. 3).

    The norm of a unit's gradient is at most the share ``limit`` of the norm of its weights. A unit
    is what computes one output: a row of a matrix, a filter of a convolution, a head of a prior. A
    bias or a scale is one unit as a whole.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        allowed = limit * _unit_norms(parameter).clamp_min(CLIPPING_FLOOR)
        # A gradient of zero gives an infinite quotient, and so a factor of one.
        parameter.grad.mul_((allowed / _unit_norms(parameter.grad)).clamp_max(1.0))


def _unit_norms(tensor: Tensor) -> Tensor:
    if tensor.ndim <= 1:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)

"""Losses: what a training step minimizes, registered by name.

A `Loss` may do more than compare logits with labels. It may hold a teacher model, and it may move
a coefficient, of the loss or of the model, before every step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.models.base import Classifier
from bcosvit.registry import Registry
from bcosvit.train.data import Batch


class Loss:
    """What a training step minimizes: one number per sample.

    A loss is not a module of the `Task`: a teacher that it holds is neither trained, nor averaged,
    nor saved in checkpoints. Subclasses implement ``__call__`` and whatever else they need.

    Examples:
        >>> @register_loss("doctest-margin")
        ... class Margin(Loss):
        ...     def __call__(self, logits, batch):
        ...         return F.multi_margin_loss(logits, batch.labels, reduction="none")
        >>> "doctest-margin" in LOSSES
        True
    """

    def setup(self, model: Classifier[Any], device: torch.device) -> None:
        """Prepares the loss on the device that trains; called once, before the first step."""

    def before_step(self, model: Classifier[Any], epoch: float) -> None:
        """Moves what follows a schedule; called before every training batch.

        Args:
            model: The model that is trained.
            epoch: The position in the run, e.g. 1.5 in the middle of the second epoch. A schedule
                that depends on it alone continues correctly when a run is resumed.
        """

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Computes the loss of every sample.

        Args:
            logits: [B, C].
            batch: The inputs, labels and weights that the logits were computed for.

        Returns:
            [B], not yet weighted.
        """
        raise NotImplementedError


LOSSES: Registry[type[Loss]] = Registry(kind="loss", group="bcosvit.losses")
"""All losses by name."""


def register_loss(name: str) -> Callable[[type[Loss]], type[Loss]]:
    """Returns a class decorator that registers a `Loss`, for the field ``loss`` of a recipe."""
    return LOSSES.register(name)


@register_loss("bce")
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy on sigmoids with one-hot targets, averaged over classes (the paper's
    loss for B-cos models)."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        targets = F.one_hot(batch.labels, logits.shape[1]).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


@register_loss("ce")
class CrossEntropy(Loss):
    """Softmax cross-entropy."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits, batch.labels, reduction="none")

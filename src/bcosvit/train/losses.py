"""Losses: what a training step minimizes, registered by name.

A `Loss` may do more than compare logits with labels. It may hold a teacher model, and it may move
a coefficient, of the loss or of the model, before every step.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.models.base import Classifier, load
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

    needs_teacher: ClassVar[bool] = False
    """Whether the recipe's field ``teacher`` is used; it then defaults to ``--init``."""
    recipe: Any
    """The `Recipe` of the run, which is set before `setup`."""

    def setup(self, model: Classifier[Any], device: torch.device) -> None:
        """Prepares the loss on the device that trains; called once, before the first step."""

    def before_step(self, model: Classifier[Any], epoch: float) -> None:
        """Moves what follows a schedule; called before every training batch.

        Args:
            model: The model that is trained.
            epoch: The position in the run, e.g. 1.5 in the middle of the second epoch. A schedule
                that depends on it alone continues correctly when a run is resumed.
        """

    def prepare(self, batch: Batch) -> Batch:
        """Adds what the loss needs to a batch, of training or validation, before the model sees it.

        Args:
            batch: The batch, already mixed where the recipe mixes images.
        """
        return batch

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
        return _bce(logits, _targets(logits, batch)).mean(1)


@register_loss("ce")
class CrossEntropy(Loss):
    """Softmax cross-entropy."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        target = batch.labels if batch.targets is None else batch.targets
        return F.cross_entropy(logits, target, reduction="none")


@register_loss("auto")
class ByActivation(Loss):
    """``bce`` for a model whose probabilities are sigmoids, ``ce`` for one with a softmax."""

    def setup(self, model: Classifier[Any], device: torch.device) -> None:
        sigmoid = model.config.activation == "sigmoid"
        self.chosen: Loss = BinaryCrossEntropy() if sigmoid else CrossEntropy()

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.chosen(logits, batch)


@register_loss("distillation")
class Distillation(Loss):
    """Imitates a teacher: the recipe's ``teacher``, an unchanging model that sees the same images.

    The loss is the Kullback-Leibler divergence of the softmax, plus the binary cross-entropy of
    sigmoids with the teacher's probabilities, summed over classes, which rewards alignment as in
    B-cos networks. Its logits are shifted by −log(C − 1), so that a logit of zero means 1/C. With
    ``label_weight``, the same cross-entropy with the labels is added.

    Images without labels are labeled by the teacher: accuracy is then agreement with it.
    """

    needs_teacher = True

    def setup(self, model: Classifier[Any], device: torch.device) -> None:
        assert self.recipe.teacher is not None
        self.teacher = load(self.recipe.teacher).to(device).requires_grad_(False)
        if self.recipe.channels_last:
            self.teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.recipe.compile:
            self.teacher.compile()

    def prepare(self, batch: Batch) -> Batch:
        with torch.no_grad():
            taught = self.teacher(batch.inputs).float()
        labels = torch.where(batch.labels < 0, taught.argmax(1), batch.labels)
        return batch._replace(labels=labels, taught=taught)

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        assert batch.taught is not None
        logits = logits.float()
        probabilities = batch.taught.softmax(1)
        difference = batch.taught.log_softmax(1) - logits.log_softmax(1)
        shifted = logits - math.log(max(logits.shape[1] - 1, 1))
        loss = (probabilities * difference).sum(1) + _bce(shifted, probabilities).sum(1)
        if self.recipe.label_weight:
            labels = _bce(shifted, _targets(logits, batch)).sum(1)
            loss = loss + self.recipe.label_weight * labels
        return loss


def _targets(logits: Tensor, batch: Batch) -> Tensor:
    if batch.targets is not None:
        return batch.targets
    return F.one_hot(batch.labels, logits.shape[1]).to(logits.dtype)


def _bce(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

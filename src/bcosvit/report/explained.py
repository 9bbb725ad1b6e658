"""One picture and all that was found about it: what pages and files are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.attribution import Attribution, explain_with
from bcosvit.attribution.color import SMOOTH, color_image
from bcosvit.metrics.confidence import confidence
from bcosvit.models.base import AnyModel

TITLES = {
    "inherent": "Inherent contributions",
    "ixg": "Input × Gradient",
    "intgrad": "IntGrad",
    "gradcam": "GradCAM",
    "gradsam": "GradSAM",
    "rollout": "Rollout",
    "finatt": "FinAtt",
    "cheferlrp": "CheferLRP",
    "plrp": "Partial LRP",
    "smoothgrad": "SmoothGrad",
    "occlusion": "Occlusion",
    "random": "Random map",
}
"""What people call the methods."""

TOP = 5
"""Classes that are listed of a picture, beside those explained."""

CLASSES_AT_ONCE = 8
"""Bounds memory when many classes of a picture are explained."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Completeness as arithmetic: contributions + residual + bias = logit."""

    contributions: float
    residual: float
    bias: float
    logit: float
    completeness_error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """A picture, the prediction, and attributions for some classes C; all on the CPU."""

    number: int
    """Its place among all, from 1."""
    name: str
    image: Tensor
    """[3, H, W], as the model saw it."""
    logits: Tensor
    """[K]"""
    confidences: Tensor
    """[K]: sigmoid (B-cos) or softmax (conventional)."""
    target: Tensor
    """[C]: the classes explained, the surest first unless they were asked for."""
    attributions: dict[str, Attribution]
    """By method: maps [C, H, W] and so on."""

    @property
    def inherent(self) -> Attribution | None:
        return self.attributions.get("inherent")

    def surest(self, count: int) -> list[int]:
        """The first ``count`` classes by logit."""
        return self.logits.topk(min(count, len(self.logits))).indices.tolist()

    def entry(self, label: int, names: Sequence[str]) -> dict[str, Any]:
        """What is predicted for a class, fit for JSON."""
        return {
            "class": names[label],
            "index": label,
            "probability": self.confidences[label].item(),
            "logit": self.logits[label].item(),
        }

    def sums(self, row: int) -> Sums:
        """The check that a class's inherent explanation is complete, in numbers."""
        own = self.inherent
        assert own is not None and own.residual is not None and own.logit is not None
        return Sums(
            contributions=own.map[row].double().sum().item(),
            residual=own.residual[row].item(),
            bias=own.bias,
            logit=own.logit[row].item(),
            completeness_error=own.completeness_error()[row].item(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Lens:
    """A model, and what to find out about every picture."""

    model: AnyModel
    methods: Sequence[str]
    targets: Sequence[int] | None = None
    """The classes to explain; None for the ``top`` surest of each picture."""
    top: int = 1

    def __call__(self, number: int, name: str, image: Tensor) -> Explained:
        images = image[None].to(next(self.model.parameters()))
        with torch.no_grad():
            logits = self.model(images)[0]
        target = (
            logits.topk(min(self.top, len(logits))).indices
            if self.targets is None
            else torch.tensor(self.targets, device=logits.device)
        )
        parts = [
            explain_with(self.model, images.repeat(len(some), 1, 1, 1), some, self.methods)
            for some in target.split(CLASSES_AT_ONCE)
        ]
        return Explained(
            number=number,
            name=name,
            image=image,
            logits=logits.cpu(),
            confidences=confidence(self.model, logits).cpu(),
            target=target.cpu(),
            attributions={
                method: _joined([part[method] for part in parts]) for method in self.methods
            },
        )


def colors(inherent: Attribution, row: int) -> Tensor:
    """The color image [4, H, W] of one class's row of W(x).

    Opacity is smoothed over the same share of a picture whatever its size: 15 pixels of 224.
    """
    assert inherent.weights is not None
    smooth = max(1, round(SMOOTH * inherent.map.shape[-1] / 224))
    return color_image(inherent.weights[row], inherent.map[row], smooth=smooth)


def _joined(parts: Sequence[Attribution]) -> Attribution:
    def all_of(tensors: list[Tensor | None]) -> Tensor | None:
        given = [tensor.detach().cpu() for tensor in tensors if tensor is not None]
        return torch.cat(given) if given else None

    return Attribution(
        map=torch.cat([part.map.detach().cpu() for part in parts]),
        target=torch.cat([part.target.cpu() for part in parts]),
        weights=all_of([part.weights for part in parts]),
        residual=all_of([part.residual for part in parts]),
        logit=all_of([part.logit for part in parts]),
        bias=parts[0].bias,
    )

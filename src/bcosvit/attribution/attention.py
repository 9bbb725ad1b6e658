"""Post-hoc explanations that read attention: FinAtt, Rollout, RFEM, GradSAM, adapted GradCAM.

Attention is observed in a view whose attention layers leave their matrices on a tape: ordinary
prediction keeps its fused kernels, and there is no hook to forget. One observation serves all of
them. These models pool tokens by averaging, so queries are averaged wherever the originals take
the class token's row.

Letters: B batch, l layers, h heads, t tokens.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.attribution.base import (
    Attribution,
    Explainer,
    Target,
    register_explainer,
    resolve_target,
)
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.views import unwrapped, view


def as_transformer(model: AnyModel, method: str) -> VisionTransformer:
    """Returns ``model``, or raises the reason why a method that reads attention does not apply."""
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"{method} reads attention, and {type(model).__name__} has none; "
            f"use a vision transformer, or a method for any model, e.g. 'ixg'."
        )
    return model


def upsample(scores: Tensor, model: VisionTransformer, size: tuple[int, int]) -> Tensor:
    """Interpolates scores of tokens [B, t] bilinearly to a map [B, H, W]."""
    image = scores.unflatten(1, model.config.grid_of(*size)).unsqueeze(1)
    return F.interpolate(image, size, mode="bilinear", align_corners=False).squeeze(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """One forward pass with every attention matrix in its graph."""

    model: VisionTransformer
    size: tuple[int, int]
    logits: Tensor
    attentions: list[Tensor]
    """l matrices [B, h, t, t]."""

    def gradients(self, classes: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
        """∂logit/∂A for the given matrices."""
        with torch.enable_grad():
            logit = self.logits.gather(1, classes[:, None]).sum()
            return torch.autograd.grad(logit, of, retain_graph=True)


def shared_tokens(model: AnyModel, images: Tensor, method: str, shared: dict[str, Any]) -> Tensor:
    """The tokens [B, t, d] that enter the transformer in evaluation mode, computed once."""
    if "tokens" not in shared:
        transformer = as_transformer(unwrapped(model), method)
        with torch.inference_mode(False), torch.no_grad():
            shared["tokens"] = view(transformer, with_parameter_grad=False).eval().tokens(images)
    return cast(Tensor, shared["tokens"]).detach()


def observe(
    model: AnyModel,
    images: Tensor,
    method: str = "This method",
    shared: dict[str, Any] | None = None,
) -> Observation:
    """Predicts in evaluation mode and keeps the attention matrices; ``model`` stays untouched."""
    transformer = as_transformer(unwrapped(model), method)
    tape: list[Tensor] = []
    watched = view(
        transformer,
        mark=lambda module: {"tape": tape} if isinstance(module, Attention) else {},
        with_parameter_grad=False,
    ).eval()
    with torch.inference_mode(False), torch.enable_grad():
        tokens = shared_tokens(model, images, method, {} if shared is None else shared)
        size = (images.shape[-2], images.shape[-1])
        logits = watched.from_tokens(tokens.requires_grad_(), watched.config.grid_of(*size))
    return Observation(model=transformer, size=size, logits=logits, attentions=tape)


class AttentionExplainer(Explainer):
    """Base class of methods that score tokens by their attention."""

    signed = False

    def applies_to(self, model: AnyModel) -> bool:
        return isinstance(model, VisionTransformer)

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        return self.with_shared(model, images, target, {})

    def with_shared(
        self, model: AnyModel, images: Tensor, target: Target, shared: dict[str, Any]
    ) -> Attribution:
        """Methods that read attention share one forward pass."""
        if "attention" not in shared:
            shared["attention"] = observe(model, images, type(self).__name__, shared)
        seen: Observation = shared["attention"]
        with torch.inference_mode(False):
            logits = seen.logits.detach()
            classes = resolve_target(target, logits)
            scores = self.scores(seen, classes).detach()
        return Attribution(
            map=upsample(scores, seen.model, seen.size), target=classes, logits=logits
        )

    @abstractmethod
    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        """Returns the scores of all tokens [B, t] for one class per image."""


@register_explainer("gradcam")
@dataclass(frozen=True)
class GradCam(AttentionExplainer):
    """Adapted GradCAM: the positive part of the last layer's heads, weighted by mean gradient."""

    title = "GradCAM"
    color = "#8a5cd1"
    blank = (
        "GradCAM keeps what is positive alone, and on average no head of the last layer speaks for "
        "this class"
    )

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        last = seen.attentions[-1]
        (gradient,) = seen.gradients(classes, [last])
        weights = gradient.mean((2, 3), keepdim=True)
        return (weights * last).mean((1, 2)).relu()


@register_explainer("gradsam")
@dataclass(frozen=True)
class GradSam(AttentionExplainer):
    """GradSAM: the mean over layers, heads and queries of A ⊙ ReLU(∂y/∂A)."""

    title = "GradSAM"
    color = "#c557a8"

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        gradients = seen.gradients(classes, seen.attentions)
        layers = [a * g.relu() for a, g in zip(seen.attentions, gradients, strict=True)]
        return torch.stack(layers).mean((0, 2, 3))


@register_explainer("rollout")
@dataclass(frozen=True)
class Rollout(AttentionExplainer):
    """Attention rollout: the product of all layers' attention, skip connections as identities."""

    title = "Rollout"
    colormap = "jet"
    color = "#c98a10"
    cost = "forward"

    start: int = 0
    """The first layer that takes part."""

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        joint: Tensor | None = None
        for attention in seen.attentions[self.start :]:
            # Under `mul` rows sum to less than one: normalized, or the identity would dominate.
            mean = attention.mean(1)
            layer = mean / mean.sum(-1, keepdim=True)
            layer = (layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)) / 2
            joint = layer if joint is None else layer @ joint
        if joint is None:
            raise ValueError(
                f"start = {self.start} leaves no layer: the model has {len(seen.attentions)}."
            )
        return joint.mean(1)


@register_explainer("rfem")
@dataclass(frozen=True)
class Rfem(AttentionExplainer):
    """RFEM: rollout of each head by itself, of which only unusually large entries count.

    Ayyar et al. (arXiv 2510.06070), Eqs. 2 to 5: a head's entries at least ``k`` standard
    deviations above its mean count as one, the others as zero, and heads are weighted by their
    largest entry. As rollout, it is the same for every class; the variant that depends on the class
    is not implemented.
    """

    title = "RFEM"
    colormap = "jet"
    color = "#7a5c3e"
    cost = "forward"

    k: float = 1.0
    """By how many standard deviations an entry must exceed the mean."""

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        joint: Tensor | None = None
        for attention in seen.attentions:
            # As in rollout, rows are normalized before the skip connection is added.
            layer = attention / attention.sum(-1, keepdim=True)
            layer = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
            joint = layer if joint is None else layer @ joint
        assert joint is not None, "a transformer has blocks"
        entries = joint.flatten(2)
        least = entries.mean(2) + self.k * entries.std(2, correction=0)
        large = (joint >= least[..., None, None]).to(joint)
        return (entries.amax(2)[..., None, None] * large).sum(1).mean(1)


@register_explainer("finatt")
@dataclass(frozen=True)
class FinalAttention(AttentionExplainer):
    """FinAtt: the last layer's attention, averaged over heads."""

    title = "FinAtt"
    colormap = "jet"
    color = "#6b9a1f"
    cost = "forward"

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        return seen.attentions[-1].mean((1, 2))

"""Post-hoc explanations that read attention: FinAtt, Rollout, GradSAM, adapted GradCAM (SPEC 4.3).

Attention is observed in a view whose attention layers leave their matrices on a tape: ordinary
prediction keeps its fused kernels, and there is no hook to forget. One observation serves all four
methods. These models pool tokens by averaging, so queries are averaged wherever the originals take
the class token's row.

Letters: B batch, l layers, h heads, t tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcosvit.attribution.attribution import Attribution
from bcosvit.attribution.target import Target, resolve_target
from bcosvit.attribution.tokens import as_transformer, upsample
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.views import unwrapped, view


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


def observe(model: AnyModel, images: Tensor, method: str = "This method") -> Observation:
    """Predicts in evaluation mode and keeps the attention matrices; ``model`` stays untouched."""
    transformer = as_transformer(unwrapped(model), method)
    tape: list[Tensor] = []
    watched = view(
        transformer,
        mark=lambda module: {"tape": tape} if isinstance(module, Attention) else {},
        with_parameter_grad=False,
    ).eval()
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            tokens = watched.tokens(images)
        logits = watched.from_tokens(tokens.requires_grad_())
    size = (images.shape[-2], images.shape[-1])
    return Observation(model=transformer, size=size, logits=logits, attentions=tape)


class AttentionExplainer:
    """What the four share: observe, score tokens, upsample."""

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        return self.of(observe(model, images, type(self).__name__), target)

    def of(self, seen: Observation, target: Target = None) -> Attribution:
        """The explanation from an observation that other methods may share."""
        with torch.inference_mode(False):
            classes = resolve_target(target, seen.logits.detach())
            scores = self.scores(seen, classes).detach()
        return Attribution(map=upsample(scores, seen.model, seen.size), target=classes)

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        """[B, t]"""
        raise NotImplementedError


@dataclass(frozen=True)
class FinalAttention(AttentionExplainer):
    """The last layer's attention, averaged over heads."""

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        return seen.attentions[-1].mean((1, 2))


@dataclass(frozen=True)
class Rollout(AttentionExplainer):
    """Attention of all layers multiplied, skip connections as identities."""

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


@dataclass(frozen=True)
class GradSam(AttentionExplainer):
    """Mean over layers, heads and queries of A ⊙ ReLU(∂y/∂A)."""

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        gradients = seen.gradients(classes, seen.attentions)
        layers = [a * g.relu() for a, g in zip(seen.attentions, gradients, strict=True)]
        return torch.stack(layers).mean((0, 2, 3))


@dataclass(frozen=True)
class GradCam(AttentionExplainer):
    """The last layer's heads, weighted by their mean gradient; what is positive of the sum."""

    def scores(self, seen: Observation, classes: Tensor) -> Tensor:
        last = seen.attentions[-1]
        (gradient,) = seen.gradients(classes, [last])
        weights = gradient.mean((2, 3), keepdim=True)
        return (weights * last).mean((1, 2)).relu()

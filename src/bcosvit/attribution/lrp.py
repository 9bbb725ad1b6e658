"""Layer-wise relevance propagation for conventional transformers: CheferLRP and partial LRP.

Relevance starts as 1 at the explained logit and is handed back layer by layer to the tokens that
leave the hybrid's DenseNet. Each rule conserves it, per sample:

- linear layers, average pooling: α1β0, by share of the *positive* products of input and weight;
  an output with no positive product hands back by share of its negative ones;
- A·V and Q·Kᵀ: by share of the products, half to each factor (nothing where the product is 0);
- skip connections: by share of the summands, then both totals scaled to add up to the whole;
- LayerNorm, GELU, softmax: passed on.

The linear rule divides by one denominator, so relevance is not counted twice; sums run over one
sample, so batches do not mix. Queries are averaged where the originals take the class token's row.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bcosvit.attribution.attention import as_transformer, upsample
from bcosvit.attribution.base import (
    Attribution,
    Explainer,
    Target,
    register_explainer,
    resolve_target,
)
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import Block, GeluMLP, VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.views import unwrapped, view
from bcosvit.ops import attention_matrix


def linear_rule(relevance: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """α1β0: x [..., d], weight [c, d], relevance [..., c] -> [..., d]."""
    positive, negative = x.clamp(min=0), x.clamp(max=0)
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    supported = positive @ up.T + negative @ down.T
    share = _divide(relevance, supported)
    back = positive * (share @ up) + negative * (share @ down)
    if (lone := supported == 0).any():
        share = _divide(relevance * lone, positive @ down.T + negative @ up.T)
        back = back + positive * (share @ down) + negative * (share @ up)
    return back


def pool_rule(relevance: Tensor, tokens: Tensor) -> Tensor:
    """α1β0 for the mean over tokens: [B, d] -> [B, t, d]."""
    positive = tokens.clamp(min=0)
    shares = torch.where(positive.sum(1, keepdim=True) > 0, positive, tokens)
    return shares * _divide(relevance, shares.sum(1)).unsqueeze(1)


def product_rule(relevance: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """For left @ right: half of the relevance to each factor."""
    share = _divide(relevance, left @ right) / 2
    return left * (share @ right.mT), right * (left.mT @ share)


def skip_rule(relevance: Tensor, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """For x + branch; totals may have opposite signs and are scaled back to the whole."""
    share = _divide(relevance, x + branch)
    parts = x * share, branch * share
    totals = [part.flatten(1).sum(1) for part in parts]
    whole = relevance.flatten(1).sum(1)
    size = totals[0].abs() + totals[1].abs()
    factors = [_divide(total.abs() * whole, size * total) for total in totals]
    first, second = (
        part * factor.view(-1, 1, 1) for part, factor in zip(parts, factors, strict=True)
    )
    return first, second


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: nothing was computed there, so nothing is handed back."""
    zero = b == 0
    return (a / b.masked_fill(zero, 1)).masked_fill(zero, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Relevance:
    """What each attention matrix and each token contributed to a logit."""

    logits: Tensor
    target: Tensor
    attentions: list[Tensor]
    """Relevance of A, a layer: [B, h, t, t]."""
    gradients: list[Tensor]
    """∂logit/∂A, a layer."""
    tokens: Tensor
    """Relevance of the tokens that enter the first block: [B, t, d]."""


@dataclass(kw_only=True)
class _Pass:
    """What one block computed on its way forward."""

    x: Tensor
    normed: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    matrix: Tensor
    merged: Tensor
    attended: Tensor
    middle: Tensor
    hidden_in: Tensor
    hidden: Tensor
    mlp: Tensor


def propagate(model: AnyModel, images: Tensor, target: Target = None) -> Relevance:
    """One forward pass, one gradient, one relevance pass; ``model`` stays untouched."""
    transformer = as_transformer(unwrapped(model), "LRP")
    if transformer.config.family != "conventional":
        raise ValueError(
            "LRP has no rules for B-cos layers; use a conventional model (vit_...), or the "
            "method 'inherent', which is exact for this one."
        )
    model = view(transformer, with_parameter_grad=False).eval()
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            tokens = model.tokens(images)
        x = model.position(tokens).requires_grad_()
        passes = []
        for block in model.blocks:
            passes.append(_forward(block, x))
            x = passes[-1].middle + passes[-1].mlp
        normed = model.norm(x)
        pooled = normed.mean(1)
        logits = model.logit(model.head(pooled))
        classes = resolve_target(target, logits.detach())
        logit = logits.gather(1, classes[:, None]).sum()
        gradients = torch.autograd.grad(logit, [p.matrix for p in passes])
    with torch.no_grad():
        start = torch.zeros_like(logits).scatter_(1, classes[:, None], 1.0)
        relevance = linear_rule(start, pooled, _weight(model.head))
        relevance = pool_rule(relevance, normed)
        attentions: list[Tensor] = []
        for block, p in zip(reversed(model.blocks), reversed(passes), strict=True):
            relevance, attention = _backward(block, p, relevance)
            attentions.insert(0, attention)
    return Relevance(
        logits=logits.detach(),
        target=classes,
        attentions=attentions,
        gradients=list(gradients),
        tokens=relevance,
    )


def _forward(block: nn.Module, x: Tensor) -> _Pass:
    attention, mlp = _parts(block)
    normed = attention.norm(x)
    query, key, value = (
        attention.split(layer(normed))
        for layer in (attention.query, attention.key, attention.value)
    )
    matrix = attention_matrix(query, key, attention.prior.logits, attention.prior.kind)
    merged = (matrix @ value).transpose(1, 2).flatten(2)
    attended = attention.project(merged)
    middle = x + attended
    hidden_in = mlp.norm(middle)
    hidden = mlp.act(mlp.up(hidden_in))
    return _Pass(
        x=x,
        normed=normed,
        query=query,
        key=key,
        value=value,
        matrix=matrix,
        merged=merged,
        attended=attended,
        middle=middle,
        hidden_in=hidden_in,
        hidden=hidden,
        mlp=mlp.down(hidden),
    )


def _backward(block: nn.Module, p: _Pass, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of the block's input, and of its attention matrix."""
    attention, mlp = _parts(block)
    skipped, branch = skip_rule(relevance, p.middle, p.mlp)
    branch = linear_rule(branch, p.hidden, mlp.down.weight)
    relevance = skipped + linear_rule(branch, p.hidden_in, mlp.up.weight)

    skipped, branch = skip_rule(relevance, p.x, p.attended)
    branch = attention.split(linear_rule(branch, p.merged, _weight(attention.project)))
    matrix, value = product_rule(branch, p.matrix, p.value)
    query, key = product_rule(matrix, p.query, p.key.mT)
    into = [(query, attention.query), (key.mT, attention.key), (value, attention.value)]
    for part, layer in into:
        merged = part.transpose(1, 2).flatten(2)
        skipped = skipped + linear_rule(merged, p.normed, _weight(layer))
    return skipped, matrix


def _parts(block: nn.Module) -> tuple[Attention, GeluMLP]:
    assert isinstance(block, Block) and isinstance(block.mlp, GeluMLP)
    return block.attention, block.mlp


def _weight(layer: nn.Module) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return layer.weight


class LRPExplainer(Explainer):
    """Base class of methods that read the relevance of attention matrices.

    "No LRP rules are defined for B-cos ViTs" (the paper, Sec. 4), so these methods apply to
    conventional transformers alone.
    """

    signed = False

    def applies_to(self, model: AnyModel) -> bool:
        return isinstance(model, VisionTransformer) and model.config.family == "conventional"

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        result = propagate(model, images, target)
        transformer = unwrapped(model)
        assert isinstance(transformer, VisionTransformer)
        size = (images.shape[-2], images.shape[-1])
        return Attribution(
            map=upsample(self.scores(result).detach(), transformer, size),
            target=result.target,
            logits=result.logits,
        )

    @abstractmethod
    def scores(self, result: Relevance) -> Tensor:
        """Returns the scores of all tokens [B, t]."""


@register_explainer("cheferlrp")
@dataclass(frozen=True)
class CheferLRP(LRPExplainer):
    """Rollout of ReLU(gradient ⊙ relevance) of every attention matrix (Chefer et al., 2021).

    The rollout leaves out the identity, i.e. the path past all attention, which ends at the token
    where it began. The original reads the class token's row without its own column, so the identity
    has no share there either; averaged over queries it would be a constant, thousands of times
    larger than the rest.
    """

    title = "CheferLRP"
    colormap = "jet"
    color = "#e0702a"

    def scores(self, result: Relevance) -> Tensor:
        # All paths but the identity: adding it and subtracting it again would lose their digits.
        paths: Tensor | None = None
        for relevance, gradient in zip(result.attentions, result.gradients, strict=True):
            layer = (gradient * relevance).relu().mean(1)
            paths = layer if paths is None else paths + layer + layer @ paths
        assert paths is not None
        return paths.mean(1)


@register_explainer("plrp")
@dataclass(frozen=True)
class PartialLRP(LRPExplainer):
    """Partial LRP: the positive part of the last attention's relevance, averaged over heads."""

    title = "Partial LRP"
    color = "#a0652d"

    def scores(self, result: Relevance) -> Tensor:
        return result.attentions[-1].relu().mean((1, 2))

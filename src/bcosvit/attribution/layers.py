"""The layer-wise view: W(x) between any two points of a B-cos transformer.

The matrix product that makes up W(x) can be cut anywhere. ``token_contributions`` moves its right
end: what the tokens that enter block l contribute to a logit. ``input_contributions`` moves its
left end: what the pixels contribute to a token there. Both are exact, with their residual.

Attention rollout from layer l on, ``Rollout(start=l)``, is the same product with every factor but
attention replaced by the identity (the paper's Eq. 21), hence the natural thing to compare with.
"""

import torch
from torch import Tensor

from bcosvit.attribution.attention import as_transformer
from bcosvit.attribution.base import Attribution, Target, check_completeness, resolve_target
from bcosvit.attribution.inherent import probed_view
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.views import unwrapped


def token_contributions(
    model: AnyModel, images: Tensor, block: int, target: Target = None, *, strict: bool = False
) -> Attribution:
    """Contributions of the tokens that enter ``block`` to a logit, as a map [B, rows, columns].

    ``block`` counts from 0; the model's depth stands for the tokens behind the last block. As in
    `bcosvit.explain`, contributions that miss the logit are a warning, or an error if ``strict``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        view, probe = _frozen(model, images, block)
        with torch.no_grad():
            tokens = view.position(view.tokens(images))
            for layer in list(view.blocks)[:block]:
                tokens = layer(tokens)
        pooled = tokens.requires_grad_()
        for layer in list(view.blocks)[block:]:
            pooled = layer(pooled)
        grid = view.config.grid_of(images.shape[-2], images.shape[-1])
        logits = view.classify(pooled, grid)
        classes = resolve_target(target, logits.detach())
        if classes.ndim != 1:
            raise ValueError("token_contributions explains one class a sample; target is 'all'.")
        logit = logits.gather(1, classes[:, None])[:, 0]
        weights, residual = _gradients(logit, tokens, probe)
    found = Attribution(
        map=(weights * tokens.detach()).sum(-1).unflatten(1, grid),
        target=classes,
        residual=residual,
        logits=logits.detach(),
        logit=logit.detach(),
        bias=view.logit.bias,
    )
    check_completeness(found, strict)
    return found


def input_contributions(
    model: AnyModel, images: Tensor, block: int, token: int, *, strict: bool = False
) -> Attribution:
    """Contributions of the pixels to the token that enters ``block`` at position ``token``.

    What is explained is the token's norm, its projection on its own direction; ``logit`` holds it
    and ``target`` the position. Contributions that miss it are a warning, or an error if
    ``strict``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        view, probe = _frozen(model, images, block)
        with torch.no_grad():
            encoded = view.encoding(images)
        tokens = view.position(view.tokenizer(encoded.requires_grad_()))
        for layer in list(view.blocks)[:block]:
            tokens = layer(tokens)
        if not 0 <= token < tokens.shape[1]:
            raise ValueError(
                f"token = {token} does not exist; allowed are 0 to {tokens.shape[1] - 1}."
            )
        chosen = tokens[:, token]
        direction = torch.nn.functional.normalize(chosen.detach(), dim=1)
        size = (direction * chosen).sum(1)
        weights, residual = _gradients(size, encoded, probe)
    found = Attribution(
        map=(weights * encoded.detach()).sum(1),
        target=torch.full((len(images),), token, device=images.device),
        weights=weights,
        residual=residual,
        logit=size.detach(),
    )
    check_completeness(found, strict)
    return found


def _frozen(model: AnyModel, images: Tensor, block: int) -> tuple[VisionTransformer, Tensor]:
    transformer = as_transformer(unwrapped(model), "The layer-wise view")
    depth = transformer.config.depth
    if not 0 <= block <= depth:
        raise ValueError(f"block = {block} does not exist; allowed are 0 to {depth}.")
    return probed_view(transformer, images)


def _gradients(of: Tensor, source: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
    weights, residual = torch.autograd.grad(of.sum(), (source, probe), allow_unused=True)
    return weights, torch.zeros_like(probe) if residual is None else residual

"""LibraGrad: input × gradient of the tokens, along paths whose shares add up to the logit.

The gradient of a transformer flows through products of parts that both depend on the input:
attention times values, a norm's scale times what it scales, a gate times what passes through it.
Counted through both factors, input × gradient misses the logit by far. Mehri et al. (CVPR 2025)
hold one factor of each constant: attention matrices, the scales of LayerNorms, and the gates of
GELU, so that what is left over is the share of biases alone. In a B-cos transformer these are the
constants of a frozen view, and tokens get their exact contributions.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bcosvit.attribution.attention import as_transformer, shared_tokens, upsample
from bcosvit.attribution.base import (
    Attribution,
    Explainer,
    Target,
    register_explainer,
    resolve_target,
)
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.views import freezing, unwrapped, view


@register_explainer("libragrad")
@dataclass(frozen=True)
class LibraGrad(Explainer):
    """Input × gradient of the tokens with constant attention, norms and gates (Mehri et al., 2025).

    Scores belong to the tokens that enter the first block. Each is divided among the pixels of its
    token, so that maps are in units of the logit, and interpolated to the image.

    Examples:
        >>> import bcosvit, torch
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> options = {"family": "conventional", "width": 12, "depth": 1, "image_size": 16}
        >>> model = bcosvit.create_model(bcosvit.ModelConfig(backbone=stem, **options)).eval()
        >>> bcosvit.explain(model, torch.rand(1, 3, 16, 16), method="libragrad").map.shape
        torch.Size([1, 16, 16])
    """

    title = "LibraGrad"
    color = "#2f8f9d"

    def applies_to(self, model: AnyModel) -> bool:
        return isinstance(model, VisionTransformer)

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        return self.with_shared(model, images, target, {})

    def with_shared(
        self, model: AnyModel, images: Tensor, target: Target, shared: dict[str, Any]
    ) -> Attribution:
        """Classes, and methods that read attention, share the tokens."""
        transformer = as_transformer(unwrapped(model), "LibraGrad")
        balanced = view(transformer, mark=_balance, with_parameter_grad=False).eval()
        size = (images.shape[-2], images.shape[-1])
        with torch.inference_mode(False), torch.enable_grad():
            with torch.no_grad():
                tokens = balanced.position(shared_tokens(model, images, "LibraGrad", shared))
            tokens.requires_grad_()
            last = balanced.norm(balanced.blocks(tokens))
            logits = balanced.classify(last, balanced.config.grid_of(*size))
            classes = resolve_target(target, logits.detach())
            logit = logits.gather(1, classes[:, None]).sum()
            (gradient,) = torch.autograd.grad(logit, tokens)
        scores = (tokens.detach() * gradient).sum(-1)
        scores = scores * (scores.shape[1] / (size[0] * size[1]))
        return Attribution(
            map=upsample(scores, transformer, size), target=classes, logits=logits.detach()
        )


def _balance(module: nn.Module) -> dict[str, Any]:
    """What is set on the view of a module, so that it holds one factor of each product constant."""
    return {"forward": _gate} if type(module) is nn.GELU else freezing(module)


def _gate(x: Tensor) -> Tensor:
    """GELU, whose gate Φ(x) is constant."""
    return x * torch.special.ndtr(x).detach()

"""Post-hoc explanations by gradients, for any differentiable model.

They work on the model's own encoding, in evaluation mode, on a view that keeps no weight gradients.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bcosvit.attribution.base import (
    Attribution,
    Explainer,
    Target,
    register_explainer,
    resolve_target,
)
from bcosvit.attribution.passes import count_passes, samples_at_once
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import view


class EncodedExplainer(Explainer):
    """Base class of methods that work on the encoded image and its logits."""

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        plain = view(model, with_parameter_grad=False).eval()
        with torch.inference_mode(False):
            with torch.no_grad():
                encoded = plain.encoding(images)
                # A clone is a normal tensor even where the caller works in inference mode.
                logits = plain.from_encoded(encoded).clone()
                classes = resolve_target(target, logits)

            def logit(x: Tensor, samples: Tensor) -> Tensor:
                count_passes(len(x) * (3 if x.requires_grad else 1))
                return plain.from_encoded(x).gather(1, classes[samples, None])[:, 0]

            scores = self.scores(encoded.clone(), logit)
        return Attribution(map=scores.detach(), target=classes, logits=logits)

    @abstractmethod
    def scores(self, encoded: Tensor, logit: "Logit") -> Tensor:
        """Returns maps [B, H, W]; ``logit(x, samples)`` predicts variants x of these samples."""

    def chunk(self, at_once: int | None, encoded: Tensor, logit: "Logit") -> int:
        """Returns how many variants one pass takes: as asked for, else as memory allows."""
        if at_once is not None:
            return max(1, at_once)
        first = torch.zeros(1, dtype=torch.long, device=encoded.device)
        one = encoded[:1].detach().requires_grad_()
        return samples_at_once(lambda: logit(one, first), encoded.device)


Logit = Callable[[Tensor, Tensor], Tensor]


def gradient(x: Tensor, samples: Tensor, logit: Logit) -> Tensor:
    """∂logit/∂x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(logit(x, samples).sum(), x)[0]


@register_explainer("ixg")
@dataclass(frozen=True)
class InputGradient(EncodedExplainer):
    """Input × gradient of the model itself, with nothing frozen, in contrast to W(x)·x."""

    title = "Input × Gradient"
    color = "#2f7ed8"

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        samples = torch.arange(len(encoded), device=encoded.device)
        return (encoded * gradient(encoded, samples, logit)).sum(1)


@register_explainer("intgrad")
@dataclass(frozen=True)
class IntegratedGradients(EncodedExplainer):
    """Integrated gradients along a line, by default from zero, by Gauss–Legendre quadrature."""

    title = "IntGrad"
    color = "#17a2a2"
    cost = "many"

    steps: int = 32
    at_once: int | None = None
    """Images in one pass, if the batch has no more: memory does not grow with the steps. None
    stands for as many as half of the free memory allows, within 1 GB on a CPU and 32 images."""
    start: Tensor | None = field(default=None, repr=False, compare=False)
    """Where the line starts, encoded as the images are (``model.encoding``); None is zero."""

    def passes(self, height: int, width: int) -> int:
        return 3 * self.steps

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        pairs = [(i, step) for i in range(len(encoded)) for step in range(self.steps)]
        total = torch.zeros_like(encoded)
        start = None if self.start is None else self.start.expand_as(encoded)
        path = encoded if start is None else encoded - start
        at_once = self.chunk(self.at_once, encoded, logit)
        if self.at_once is not None:
            at_once = max(at_once, len(encoded))
        for chunk in (pairs[i : i + at_once] for i in range(0, len(pairs), at_once)):
            samples = torch.tensor([i for i, _ in chunk], device=encoded.device)
            position = encoded.new_tensor([(nodes[step] + 1) / 2 for _, step in chunk])
            weight = encoded.new_tensor([weights[step] / 2 for _, step in chunk])
            between = position.view(-1, 1, 1, 1) * path[samples]
            if start is not None:
                between = start[samples] + between
            slopes = gradient(between, samples, logit)
            total.index_add_(0, samples, weight.view(-1, 1, 1, 1) * slopes)
        return (path * total).sum(1)

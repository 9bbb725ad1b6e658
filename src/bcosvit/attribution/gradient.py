"""Post-hoc explanations for any differentiable model: gradients, occlusion, and a random map.

All work on the model's own encoding, in evaluation mode, on a view that keeps no weight gradients.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bcosvit.attribution.attribution import Attribution
from bcosvit.attribution.target import Target, resolve_target
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import view


class EncodedExplainer:
    """What these methods share: the encoded image, and logits of one class each."""

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        plain = view(model, with_parameter_grad=False).eval()
        with torch.inference_mode(False):
            with torch.no_grad():
                encoded = plain.encoding(images)
                # A clone is a normal tensor even where the caller works in inference mode.
                logits = plain.from_encoded(encoded).clone()
                classes = resolve_target(target, logits)

            def logit(x: Tensor, samples: Tensor) -> Tensor:
                return plain.from_encoded(x).gather(1, classes[samples, None])[:, 0]

            scores = self.scores(encoded.clone(), logit)
        return Attribution(map=scores.detach(), target=classes)

    def scores(self, encoded: Tensor, logit: "Logit") -> Tensor:
        """A map [B, H, W]; ``logit(x, samples)`` predicts variants x of these samples."""
        raise NotImplementedError


Logit = Callable[[Tensor, Tensor], Tensor]


def gradient(x: Tensor, samples: Tensor, logit: Logit) -> Tensor:
    """∂logit/∂x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(logit(x, samples).sum(), x)[0]


@dataclass(frozen=True)
class InputGradient(EncodedExplainer):
    """Input × gradient, with nothing frozen: what W(x)·x is *not*."""

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        samples = torch.arange(len(encoded), device=encoded.device)
        return (encoded * gradient(encoded, samples, logit)).sum(1)


@dataclass(frozen=True)
class IntegratedGradients(EncodedExplainer):
    """The gradient's integral along the line from zero, by Gauss–Legendre quadrature."""

    steps: int = 32
    at_once: int = 32
    """Images in one pass, if the batch has no more: memory does not grow with the steps."""

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        pairs = [(i, step) for i in range(len(encoded)) for step in range(self.steps)]
        total = torch.zeros_like(encoded)
        at_once = max(self.at_once, len(encoded))
        for chunk in (pairs[i : i + at_once] for i in range(0, len(pairs), at_once)):
            samples = torch.tensor([i for i, _ in chunk], device=encoded.device)
            position = encoded.new_tensor([(nodes[step] + 1) / 2 for _, step in chunk])
            weight = encoded.new_tensor([weights[step] / 2 for _, step in chunk])
            slopes = gradient(position.view(-1, 1, 1, 1) * encoded[samples], samples, logit)
            total.index_add_(0, samples, weight.view(-1, 1, 1, 1) * slopes)
        return (encoded * total).sum(1)


@dataclass(frozen=True)
class SmoothGrad(EncodedExplainer):
    """Input × gradient, averaged over noisy copies of the input."""

    samples: int = 16
    noise: float = 0.1
    """Standard deviation, as a share of the encoded input's range."""
    seed: int = 0

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        every = torch.arange(len(encoded), device=encoded.device)
        spread = self.noise * (encoded.amax((1, 2, 3)) - encoded.amin((1, 2, 3)))
        # One draw for all samples: a sample's map does not depend on its batch.
        generator = torch.Generator().manual_seed(self.seed)
        total = torch.zeros_like(encoded)
        for _ in range(self.samples):
            draw = torch.randn(encoded.shape[1:], generator=generator).to(encoded)
            total += gradient(encoded + spread.view(-1, 1, 1, 1) * draw, every, logit)
        return (encoded * total / self.samples).sum(1)


@dataclass(frozen=True)
class Occlusion(EncodedExplainer):
    """How much the logit falls when a window is zeroed, averaged over the windows on a pixel."""

    window: float = 1 / 7
    """The window's side, as a share of the image's."""
    stride: float = 1 / 14
    at_once: int = 32

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        height, width = encoded.shape[-2:]
        corners = [(y, x) for y in self._starts(height) for x in self._starts(width)]
        h, w = self._side(height), self._side(width)
        falls = encoded.new_zeros(len(encoded), height, width)
        count = encoded.new_zeros(height, width)
        for y, x in corners:
            count[y : y + h, x : x + w] += 1
        with torch.no_grad():
            for i in range(len(encoded)):
                whole = logit(encoded[i : i + 1], torch.tensor([i], device=encoded.device))
                for first in range(0, len(corners), self.at_once):
                    chunk = corners[first : first + self.at_once]
                    holes = encoded[i].repeat(len(chunk), 1, 1, 1)
                    for hole, (y, x) in zip(holes, chunk, strict=True):
                        hole[:, y : y + h, x : x + w] = 0
                    samples = torch.full((len(chunk),), i, device=encoded.device)
                    drops = whole - logit(holes, samples)
                    for drop, (y, x) in zip(drops, chunk, strict=True):
                        falls[i, y : y + h, x : x + w] += drop
        return falls / count

    def _side(self, pixels: int) -> int:
        return max(1, round(pixels * self.window))

    def _starts(self, pixels: int) -> list[int]:
        """Windows' first pixels; the last window ends at the image's edge."""
        last = pixels - self._side(pixels)
        return sorted({*range(0, last, max(1, round(pixels * self.stride))), last})


@dataclass(frozen=True)
class RandomMap(EncodedExplainer):
    """Noise, the floor of every table; seeded by the image, so that batches do not matter."""

    seed: int = 0

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        maps = []
        for image in encoded:
            content = zlib.crc32(image.double().cpu().numpy().tobytes())
            generator = torch.Generator().manual_seed(self.seed * 2**32 + content)
            maps.append(torch.rand(image.shape[-2:], generator=generator).to(encoded))
        return torch.stack(maps)

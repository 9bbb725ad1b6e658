"""Post-hoc explanations that predict many variants of an image, and a random map as their floor."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from bcosvit.attribution.base import register_explainer
from bcosvit.attribution.gradient import EncodedExplainer, Logit, gradient


@register_explainer("smoothgrad")
@dataclass(frozen=True)
class SmoothGrad(EncodedExplainer):
    """Input × gradient, averaged over noisy copies of the input."""

    title = "SmoothGrad"
    color = "#5a9bd5"
    cost = "many"

    samples: int = 16
    noise: float = 0.1
    """Standard deviation, as a share of the encoded input's range."""
    seed: int = 0

    def passes(self, height: int, width: int) -> int:
        return 3 * self.samples

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


@register_explainer("occlusion")
@dataclass(frozen=True)
class Occlusion(EncodedExplainer):
    """How much the logit falls when a window is zeroed, averaged over the windows on a pixel."""

    title = "Occlusion"
    color = "#3d9c5b"
    cost = "many"

    window: float = 1 / 7
    """The window's side, as a share of the image's."""
    stride: float = 1 / 14
    at_once: int | None = None
    """Windows in one pass; None stands for as many as memory allows, as in `intgrad`."""

    def passes(self, height: int, width: int) -> int:
        return 1 + len(self._starts(height)) * len(self._starts(width))

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        height, width = encoded.shape[-2:]
        corners = [(y, x) for y in self._starts(height) for x in self._starts(width)]
        h, w = self._side(height), self._side(width)
        falls = encoded.new_zeros(len(encoded), height, width)
        count = encoded.new_zeros(height, width)
        for y, x in corners:
            count[y : y + h, x : x + w] += 1
        at_once = self.chunk(self.at_once, encoded, logit)
        with torch.no_grad():
            for i in range(len(encoded)):
                whole = logit(encoded[i : i + 1], torch.tensor([i], device=encoded.device))
                for first in range(0, len(corners), at_once):
                    chunk = corners[first : first + at_once]
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


@register_explainer("random")
@dataclass(frozen=True)
class RandomMap(EncodedExplainer):
    """Noise, the floor of every table; seeded by the image, so that batches do not matter."""

    title = "Random map"
    signed = False
    cost = "forward"
    baseline = True

    seed: int = 0

    def scores(self, encoded: Tensor, logit: Logit) -> Tensor:
        maps = []
        for image in encoded:
            content = zlib.crc32(image.double().cpu().numpy().tobytes())
            generator = torch.Generator().manual_seed(self.seed * 2**32 + content)
            maps.append(torch.rand(image.shape[-2:], generator=generator).to(encoded))
        return torch.stack(maps)

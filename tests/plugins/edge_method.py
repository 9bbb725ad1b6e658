"""An explanation method of another package: brightness edges, whatever the class."""

from dataclasses import dataclass

import torch

from bcosvit import Attribution, Explainer, register_explainer


@register_explainer("edges")
@dataclass(frozen=True)
class Edges(Explainer):
    """The absolute horizontal difference of neighboring pixels."""

    title = "Brightness edges"
    signed = False
    colormap = "jet"
    color = "#123456"
    cost = "forward"

    def __call__(self, model, images, target=None):
        gray = images.mean(1)
        edges = torch.zeros_like(gray)
        edges[:, :, 1:] = (gray[:, :, 1:] - gray[:, :, :-1]).abs()
        with torch.no_grad():
            logits = model(images)
        target = logits.argmax(1) if target is None else target
        return Attribution(map=edges, target=target, logits=logits)

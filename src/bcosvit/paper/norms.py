"""How large what attention adds is beside what it is added to (the paper's attention ablation).

Measured in a view of the model: hooks are put on copies of its attention layers, which are thrown
away with the view.
"""

import torch
from torch import Tensor, nn

from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.views import view


def branch_ratios(model: VisionTransformer, images: Tensor) -> Tensor:
    """log(‖skip‖ / ‖attention's output‖) [B, layers], averaged over tokens.

    Logarithms, because the paper compares orders of magnitude.
    """
    found: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append((_log_norm(inputs[0]) - _log_norm(output)).mean(1))

    watched = view(model, with_parameter_grad=False).eval()
    for module in watched.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(look)
    with torch.no_grad():
        watched(images)
    return torch.stack(found, 1)


def _log_norm(tokens: Tensor) -> Tensor:
    """[n, t]; a branch that is exactly zero counts as the smallest number there is."""
    norms = tokens.double().norm(dim=-1)
    return norms.clamp(min=torch.finfo(torch.float64).tiny).log()

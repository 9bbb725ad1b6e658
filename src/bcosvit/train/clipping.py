"""Adaptive gradient clipping (Brock et al. 2021, Eq. 3): each unit by its own weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

FLOOR = 1e-3
"""Weights count as at least this long, lest units that start at zero never move."""


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scales each unit's gradient, in place, to at most ``limit`` times its weights' norm.

    A unit is what computes one output: a row of a matrix, a filter of a convolution, a head of a
    prior; a bias or a scale is one unit as a whole.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        allowed = limit * _unit_norms(parameter).clamp_min(FLOOR)
        # A zero gradient gives an infinite quotient, and so a factor of one.
        parameter.grad.mul_((allowed / _unit_norms(parameter.grad)).clamp_max(1.0))


def _unit_norms(tensor: Tensor) -> Tensor:
    if tensor.ndim <= 1:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)

"""The B-cos transform of vectors, as the paper writes it (Eq. 8 and 12).

Shapes: x [..., d], weight [m·c, d], out [..., c].
"""

import torch.nn.functional as F
from torch import Tensor

from bcosvit.ops.bcos_scale.reference import bcos_scale
from bcosvit.ops.common import constant_if, wide


def bcos_linear(
    x: Tensor,
    weight: Tensor,
    *,
    b: float = 2.0,
    m: int = 1,
    scale: float = 1.0,
    eps: float = 1e-6,
    frozen: bool = False,
) -> Tensor:
    """MaxOut over ``m`` units of γ·|cos(x, ŵ)|^(B−1)·(ŵ·x).

    ``weight`` has unit rows already (``unit_rows``), so MaxOut may come before the scaling.
    With ``frozen`` the gradient with respect to ``x`` is the dynamic matrix W(x).
    """
    units = F.linear(x, weight)
    return bcos_scale(units, row_norms(x, b, eps, frozen), b=b, m=m, scale=scale, frozen=frozen)


def row_norms(x: Tensor, b: float, eps: float, frozen: bool) -> Tensor | None:
    """√(Σx² + ε) [..., 1] in at least float32; B = 1 does not look at it."""
    if b == 1:
        return None
    return (wide(constant_if(frozen, x)).square().sum(-1, keepdim=True) + eps).sqrt()

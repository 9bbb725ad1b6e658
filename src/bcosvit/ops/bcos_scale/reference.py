"""MaxOut and the cosine scaling in plain PyTorch (the paper's Eq. 8 behind the product ŵ·a).

Shapes: units [..., m·c], norm [..., 1], out [..., c].
"""

from torch import Tensor

from bcosvit.ops.common import cosine_scaled, maxout, wide


def bcos_scale(
    units: Tensor, norm: Tensor | None, *, b: float, m: int, scale: float, frozen: bool = False
) -> Tensor:
    linear = maxout(units, m, dim=-1)
    if b == 1:
        return scale * linear
    assert norm is not None
    return cosine_scaled(wide(linear), norm, b, scale, frozen).to(linear.dtype)

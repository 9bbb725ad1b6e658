"""MaxOut and the cosine scaling: what turns ŵ·a and ‖a‖ into the B-cos transform.

The matrix product before it is cuBLAS' or oneDNN's business; everything after it is one pass.
"""

from torch import Tensor

from bcosvit.ops.backend import Backend, use_triton
from bcosvit.ops.bcos_scale import reference


def bcos_scale(
    units: Tensor,
    norm: Tensor | None,
    *,
    b: float,
    m: int,
    scale: float,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """γ·|u/‖a‖|^(B−1)·u of the largest u of each ``m`` neighbors in the last axis.

    ``units`` [..., m·c], ``norm`` [..., 1] in at least float32 (None where B = 1) -> [..., c].
    """
    if use_triton(backend, units):
        from bcosvit.ops.bcos_scale import triton

        return triton.bcos_scale(units, norm, b=b, m=m, scale=scale, frozen=frozen)
    return reference.bcos_scale(units, norm, b=b, m=m, scale=scale, frozen=frozen)


__all__ = ["bcos_scale"]

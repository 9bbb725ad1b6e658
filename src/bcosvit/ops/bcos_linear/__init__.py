"""The B-cos transform of vectors, and two of them in a row."""

from typing import TypedDict

from torch import Tensor

from bcosvit.ops.backend import Backend, use_triton
from bcosvit.ops.bcos_linear import reference


class Transform(TypedDict):
    """What a B-cos transform is made of besides its weight."""

    b: float
    m: int
    scale: float
    eps: float


def bcos_linear(
    x: Tensor,
    weight: Tensor,
    *,
    b: float = 2.0,
    m: int = 1,
    scale: float = 1.0,
    eps: float = 1e-6,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """MaxOut over ``m`` units of γ·|cos(x, ŵ)|^(B−1)·(ŵ·x): x [..., d], weight [m·c, d].

    ``weight`` has unit rows already (``unit_rows``). With ``frozen`` the gradient with respect to
    ``x`` is the dynamic matrix W(x).
    """
    if use_triton(backend, x):
        from bcosvit.ops.bcos_linear import triton

        return triton.bcos_linear(x, weight, b=b, m=m, scale=scale, eps=eps, frozen=frozen)[0]
    return reference.bcos_linear(x, weight, b=b, m=m, scale=scale, eps=eps, frozen=frozen)


def bcos_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_by: Transform,
    down_by: Transform,
    *,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``bcos_linear`` by ``up``, then by ``down``, which learns ‖a‖ without reading a again."""
    if not use_triton(backend, x):
        hidden = reference.bcos_linear(x, up, **up_by, frozen=frozen)
        return reference.bcos_linear(hidden, down, **down_by, frozen=frozen)
    from bcosvit.ops.bcos_linear import triton

    hidden, squares = triton.bcos_linear(x, up, **up_by, frozen=frozen, with_squares=True)
    return triton.bcos_linear(hidden, down, **down_by, frozen=frozen, squares=squares)[0]


__all__ = ["Transform", "bcos_linear", "bcos_mlp"]

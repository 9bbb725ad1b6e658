"""The B-cos transform of image patches."""

from torch import Tensor

from bcosvit.ops.backend import Backend, use_triton
from bcosvit.ops.bcos_conv import reference
from bcosvit.ops.bcos_conv.reference import Pair


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    b: float = 2.0,
    m: int = 1,
    scale: float = 1.0,
    eps: float = 1e-6,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``bcos_linear`` on every patch: x [n, d, h, w], weight [m·c, d/groups, kh, kw], unit rows."""
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    if use_triton(backend, x):
        from bcosvit.ops.bcos_conv import triton

        run = triton.bcos_conv2d
    else:
        run = reference.bcos_conv2d
    return run(x, weight, **window, groups=groups, b=b, m=m, scale=scale, eps=eps, frozen=frozen)


__all__ = ["bcos_conv2d"]

"""The B-cos transform of image patches (SPEC 1.3).

Shapes: x [n, d, h, w], weight [m·c, d/g, kh, kw], out [n, c, oh, ow]; g groups.
"""

from itertools import product

import torch.nn.functional as F
from torch import Tensor

from bcosvit.ops.common import constant_if, cosine_scaled, maxout, wide

Pair = tuple[int, int]


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
) -> Tensor:
    """``bcos_linear`` on every patch; ``weight`` has unit norm per output unit already."""
    linear = maxout(F.conv2d(x, weight, None, stride, padding, dilation, groups), m, dim=1)
    if b == 1:
        return scale * linear
    kernel = (weight.shape[2], weight.shape[3])
    norm = patch_norms(constant_if(frozen, x), kernel, stride, padding, dilation, groups, eps)
    per_group = wide(linear).unflatten(1, (groups, -1))
    scaled = cosine_scaled(per_group, norm.unsqueeze(2), b, scale, frozen)
    return scaled.flatten(1, 2).to(linear.dtype)


def patch_norms(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int, eps: float
) -> Tensor:
    """√(Σa² + ε) of every patch and group, in at least float32: [n, g, oh, ow]."""
    squares = wide(x).square().unflatten(1, (groups, -1)).sum(2)
    return (box_sums(squares, kernel, stride, padding, dilation) + eps).sqrt()


def box_sums(squares: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The sum over each window: [n, g, h, w] -> [n, g, oh, ow]."""
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return squares
    squares = F.pad(squares, (padding[1], padding[1], padding[0], padding[0]))
    if dilation == (1, 1):
        return F.avg_pool2d(squares, kernel, stride, divisor_override=1)
    # Shifted slices rather than a convolution with ones, which autocast would narrow.
    height = (squares.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    width = (squares.shape[3] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    sums = squares.new_zeros(*squares.shape[:2], height, width)
    for i, j in product(range(kernel[0]), range(kernel[1])):
        shifted = squares[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]]
        sums = sums + shifted[:, :, :height, :width]
    return sums

"""The B-cos transform of image patches on a GPU: cuDNN's convolution, then the rest in one pass.

Channels lie last in memory, so that each position's units are one row for ``bcos_scale``, and a
1×1 convolution is a B-cos transform of vectors, which may even be a slice of wider rows: dense
blocks read their growing input where it lies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.ops.bcos_conv.reference import Pair, box_sums
from bcosvit.ops.bcos_linear.triton import bcos_linear
from bcosvit.ops.bcos_scale.triton import bcos_scale
from bcosvit.ops.common import constant_if


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    b: float,
    m: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    kernel = (weight.shape[2], weight.shape[3])
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1:
        rows = x.permute(0, 2, 3, 1)
        out, _ = bcos_linear(rows, weight.flatten(1), b=b, m=m, scale=scale, eps=eps, frozen=frozen)
        return out.permute(0, 3, 1, 2)
    x = x.contiguous(memory_format=torch.channels_last)
    units = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    norm = None
    if b != 1:
        # In one pass, without a wide copy of x.
        length = torch.linalg.vector_norm(
            constant_if(frozen, x).unflatten(1, (groups, -1)), dim=2, dtype=torch.float32
        )
        sums = box_sums(length.square(), kernel, stride, padding, dilation)
        norm = (sums + eps).sqrt().permute(0, 2, 3, 1).unsqueeze(-1)
    out = bcos_scale(
        units.permute(0, 2, 3, 1).unflatten(-1, (groups, -1)),
        norm,
        b=b,
        m=m,
        scale=scale,
        frozen=frozen,
    )
    return out.flatten(-2).permute(0, 3, 1, 2)

"""How the steps of an adjoint pass are written with operators that every runtime has.

ONNX knows no gradient: the adjoint of a convolution is written as a transposed one, as is that of
an average pool. MaxOut's choice of a unit becomes comparisons, which runtimes are quicker at than
at ArgMax and scattering. Each rule is exact; for cases that no model here has it stands aside.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_FEW = 8
"""Up to so many units are compared one by one."""


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """Of the input alone: nobody asks for the weights' gradient."""
    if transposed or list(mask) != [True, False, False]:
        return NotImplemented
    return _spread(grad, weight, x, stride, padding, dilation, groups), None, None


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    if ceil_mode or divisor is not None or (any(padding) and not count_include_pad):
        return NotImplemented
    weight = grad.new_full((1, 1, *kernel), 1 / (kernel[0] * kernel[1]))
    # Channels join the batch: a convolution with as many groups as channels is slow.
    x = x.flatten(0, 1).unsqueeze(1)
    spread = _spread(grad.flatten(0, 1).unsqueeze(1), weight, x, stride, padding, [1, 1], 1)
    return spread.view(grad.shape[0], grad.shape[1], *spread.shape[2:])


def _spread(
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The transposed convolution whose output has the size of ``x``."""
    reached = [
        (grad.shape[2 + i] - 1) * stride[i]
        - 2 * padding[i]
        + dilation[i] * (weight.shape[2 + i] - 1)
        + 1
        for i in (0, 1)
    ]
    left = [x.shape[2 + i] - reached[i] for i in (0, 1)]
    return aten.convolution(grad, weight, None, stride, padding, dilation, True, left, groups)


def avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """A sum written as a mean: ONNX has no divisor of one's own, and its exporter drops it."""
    if divisor is None:
        return NotImplemented
    mean = aten.avg_pool2d(x, kernel, stride, padding, ceil_mode, True)
    return mean * (kernel[0] * kernel[1] / divisor)


def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """The largest of a few, and the first place that has it."""
    units = x.shape[dim]
    if not isinstance(units, int) or units > _FEW:
        return NotImplemented
    best = x.select(dim, 0)
    place = torch.zeros_like(best, dtype=torch.int64)
    for unit in range(1, units):
        other = x.select(dim, unit)
        better = other > best
        best = torch.maximum(best, other)
        # A later unit that is larger than all before it: its number is the largest so far too.
        place = torch.maximum(place, unit * better.to(torch.int64))
    return (best.unsqueeze(dim), place.unsqueeze(dim)) if keepdim else (best, place)


def scatter_src(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """One value into each row along ``dim``, as a comparison with the places there."""
    dim = dim % x.ndim
    if index.shape[dim] != 1 or index.shape[:dim] + index.shape[dim + 1 :] != (
        x.shape[:dim] + x.shape[dim + 1 :]
    ):
        return NotImplemented
    places = torch.arange(x.shape[dim], device=x.device)
    places = places.view(-1, *[1] * (x.ndim - dim - 1))
    return torch.where(index == places, src, x)


RULES: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.avg_pool2d.default: avg_pool2d,
    aten.max.dim: max_dim,
    aten.scatter.src: scatter_src,
}

"""The B-cos transform on a CPU: the equation of ``bcos`` with fewer passes over memory.

The time of products is that of their arithmetic, the time of everything else is that of reading and
writing memory. Therefore results are scaled in place, by a kernel or in blocks that fit into the
processor's cache; MaxOut compares the two halves of a tensor; and images have their channels last
in memory, so that a 1×1 convolution is a product. ``frozen_cpu`` has the layers of frozen views.

Letters: n batch, d inputs, c outputs, m units per output, h, w pixels.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from bcosvit.ops.compiled import depthwise
from bcosvit.ops.dispatch import constant_if, is_direct, narrowed, wide
from bcosvit.ops.frozen_cpu import BLOCK, blocks, has_winners, of_two, scaled_along, winners
from bcosvit.ops.products import convolution, linear, patch_sums
from bcosvit.ops.scaling import Pair, cosine_scaled, factor_of, larger, largest_units


def bcos_linear(
    x: Tensor, weight: Tensor, *, b: float, maxout: int, scale: float, eps: float, frozen: bool
) -> Tensor:
    norm = None if b == 1 else (row_squares(constant_if(frozen, x), dim=-1) + eps).sqrt()
    weight = unit_major(weight, maxout)
    if norm is not None and has_winners(x, weight, maxout, frozen):
        # Rows are images of one row of pixels.
        shape = (-1, 1, x.shape[-2] if x.ndim > 1 else 1)
        images, norm = x.reshape(*shape, x.shape[-1]), norm.reshape(*shape, 1)
        pixels: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0)}
        y = winners(images, weight[..., None, None], norm, b, scale, **pixels)
        return y.view(*x.shape[:-1], -1)
    units = linear(x, weight, frozen=frozen)
    return _scaled_parts(units, norm, b, maxout, scale, frozen, dim=-1)


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    b: float,
    maxout: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    window: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if _is_rows(x, weight, stride, padding, groups):
        how: dict[str, Any] = {"b": b, "maxout": maxout, "scale": scale, "eps": eps}
        rows = bcos_linear(x.permute(0, 2, 3, 1), weight.flatten(1), **how, frozen=frozen)
        return rows.permute(0, 3, 1, 2)
    if groups == 1:
        norm = None if b == 1 else patch_norms(x, weight, 1, eps, frozen, **window)
        weight = unit_major(weight, maxout)
        if norm is not None and dilation == (1, 1) and has_winners(x, weight, maxout, frozen):
            images, norm = x.permute(0, 2, 3, 1), norm.permute(0, 2, 3, 1)
            y = winners(images, weight, norm, b, scale, stride=stride, padding=padding)
            return y.permute(0, 3, 1, 2)
        units = convolution(x, weight, **window, frozen=frozen)
        return _scaled_parts(units, norm, b, maxout, scale, frozen, dim=1)
    x = x.contiguous(memory_format=torch.channels_last)
    if b == 2 and maxout == 1 and groups == x.shape[1]:
        in_one_pass = depthwise(x, weight, **window, scale=scale, eps=eps)
        if in_one_pass is not None:
            return in_one_pass
    units = convolution(x, weight, **window, groups=groups, frozen=frozen)
    largest = largest_units(units, maxout, dim=1)
    if b == 1:
        return scale * largest
    if _is_final(largest) and not (torch.is_grad_enabled() and x.requires_grad):
        # Norms are as large as the result: of a few images they stay in the cache.
        few = max(1, 4 * BLOCK * len(x) // max(1, x.numel()))
        for images, result in zip(x.split(few), largest.split(few), strict=True):
            norm = patch_norms(images, weight, groups, eps, frozen, **window)
            _scale_in_place(result.unflatten(1, (groups, -1)), norm.unsqueeze(2), b, scale)
        return largest
    norm = patch_norms(x, weight, groups, eps, frozen, **window)
    per_group = wide(largest).unflatten(1, (groups, -1))
    scaled = cosine_scaled(per_group, norm.unsqueeze(2), b, scale, frozen)
    return narrowed(scaled.flatten(1, 2), largest, frozen=frozen)


def _is_rows(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, groups: int) -> bool:
    """Whether a convolution is a product with the rows that pixels are in memory."""
    return (
        weight.shape[2:] == (1, 1)
        and (stride, padding, groups) == ((1, 1), (0, 0), 1)
        and x.is_contiguous(memory_format=torch.channels_last)
        and not x.is_contiguous()
    )


def patch_norms(
    x: Tensor, weight: Tensor, groups: int, eps: float, frozen: bool, **window: Any
) -> Tensor:
    """√(Σa² + ε) of every patch a, [n, groups, output height, output width]."""
    x = constant_if(frozen, x)
    if groups == 1:
        squares = row_squares(x, dim=1)
    else:
        squares = wide(x).square()
        if groups < x.shape[1]:
            squares = squares.unflatten(1, (groups, -1)).sum(2)
    sums = patch_sums(squares, (weight.shape[2], weight.shape[3]), **window)
    return (sums + eps).sqrt() if sums.requires_grad else sums.add_(eps).sqrt_()


def row_squares(x: Tensor, dim: int) -> Tensor:
    """Σx² along ``dim``, which stays as an axis, in at least float32."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if differentiated or x.stride(dim) != 1:
        return wide(x).square().sum(dim, keepdim=True)
    # One pass, without a tensor of squares.
    return torch.linalg.vector_norm(wide(x), dim=dim, keepdim=True).square_()


def unit_major(weight: Tensor, m: int) -> Tensor:
    """The rows of all first units, then those of all second ones, instead of neighbors.

    MaxOut then compares halves of a tensor rather than every other number: a quarter of the time.
    """
    return weight if m == 1 else weight.unflatten(0, (-1, m)).transpose(0, 1).flatten(0, 1)


def _scaled_parts(
    units: Tensor, norm: Tensor | None, b: float, m: int, scale: float, frozen: bool, dim: int
) -> Tensor:
    """MaxOut and scaling of units in the order of :func:`unit_major`."""
    if m == 2 and norm is not None and frozen and _is_read_back(units):
        # One pass back, which takes both at once.
        return of_two(units, norm, b, scale, dim)
    if norm is not None and _is_final(units):
        in_one_pass = scaled_along(units, norm, b, m, scale, dim)
        if in_one_pass is not None:
            return in_one_pass[0]
    largest = functools.reduce(larger, units.chunk(m, dim))
    if norm is None:
        return scale * largest
    if _is_final(largest):
        _scale_in_place(largest, norm, b, scale)
        return largest
    scaled = cosine_scaled(wide(largest), norm, b, scale, frozen)
    return narrowed(scaled, largest, frozen=frozen)


def _is_final(largest: Tensor) -> bool:
    """Whether nothing is differentiated or traced, so that the result may replace ``largest``."""
    return (
        largest.dtype in (torch.float32, torch.float64)
        and not (torch.is_grad_enabled() and largest.requires_grad)
        and is_direct(largest)
    )


def _scale_in_place(linear: Tensor, norm: Tensor, b: float, scale: float) -> None:
    for part, size in blocks(linear, norm):
        part.mul_(factor_of(part, size, b, scale))


def _is_read_back(units: Tensor) -> bool:
    """Whether an explanation will ask for the adjoint, in a dtype that is wide enough."""
    wide_enough = units.dtype in (torch.float32, torch.float64)
    return wide_enough and torch.is_grad_enabled() and units.requires_grad

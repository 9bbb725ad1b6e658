"""Normalization and pooling; in a frozen view the scale of a norm is part of W(x)."""

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from bcosvit.nn.views import DynamicModule, twin_of
from bcosvit.ops.dispatch import narrowed, wide


@twin_of(nn.LayerNorm)
class LayerNorm(DynamicModule, nn.LayerNorm):
    """``nn.LayerNorm`` for frozen views.

    There its scale is part of W(x), subtracting the mean stays linear, and the bias counts towards
    the residual.
    """

    def standardize(self, x: Tensor) -> Tensor:
        """The ordinary LayerNorm, for an ``x`` that no gradient is asked for in a frozen view."""
        if self.frozen and self.weight is not None and x.dtype != self.weight.dtype:
            # Wider in an explanation in half precision than the model computes it.
            x = x.to(self.weight.dtype)
        return nn.LayerNorm.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.frozen:
            return self.standardize(x)
        dims = tuple(range(-len(self.normalized_shape), 0))
        centered = wide(x) - wide(x).mean(dims, keepdim=True)
        variance = self.constant(centered).square().mean(dims, keepdim=True)
        y = centered * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.offset(self.bias, y)
        # As `super().forward` does: autocast keeps the result wide.
        return narrowed(y, x, frozen=True)


class BatchNormUncentered2d(DynamicModule, nn.BatchNorm2d):
    """Batch norm that divides by the standard deviation and subtracts no mean, so it stays linear.

    Its state is that of ``nn.BatchNorm2d`` without a bias, as in the authors' package; the running
    mean never changes.

    Args:
        num_features: Channels.
        eps: Added to the variance.
        momentum: The weight of a batch in the running variance.

    Examples:
        >>> norm = BatchNormUncentered2d(4).eval()
        >>> norm(torch.zeros(1, 4, 2, 2)).abs().sum()
        tensor(0., grad_fn=<SumBackward0>)
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_var is not None and self.num_batches_tracked is not None
        if self.training:
            variance = wide(x).var((0, 2, 3), unbiased=False)
            with torch.no_grad():
                self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum or 0.0)
                self.num_batches_tracked.add_(1)
        else:
            variance = self.running_var
        scale = self.weight * torch.rsqrt(self.constant(variance) + self.eps)
        return x * scale.to(x.dtype).view(-1, 1, 1)


@twin_of(nn.AvgPool2d)
class AvgPool2d(DynamicModule, nn.AvgPool2d):
    """``nn.AvgPool2d`` without one of its CUDA kernels, whose gradient is wrong.

    Where windows overlap and channels lie last in memory, torch 2.11 returns a wrong gradient (at
    3×3 windows and stride 2 by as much as the gradient itself), so that contributions through a
    DenseNet's stem would be wrong. Inputs that are differentiated are rearranged first.
    """

    def forward(self, x: Tensor) -> Tensor:
        windows = zip(_pair(self.kernel_size), _pair(self.stride), strict=True)
        overlap = any(size > step for size, step in windows)
        moved = overlap and x.requires_grad and _is_wrong_on(x.device.type)
        return super().forward(x.contiguous() if moved else x)


def _is_wrong_on(device: str) -> bool:
    return device == "cuda"

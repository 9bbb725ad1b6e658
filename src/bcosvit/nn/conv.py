"""The B-cos convolution."""

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from bcosvit.nn.linear import BcosLayer
from bcosvit.nn.views import DynamicModule, twin_of
from bcosvit.ops import bcos_conv2d
from bcosvit.ops.products import convolution

IntOrPair = int | tuple[int, int]


class BcosConv2d(BcosLayer):
    """The B-cos transform of image patches, in place of ``nn.Conv2d``; the padding is zeros.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Height and width of a patch; an int means a square.
        stride: Distance between patches.
        padding: Zeros around the image.
        dilation: Distance between the pixels of a patch.
        groups: Groups of channels, each of which is transformed on its own.
        b: The exponent B >= 1; larger values reward alignment more.
        maxout: Units per output channel, of which the largest counts.
        scale: The factor γ on the output.
        eps: Added to the squared norm of a patch.

    Raises:
        ValueError: ``b`` or ``maxout`` is less than 1, ``scale`` or ``eps`` is not above 0,
            ``padding`` is a name, or ``groups`` does not divide the channels.

    Examples:
        >>> layer = BcosConv2d(6, 16, 3, stride=2, padding=1)
        >>> layer(torch.rand(1, 6, 32, 32)).shape
        torch.Size([1, 16, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        *,
        stride: IntOrPair = 1,
        padding: IntOrPair = 0,
        dilation: IntOrPair = 1,
        groups: int = 1,
        b: float = 2.0,
        maxout: int = 1,
        scale: float = 1.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(b=b, maxout=maxout, scale=scale, eps=eps)
        if isinstance(padding, str):
            raise ValueError(
                f"padding = {padding!r} is not allowed: give the number of zeros on each side, "
                f"such as 1 for a kernel of 3×3."
            )
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups = {groups} does not divide {in_channels} input and {out_channels} output "
                f"channels; give a common divisor of both."
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size: tuple[int, int] = _pair(kernel_size)
        self.stride: tuple[int, int] = _pair(stride)
        self.padding: tuple[int, int] = _pair(padding)
        self.dilation: tuple[int, int] = _pair(dilation)
        self.groups = groups
        units, fan_in = out_channels * maxout, in_channels // groups
        self.weight = nn.Parameter(torch.empty(units, fan_in, *self.kernel_size))
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return bcos_conv2d(
            x,
            self.unit_weight(),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            **self.options,
            frozen=self.frozen,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, {super().extra_repr()}"
        )


@twin_of(nn.Conv2d)
class Conv2d(DynamicModule, nn.Conv2d):
    """``nn.Conv2d`` without bias; a frozen view computes it in all of float32."""

    def forward(self, input: Tensor) -> Tensor:
        options = (self.stride, self.padding, self.dilation, self.groups)
        return convolution(input, self.weight, self.bias, *options, frozen=self.frozen)

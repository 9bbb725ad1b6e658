"""The B-cos convolution."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from bcosvit.nn.linear import BcosLayer, check_bcos
from bcosvit.ops import bcos_conv2d

IntOrPair = int | tuple[int, int]


class BcosConv2d(BcosLayer):
    """``BcosLinear`` on patches: any kernel, stride, dilation, groups, zero padding (SPEC 1.3)."""

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
        super().__init__()
        check_bcos(b, maxout)
        if in_channels % groups or out_channels % groups:
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
        self.b = float(b)
        self.maxout = maxout
        self.scale = float(scale)
        self.eps = eps
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
            b=self.b,
            m=self.maxout,
            scale=self.scale,
            eps=self.eps,
            frozen=self.frozen,
            backend=self.backend,
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The authors' two code bases wrap the kernel in a module called `linear`.
        published = prefix + "linear.weight"
        if published in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(published)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, b={self.b:g}, maxout={self.maxout}, scale={self.scale:g}"
        )

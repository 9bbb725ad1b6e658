"""Linear layers: the B-cos transform, and the ordinary one with its bias accounted for."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.nn.dynamic import DynamicModule, twin_of
from bcosvit.ops import bcos_linear
from bcosvit.ops.common import unit_rows


def check_bcos(b: float, maxout: int) -> None:
    """What holds for every B-cos layer; B < 1 would reward *mis*alignment."""
    if not (math.isfinite(b) and b >= 1):
        raise ValueError(f"B = {b} is not allowed: the B-cos exponent is a finite number B >= 1.")
    if not (isinstance(maxout, int) and maxout >= 1):
        raise ValueError(f"maxout = {maxout!r} is not allowed: give an integer >= 1.")


class BcosLinear(DynamicModule):
    """γ·|cos(x, ŵ)|^(B−1)·(ŵ·x), the maximum over ``maxout`` units an output (SPEC 1.1, 1.2)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        b: float = 2.0,
        maxout: int = 1,
        scale: float = 1.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_bcos(b, maxout)
        self.in_features = in_features
        self.out_features = out_features
        self.b = float(b)
        self.maxout = maxout
        self.scale = float(scale)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(out_features * maxout, in_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return bcos_linear(
            x,
            unit_rows(self.weight),
            b=self.b,
            m=self.maxout,
            scale=self.scale,
            eps=self.eps,
            frozen=self.frozen,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, b={self.b:g}, maxout={self.maxout}, "
            f"scale={self.scale:g}"
        )


@twin_of(nn.Linear)
class Linear(DynamicModule, nn.Linear):
    """``nn.Linear`` whose bias counts towards the residual of an explanation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.probe is None or self.bias is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return y + self.offset(self.bias, y)

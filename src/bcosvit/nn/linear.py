"""Linear layers: the B-cos transform, and the ordinary one with its bias accounted for."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.nn.views import DynamicModule, twin_of
from bcosvit.ops import bcos_linear, bcos_mlp
from bcosvit.ops.bcos import Transform
from bcosvit.ops.dispatch import unit_rows


def check_bcos(b: float, maxout: int) -> None:
    """What holds for every B-cos layer; B < 1 would reward *mis*alignment."""
    if not (math.isfinite(b) and b >= 1):
        raise ValueError(f"B = {b} is not allowed: the B-cos exponent is a finite number B >= 1.")
    if not (isinstance(maxout, int) and maxout >= 1):
        raise ValueError(f"maxout = {maxout!r} is not allowed: give an integer >= 1.")


class BcosLayer(DynamicModule):
    """What has a weight with one row a unit, of which only the direction counts."""

    weight: nn.Parameter

    prepared: bool = False
    """In a prepared view: ``weight`` has unit rows already."""

    def prepare(self, dtype: torch.dtype | None) -> None:
        # Not a parameter any more: a prepared view is not trained.
        unit = unit_rows(self.weight).to(dtype or self.weight.dtype)
        self._parameters["weight"] = unit  # type: ignore[assignment]
        self.prepared = True

    def unit_weight(self) -> Tensor:
        """ŵ"""
        return self.weight if self.prepared else unit_rows(self.weight)


class BcosLinear(BcosLayer):
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
            x, self.unit_weight(), **self.transform, frozen=self.frozen, backend=self.backend
        )

    @property
    def transform(self) -> Transform:
        """What the layer does with its weight, for the ops."""
        return {"b": self.b, "m": self.maxout, "scale": self.scale, "eps": self.eps}

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, b={self.b:g}, maxout={self.maxout}, "
            f"scale={self.scale:g}"
        )


class BcosMLP(nn.Sequential):
    """Two B-cos transforms, nothing between them (the paper's Eq. 15)."""

    def __init__(self, up: BcosLinear, down: BcosLinear) -> None:
        super().__init__(up, down)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self
        assert isinstance(up, BcosLinear) and isinstance(down, BcosLinear)
        return bcos_mlp(
            x,
            up.unit_weight(),
            down.unit_weight(),
            up.transform,
            down.transform,
            frozen=up.frozen,
            backend=up.backend,
        )


@twin_of(nn.Linear)
class Linear(DynamicModule, nn.Linear):
    """``nn.Linear`` whose bias counts towards the residual of an explanation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.probe is None or self.bias is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return y + self.offset(self.bias, y)

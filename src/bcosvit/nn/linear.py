"""Linear layers: the B-cos transform, and the ordinary one with its bias accounted for."""

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bcosvit.nn.views import DynamicModule, twin_of
from bcosvit.ops import bcos_linear, bcos_mlp
from bcosvit.ops.bcos import BcosOptions
from bcosvit.ops.dispatch import unit_rows
from bcosvit.ops.products import linear


def check_bcos(b: float, maxout: int) -> None:
    """Raises ``ValueError`` for options that no B-cos layer has; B < 1 rewards *mis*alignment."""
    if not (math.isfinite(b) and b >= 1):
        raise ValueError(f"B = {b} is not allowed: the B-cos exponent is a finite number B >= 1.")
    if not (isinstance(maxout, int) and maxout >= 1):
        raise ValueError(f"maxout = {maxout!r} is not allowed: give an integer >= 1.")


class BcosLayer(DynamicModule):
    """The base class of B-cos layers: of a unit's weight only the direction counts.

    Args:
        b: The exponent B >= 1; larger values reward alignment more.
        maxout: Units per output, of which the largest counts.
        scale: The factor γ on the output.
        eps: Added to the squared norm of the input.
    """

    weight: nn.Parameter

    prepared: bool = False
    """In a prepared view: ``weight`` has unit rows already."""

    def __init__(self, *, b: float, maxout: int, scale: float, eps: float) -> None:
        super().__init__()
        check_bcos(b, maxout)
        for name, value in (("scale", scale), ("eps", eps)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value} is not allowed: give a finite number above 0.")
        self.b = float(b)
        self.maxout = maxout
        self.scale = float(scale)
        self.eps = eps

    @property
    def options(self) -> BcosOptions:
        """What the layer does with its weight."""
        return {"b": self.b, "maxout": self.maxout, "scale": self.scale, "eps": self.eps}

    def prepare(self, dtype: torch.dtype | None) -> None:
        # No parameter any more: a prepared view is not trained.
        unit = unit_rows(self.weight).to(dtype or self.weight.dtype)
        if not unit.isfinite().all():
            raise ValueError(
                f"A weight of {type(self).__name__}({self.extra_repr()}) is not finite, or its "
                f"norm is beyond {self.weight.dtype}; give weights of a usual size."
            )
        self._parameters["weight"] = unit  # type: ignore[assignment]
        self.prepared = True

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.prepared:
            with torch.no_grad():
                self.prepare(None)

    def unit_weight(self) -> Tensor:
        """ŵ, the weight with rows of norm one."""
        return self.weight if self.prepared else unit_rows(self.weight)

    def extra_repr(self) -> str:
        return f"b={self.b:g}, maxout={self.maxout}, scale={self.scale:g}"


class BcosLinear(BcosLayer):
    """The B-cos transform γ·|cos(x, ŵ)|^(B−1)·(ŵ·x) in place of ``nn.Linear`` (the paper's Eq. 8).

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        b: The exponent B >= 1; larger values reward alignment more.
        maxout: Units per output, of which the largest counts.
        scale: The factor γ on the output.
        eps: Added to the squared norm of the input.

    Raises:
        ValueError: ``b`` or ``maxout`` is less than 1, or ``scale`` or ``eps`` is not above 0.

    Examples:
        >>> layer = BcosLinear(8, 3, maxout=2)
        >>> layer(torch.rand(5, 8)).shape
        torch.Size([5, 3])
    """

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
        super().__init__(b=b, maxout=maxout, scale=scale, eps=eps)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features * maxout, in_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor, squares: Tensor | None = None) -> Tensor:
        how: dict[str, Any] = {"frozen": self.frozen, "backend": self.backend}
        return bcos_linear(x, self.unit_weight(), **self.options, **how, squares=squares)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class BcosMLP(nn.Sequential):
    """Two B-cos transforms with nothing between them (the paper's Eq. 16).

    They are computed together unless one of them was replaced by another layer, has hooks, or has a
    ``forward`` of its own.
    """

    def __init__(self, up: BcosLinear, down: BcosLinear) -> None:
        super().__init__(up, down)

    def forward(self, x: Tensor) -> Tensor:
        layers = [layer for layer in self if is_plain_bcos(layer)]
        if len(layers) != 2 or len(self) != 2:
            return super().forward(x)  # type: ignore[no-untyped-call]
        up, down = layers
        return bcos_mlp(
            x,
            up.unit_weight(),
            down.unit_weight(),
            up.options,
            down.options,
            frozen=up.frozen,
            backend=up.backend,
        )


def is_plain_bcos(layer: nn.Module) -> TypeGuard[BcosLinear]:
    """Whether a layer is a B-cos transform, and calling it would do nothing but its op."""
    changed = "forward" in layer.__dict__ or any(getattr(layer, name) for name in _HOOKS)
    return type(layer) is BcosLinear and not changed


class LayerScale(DynamicModule):
    """A learned factor per channel, which is part of W(x).

    Args:
        width: Channels, the last axis of the input.
        start: What all factors start as; at 0 a branch begins by adding nothing.

    Examples:
        >>> LayerScale(2, 0.5)(torch.ones(1, 2))
        tensor([[0.5000, 0.5000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@twin_of(nn.Linear)
class Linear(DynamicModule, nn.Linear):
    """``nn.Linear`` whose bias counts towards the residual of an explanation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.probe is None or self.bias is None:
            return linear(x, self.weight, self.bias, frozen=self.frozen)
        y = linear(x, self.weight, frozen=self.frozen)
        return y + self.offset(self.bias, y)

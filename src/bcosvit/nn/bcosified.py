"""The layers of networks that `bcosvit.bcosify` converts.

A converted network computes what the original computes as long as ``fade`` (λ) and ``b`` are 1.
Every layer takes both as tensors: λ multiplies each additive constant, and B is the exponent of
the layers that are B-cos transforms, |cos(x, w)|^(B−1)·(w·x), whose weights are not normalized.
Tensors rather than numbers, so that a compiled training step can change them without being
compiled again.

Networks rearrange their tensors, so samples need not lie along the first axis: windows of an image
become samples of their own, and some attention puts tokens first. Each layer that adds a constant
therefore knows its ``batch_axis``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.nn.views import DynamicModule
from bcosvit.ops.dispatch import narrowed, weight_norms, wide
from bcosvit.ops.products import convolution, linear, matmul, padded, patch_sums

EPS = 1e-6
"""Added to the squared norm of an input, as in the other B-cos layers."""
SMALLEST_COSINE = 1e-20
"""Smaller cosines count as this one, so that the power has a finite slope everywhere."""


def spread(probe: Tensor, like: Tensor, axis: int) -> Tensor:
    """The ``probe`` [batch] shaped to multiply ``like``, whose ``axis`` holds the samples.

    A sample may have become several neighbors along that axis, such as the windows of an image.
    """
    # Not len(probe): a graph that is exported takes any number of images.
    repeats = like.shape[axis] // probe.shape[0]
    factors = probe if repeats == 1 else probe.repeat_interleave(repeats)
    shape = [1] * like.ndim
    shape[axis] = like.shape[axis]
    return factors.view(shape).to(like.dtype)


class Container(DynamicModule):
    """Holds the parameters and layers of one part of the original, under their names."""


class ConvertedLayer(DynamicModule):
    """What the converted layers share."""

    def __init__(self, batch_axis: int = 0) -> None:
        super().__init__()
        self.batch_axis = batch_axis

    def shifted(self, y: Tensor, constant: Tensor | None, fade: Tensor) -> Tensor:
        """``y`` plus the faded ``constant``, which counts towards the residual."""
        if constant is None:
            return y
        faded = (fade * constant).to(y.dtype)
        if self.probe is not None:
            faded = faded * spread(self.probe, y, self.batch_axis)
        return y + faded

    def aligned(self, y: Tensor, weight_norm: Tensor, input_norm: Tensor, b: Tensor) -> Tensor:
        """|cos|^(B−1)·y for y = w·x."""
        linear = wide(y)
        bound = (input_norm * weight_norm).clamp_min(torch.finfo(linear.dtype).tiny)
        cosine = (self.constant(linear).abs() / self.constant(bound)).clamp(SMALLEST_COSINE, 1.0)
        # exp(log) takes a tenth of the time of a general power, and is exactly 1 at B = 1.
        return narrowed(torch.exp((b - 1) * cosine.log()) * linear, y, frozen=self.frozen)


class WeightedLayer(ConvertedLayer):
    """A layer with a weight and a bias, of which both may be missing or be given in every call."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: list[int] | None, bias: list[int] | None, batch_axis: int = 0
    ) -> None:
        super().__init__(batch_axis)
        self.weight = None if weight is None else nn.Parameter(torch.empty(weight))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))

    def own(
        self, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weight and the bias of a call, by default the layer's own."""
        return self.weight if weight is None else weight, self.bias if bias is None else bias


class ConvertedConv(WeightedLayer):
    """A convolution of any number of dimensions, B-cos where ``bcos`` is set (2d only)."""

    def __init__(
        self,
        weight: list[int] | None,
        bias: list[int] | None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bcos: bool = False,
        batch_axis: int = 0,
    ) -> None:
        super().__init__(weight, bias, batch_axis)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups, self.bcos = groups, bcos

    def forward(
        self,
        x: Tensor,
        fade: Tensor,
        b: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        weight, bias = self.own(weight, bias)
        assert weight is not None
        if not self.bcos and self.probe is None:
            return self.convolve(x, weight, None if bias is None else fade * bias)
        y = self.transform(x, weight, b)
        return self.shifted(y, None if bias is None else bias.view(-1, *[1] * (y.ndim - 2)), fade)

    def transform(self, x: Tensor, weight: Tensor, b: Tensor) -> Tensor:
        """The layer without its constant."""
        y = self.convolve(x, weight, None)
        if self.bcos:
            norm = self.patch_norms(self.constant(x), weight)
            y = self.aligned(y, weight_norms(weight).view(-1, 1, 1), norm, b)
        return y

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        options = (self.stride, self.padding, self.dilation, self.groups)
        if self.frozen and weight.shape[1] == 1 and torch.is_autocast_enabled(x.device.type):
            # One channel per group is few multiplications: half precision would gain little.
            with torch.autocast(x.device.type, enabled=False):
                return convolution(wide(x), wide(weight), bias, *options, frozen=True)
        return convolution(x, weight, bias, *options, frozen=self.frozen)

    def patch_norms(self, x: Tensor, weight: Tensor) -> Tensor:
        """√(Σx² + ε) of every patch, [n, c, h, w] with one c for all or one per output."""
        padding = self.padding
        if isinstance(padding, str):
            x, padding = padded(x, weight, padding, self.dilation), 0
        squares = wide(x).square()
        if self.groups < x.shape[1]:
            squares = squares.unflatten(1, (self.groups, -1)).sum(2)
        if x.device.type != "cpu":
            # In plain order: see `AvgPool2d` for the CUDA kernel that this keeps away from.
            squares = squares.contiguous().flatten().view(squares.shape)
        window = {
            "stride": _pair(self.stride),
            "padding": _pair(padding),
            "dilation": _pair(self.dilation),
        }
        norm = (patch_sums(squares, _pair(weight.shape[2:]), **window) + EPS).sqrt()
        if self.groups == 1:
            return norm
        each = weight.shape[0] // self.groups
        return norm if each == 1 else norm.repeat_interleave(each, dim=1)

    def extra_repr(self) -> str:
        shape = "given" if self.weight is None else list(self.weight.shape)
        return f"weight={shape}, stride={self.stride}, padding={self.padding}, bcos={self.bcos}"


def _pair(value: Any) -> tuple[int, int]:
    values = [int(v) for v in value] if isinstance(value, tuple | list) else [int(value)]
    return (values[0], values[-1])


class ConvertedStem(ConvertedConv):
    """The first convolution, on the six channels [x, 1−x] of the encoded image.

    With W the original's weight on (x − mean)/std, ``weight`` starts as [W, −W]/(2·std). What is
    left of the mean is the constant W·(0.5 − mean)/std. Where the original pads its normalized
    input with zeros there is none of it, so it is computed by the same convolution of ``ones``,
    a map [1, 1, H, W] padded as the image was.
    """

    shift: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("shift", torch.empty(3))

    def forward(  # type: ignore[override]
        self, x: Tensor, ones: Tensor, fade: Tensor, b: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        weight = self.weight
        assert weight is not None
        y = self.transform(x, weight, b)
        color = (weight[:, :3] - weight[:, 3:]) * self.shift.view(1, 3, 1, 1)
        constant = self.convolve(ones, color.sum(1, keepdim=True), None)
        if self.bias is not None:
            constant = constant + self.bias.view(-1, 1, 1)
        return self.shifted(y, constant, fade)


class ConvertedLinear(WeightedLayer):
    """A linear layer, B-cos where ``bcos`` is set."""

    def __init__(
        self,
        weight: list[int] | None,
        bias: list[int] | None,
        bcos: bool = False,
        batch_axis: int = 0,
    ) -> None:
        super().__init__(weight, bias, batch_axis)
        self.bcos = bcos

    def forward(
        self,
        x: Tensor,
        fade: Tensor,
        b: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        weight, bias = self.own(weight, bias)
        assert weight is not None
        if not self.bcos and self.probe is None:
            faded = None if bias is None else fade * bias
            return linear(x, weight, faded, frozen=self.frozen)
        y = linear(x, weight, frozen=self.frozen)
        if self.bcos:
            norm = (wide(self.constant(x)).square().sum(-1, keepdim=True) + EPS).sqrt()
            y = self.aligned(y, weight_norms(weight), norm, b)
        return self.shifted(y, bias, fade)

    def extra_repr(self) -> str:
        shape = "given" if self.weight is None else list(self.weight.shape)
        return f"weight={shape}, bcos={self.bcos}"


class ConvertedBatchNorm(ConvertedLayer):
    """(x − λ·mean)·γ/σ + λ·β; σ is the batch's in training mode and the running one otherwise.

    Uncentered, it is x·γ/√(E[x²] + ε) + λ·β. `uncenter` moves what subtracting the mean added into
    β, and the difference between the two denominators into γ.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    running_square: Tensor

    def __init__(
        self,
        features: int,
        weight: bool = True,
        bias: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
        uncentered: bool = False,
        batch_axis: int = 0,
    ) -> None:
        super().__init__(batch_axis)
        self.eps, self.momentum, self.uncentered = eps, momentum, uncentered
        has_bias = bias or uncentered
        self.weight = nn.Parameter(torch.ones(features)) if weight or uncentered else None
        self.bias = nn.Parameter(torch.zeros(features)) if has_bias else None
        if uncentered:
            self.register_buffer("running_square", torch.ones(features))
        else:
            self.register_buffer("running_mean", torch.zeros(features))
            self.register_buffer("running_var", torch.ones(features))

    @torch.no_grad()
    def uncenter(
        self, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        """Takes over a centered norm's statistics and parameters."""
        assert self.weight is not None and self.bias is not None
        gain = torch.rsqrt(var + self.eps) * (1 if weight is None else weight)
        square = var + mean.square()
        self.running_square.copy_(square)
        self.weight.copy_(gain * torch.sqrt(square + self.eps))
        self.bias.copy_((0 if bias is None else bias) - mean * gain)

    def forward(self, x: Tensor, fade: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        if self.training:
            mean, power = self._batch_statistics(x)
        else:
            mean = None if self.uncentered else self.running_mean
            power = self.running_square if self.uncentered else self.running_var
        scale = torch.rsqrt(self.constant(power) + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        constant: Tensor | None = self.bias
        if mean is not None:
            constant = -mean * scale if constant is None else constant - mean * scale
        assert constant is not None
        if self.probe is None:
            # One pass over memory where the layer is compiled, and in float32.
            y = wide(x) * scale.view(shape) + (fade * constant).view(shape)
            return y.to(x.dtype)
        y = narrowed(wide(x) * scale.view(shape), x, frozen=self.frozen)
        return self.shifted(y, constant.view(shape), fade)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """This batch's statistics; the running ones move towards them."""
        dims = [0, *range(2, x.ndim)]
        if self.uncentered:
            square = wide(x).square().mean(dims)
            with torch.no_grad():
                self.running_square.lerp_(square.to(self.running_square.dtype), self.momentum)
            return None, square
        var, mean = torch.var_mean(wide(x), dims, correction=0)
        with torch.no_grad():
            count = x.numel() // x.shape[1]
            unbiased = var * (count / max(count - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, var

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, uncentered={self.uncentered}"


class ConvertedNorm(WeightedLayer):
    """LayerNorm, GroupNorm, InstanceNorm and RMSNorm: x, centered or not, by its own size.

    ``kind`` is "layer", "group", "instance" or "rms". Frozen, the size is a constant, subtracting
    the mean is linear, and the bias is a constant that counts towards the residual.
    """

    def __init__(
        self,
        kind: str,
        weight: list[int] | None,
        bias: list[int] | None,
        eps: float,
        dims: int = 1,
        groups: int = 1,
        batch_axis: int = 0,
    ) -> None:
        super().__init__(weight, bias, batch_axis)
        self.kind, self.eps, self.dims, self.groups = kind, eps, dims, groups

    def forward(
        self, x: Tensor, fade: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        weight, bias = self.own(weight, bias)
        groups = x.shape[1] if self.kind == "instance" else self.groups
        if not self.frozen:
            faded = None if bias is None else fade * bias
            if self.kind == "layer":
                return F.layer_norm(x, x.shape[x.ndim - self.dims :], weight, faded, self.eps)
            if self.kind == "rms":
                return F.rms_norm(x, list(x.shape[x.ndim - self.dims :]), weight, self.eps)
            return F.group_norm(x, groups, weight, faded, self.eps)
        y, dims = wide(x), list(range(-self.dims, 0))
        by_group = self.kind in ("group", "instance")
        if by_group:
            y, dims = y.unflatten(1, (groups, -1)), list(range(2, x.ndim + 1))
        if self.kind != "rms":
            y = y - y.mean(dims, keepdim=True)
        y = y * torch.rsqrt(self.constant(y).square().mean(dims, keepdim=True) + self.eps)
        y = y.flatten(1, 2) if by_group else y
        if by_group:
            shape = (-1, *[1] * (x.ndim - 2))
            weight = None if weight is None else weight.view(shape)
            bias = None if bias is None else bias.view(shape)
        y = self.shifted(y if weight is None else y * weight, bias, fade)
        return narrowed(y, x, frozen=True)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, eps={self.eps:g}"


class Constant(ConvertedLayer):
    """An additive constant of the network, such as a positional embedding or a class token."""

    def forward(self, constant: Tensor | float, like: Tensor, fade: Tensor) -> Tensor:
        if not isinstance(constant, Tensor):
            constant = torch.full((), constant, dtype=like.dtype, device=like.device)
        faded = constant * fade.to(constant.dtype)
        return faded if self.probe is None else faded * spread(self.probe, like, self.batch_axis)


class Freeze(DynamicModule):
    """Where a tensor leaves the path of the image for a gate or for attention."""

    def forward(self, x: Tensor) -> Tensor:
        return self.constant(x)


class Normalize(ConvertedLayer):
    """The three channels (x − mean)/std that the original takes, from the six of [x, 1−x]."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(3))
        self.register_buffer("std", torch.empty(3))

    def forward(self, encoded: Tensor, fade: Tensor) -> Tensor:
        shape = (1, 3, 1, 1)
        difference = (encoded[:, :3] - encoded[:, 3:]) / (2 * self.std).view(shape)
        return self.shifted(difference, ((0.5 - self.mean) / self.std).view(shape), fade)


class Ones(DynamicModule):
    """A map [1, 1, H, W] of ones as large as the image, for a `ConvertedStem`."""

    def forward(self, encoded: Tensor) -> Tensor:
        return encoded.new_ones(1, 1, *encoded.shape[2:])


class AveragePool(DynamicModule):
    """``F.avg_pool2d``, kept away from the CUDA kernel whose gradient is wrong, as `AvgPool2d`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = x.is_cuda and x.requires_grad
        return F.avg_pool2d(x.contiguous() if moved else x, *args, **kwargs)


class ConvertedAttention(DynamicModule):
    """Attention whose matrix is a constant of a frozen view, so that it is linear in the values."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.frozen:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        # An explicit matrix: fused attention cannot give several rows of W(x) at once.
        query, key = self.constant(query), self.constant(key)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = matmul(query, key.transpose(-2, -1), frozen=True) * scale
        if is_causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        if attn_mask is not None:
            mask = self.constant(attn_mask)
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + mask
        return matmul(scores.softmax(-1).to(value.dtype), value, frozen=True)


Gate = Callable[..., Tensor]


def _ratio(function: Callable[..., Tensor]) -> Gate:
    """f(x)/x of a function with f(0) = 0, and its slope where x is 0."""

    def gate(x: Tensor, **options: Any) -> Tensor:
        nonzero = torch.where(x == 0, torch.finfo(x.dtype).tiny ** 0.5, x)
        return function(nonzero, **options) / nonzero

    return gate


def _gelu_gate(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x * 0.5**0.5))
    return 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Gate]] = {
    "gelu": (F.gelu, _gelu_gate),
    "silu": (F.silu, torch.sigmoid),
    "mish": (F.mish, lambda x: torch.tanh(F.softplus(x))),
    "hardswish": (F.hardswish, F.hardsigmoid),
    "hardtanh": (F.hardtanh, _ratio(F.hardtanh)),
    "clamp": (torch.clamp, _ratio(torch.clamp)),
    "elu": (F.elu, _ratio(F.elu)),
    "celu": (F.celu, _ratio(F.celu)),
    "selu": (F.selu, _ratio(F.selu)),
    "tanh": (torch.tanh, _ratio(torch.tanh)),
    "softsign": (F.softsign, _ratio(F.softsign)),
    "hardshrink": (F.hardshrink, _ratio(F.hardshrink)),
    "softshrink": (F.softshrink, _ratio(F.softshrink)),
}
"""Functions with f(0) = 0 and their gates g with f(x) = g(x)·x, by name."""


class Activation(DynamicModule):
    """f(x) = g(x)·x, where the gate g(x) is a constant of a frozen view."""

    def __init__(self, function: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.function, self.options = function, options or {}

    def forward(self, x: Tensor) -> Tensor:
        function, gate = ACTIVATIONS[self.function]
        if not self.frozen:
            return function(x, **self.options)
        return x * gate(self.constant(x), **self.options)

    def extra_repr(self) -> str:
        return ", ".join([self.function, *(f"{k}={v}" for k, v in self.options.items())])


LAYERS: dict[str, type[DynamicModule]] = {
    layer.__name__: layer
    for layer in (
        *(Container, ConvertedConv, ConvertedStem, ConvertedLinear, ConvertedBatchNorm),
        *(ConvertedNorm, ConvertedAttention, AveragePool, Constant, Freeze, Normalize, Ones),
        Activation,
    )
}
"""The classes that a converted network is made of, by name."""

"""EfficientNet-lite2 twice, channels last: as published (the teacher) and bcosified (the student).

Both take the encoded patches of the stem, which `patches` makes of images, and return logits [n,
1000] and the feature maps after all stages but the first. With ``t = 0`` and ``fade = 1`` the
student computes what the teacher does, up to the border of the stem. Training raises ``t`` to 1,
which makes all dense layers B-cos transforms with B = 2 and puts a binomial filter before all
strides, and lowers ``fade`` to 0, which removes all additive constants.

A student may have B-cos transformer blocks between its last stage and its head, which makes it a
ViT whose tokenizer are the stages. Every block starts as the identity.

Shapes: n images, h × w positions, c channels, k × k kernels; t tokens of width d.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from depthwise_triton import depthwise
from efficientnet import EfficientNetConfig, same_padding
from torch import Tensor, nn

EPS = 1e-3  # of all batch norms
STEM_KERNEL = 5  # 3 in the teacher; a binomial filter makes it 5
State = Mapping[str, Tensor]
"""The state dict of `efficientnet.EfficientNet`."""


class BlockShape(NamedTuple):
    """The channels, kernel and stride of an inverted residual block."""

    inputs: int
    inner: int
    outputs: int
    kernel: int
    stride: int

    @property
    def residual(self) -> bool:
        return self.stride == 1 and self.inputs == self.outputs


def _layout() -> tuple[list[BlockShape], list[int]]:
    config = EfficientNetConfig()
    blocks, ends, width = [], [], config.stem_width
    for stage in config.stages():
        for i in range(stage.repeats):
            inner, stride = width * stage.expansion, stage.stride if i == 0 else 1
            blocks.append(BlockShape(width, inner, stage.width, stage.kernel, stride))
            width = stage.width
        ends.append(len(blocks) - 1)
    return blocks, ends[1:]


BLOCKS, STAGE_ENDS = _layout()
"""All blocks, and the last block of every stage but the first."""


def encode(images: Tensor) -> Tensor:
    """Images [n, 3, h, w] in [0, 1] as [n, 6, h, w]: the colors and their complements."""
    return torch.cat([images, 1 - images], 1)


def patches(encoded: Tensor) -> Tensor:
    """The patches [n, h/2, w/2, 5·5·6] of encoded images on which the stem is a linear layer."""
    k = STEM_KERNEL
    y, x = (same_padding(size, k, 2) for size in encoded.shape[2:])
    padded = F.pad(encoded.permute(0, 2, 3, 1), (0, 0, *x, *y))
    found = padded.unfold(1, k, 2).unfold(2, k, 2).permute(0, 1, 2, 4, 5, 3)
    return found.reshape(*found.shape[:3], -1)


def _stem(state: State) -> tuple[Tensor, Tensor]:
    """The stem's kernels for the encoding, [32, 6, 3, 3], and the constant that they add.

    The teacher's input is (255x − 127)/128 = 255/256·(x − (1 − x)) + 1/256.
    """
    weight = state["conv_stem.weight"].double()
    return torch.cat([weight, -weight], 1) * (255 / 256), weight.sum((1, 2, 3)) / 256


def _statistics(state: State, name: str) -> list[Tensor]:
    names = ("weight", "bias", "running_mean", "running_var")
    return [state[f"{name}.{each}"].double() for each in names]


class Teacher(nn.Module):
    """The published network in evaluation mode, with its batch norms folded into its layers.

    Args:
        state: The weights of an EfficientNet-lite2.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        kernels, constant = _stem(state)
        kernels = F.pad(kernels, ((STEM_KERNEL - 3) // 2,) * 4)
        self._add("stem", kernels.permute(0, 2, 3, 1).flatten(1), state, "bn0", constant)
        for i, block in enumerate(BLOCKS):
            name = f"blocks.{i}."
            layers = [("depthwise", "bn1"), ("project", "bn2")]
            if block.inner != block.inputs:
                layers.insert(0, ("expand", "bn0"))
            for layer, norm in layers:
                weight = state[f"{name}{layer}_conv.weight"].flatten(1)
                self._add(f"{layer}{i}", weight, state, name + norm)
        self._add("head", state["conv_head.weight"].flatten(1), state, "bn1")
        self.register_buffer("fc_weight", state["fc.weight"].float())
        self.register_buffer("fc_bias", state["fc.bias"].float())

    def _add(
        self, name: str, weight: Tensor, state: State, norm: str, constant: Tensor | float = 0.0
    ) -> None:
        gain, bias, mean, variance = _statistics(state, norm)
        scale = gain / (variance + EPS).sqrt()
        weight = weight.double() * scale[:, None]
        if name.startswith("depthwise"):
            weight = weight.t()
        self.register_buffer(f"{name}_weight", weight.contiguous().float())
        self.register_buffer(f"{name}_bias", (bias + (constant - mean) * scale).float())

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return F.linear(x, weight.to(x.dtype)) + bias.to(x.dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        features = []
        x = self._linear("stem", x).clamp(0, 6)
        for i, block in enumerate(BLOCKS):
            y = x
            if block.inner != block.inputs:
                y = self._linear(f"expand{i}", y).clamp(0, 6)
            weight, bias = (
                getattr(self, f"depthwise{i}_weight"),
                getattr(self, f"depthwise{i}_bias"),
            )
            y = depthwise(y, weight, block.kernel, block.stride) + bias.to(x.dtype)
            y = self._linear(f"project{i}", y.clamp(0, 6))
            x = x + y if block.residual else y
            if i in STAGE_ENDS:
                features.append(x)
        x = self._linear("head", x).clamp(0, 6)
        return F.linear(x.float().mean((1, 2)), self.fc_weight, self.fc_bias), features


class UncenteredNorm(nn.Module):
    """A batch norm that subtracts no mean, plus ``fade`` times the original's constant.

    Args:
        state: The weights of the network.
        name: The original batch norm.
        constant: What the layer before it added in the original and does not add here.
    """

    def __init__(self, state: State, name: str, constant: Tensor | float = 0.0) -> None:
        super().__init__()
        gain, bias, mean, variance = _statistics(state, name)
        mean = mean - constant
        sigma, square = (variance + EPS).sqrt(), variance + mean * mean
        self.gain = nn.Parameter((gain * (square + EPS).sqrt() / sigma).float())
        self.register_buffer("constant", (bias - mean * gain / sigma).float())
        self.register_buffer("mean_square", square.float())

    def forward(self, y: Tensor, fade: Tensor) -> Tensor:
        square = self.mean_square
        if self.training:
            square = y.square().mean((0, 1, 2))
            self.mean_square.lerp_(square.detach(), 0.02)
        return y * (self.gain * torch.rsqrt(square + EPS)) + fade * self.constant


def relu6(x: Tensor, frozen: bool) -> Tensor:
    """ReLU6; frozen, its gradient is its factor, as exact explanations need it."""
    if not frozen:
        return x.clamp(0, 6)
    return x * (x.clamp(0, 6) / torch.where(x == 0, 1.0, x)).detach()


class Bcos(nn.Module):
    """A linear layer that becomes a B-cos transform: y·(1 − t + t·|cos|/reference).

    With t = 1 this is B = 2 without normalized weights. The reference keeps the energy of the
    output, so that the layers behind it see what they are used to.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().contiguous())
        self.register_buffer("reference", torch.tensor(1.0))

    def forward(self, x: Tensor, t: Tensor, frozen: bool, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        y = F.linear(x, weight.to(x.dtype)).float()
        norm = torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
        cos = y.abs() * norm * torch.rsqrt(weight.float().square().sum(1) + 1e-12)
        if frozen:
            cos = cos.detach()
        return y * ((1 - t) + (t / self.reference) * cos)


def widen(weight: Tensor, t: Tensor) -> Tensor:
    """Kernels [k, k, ...] followed by a binomial filter that grows with t: [k + 2, k + 2, ...].

    With t = 1 the filter is (1, 2, 1)/4 along both axes.
    """
    side, middle = t / 4, 1 - t / 2
    rest = [0, 0] * (weight.dim() - 2)
    p = F.pad(weight, [*rest, 0, 0, 2, 2])
    weight = side * p[:-2] + middle * p[1:-1] + side * p[2:]
    p = F.pad(weight, [*rest, 2, 2])
    return side * p[:, :-2] + middle * p[:, 1:-1] + side * p[:, 2:]


class Block(nn.Module):
    """An inverted residual block of the student."""

    def __init__(self, state: State, name: str, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.inner != shape.inputs:
            self.expand = Bcos(state[f"{name}.expand_conv.weight"].flatten(1))
            self.expand_norm = UncenteredNorm(state, f"{name}.bn0")
        kernels = state[f"{name}.depthwise_conv.weight"].flatten(1)
        self.depthwise = nn.Parameter(kernels.t().contiguous().float())
        self.depthwise_norm = UncenteredNorm(state, f"{name}.bn1")
        self.project = Bcos(state[f"{name}.project_conv.weight"].flatten(1))
        self.project_norm = UncenteredNorm(state, f"{name}.bn2")

    def kernels(self, t: Tensor) -> tuple[Tensor, int]:
        """The kernels of the depthwise convolution [k·k, c], and k."""
        k = self.shape.kernel
        if self.shape.stride == 1:
            return self.depthwise, k
        return widen(self.depthwise.reshape(k, k, -1), t).flatten(0, 1), k + 2

    def forward(self, x: Tensor, t: Tensor, fade: Tensor, frozen: bool) -> Tensor:
        dtype, y = x.dtype, x
        if self.shape.inner != self.shape.inputs:
            y = self.expand_norm(self.expand(y, t, frozen), fade)
            y = relu6(y, frozen).to(dtype)
        kernels, k = self.kernels(t)
        y = depthwise(y, kernels, k, self.shape.stride).float()
        y = relu6(self.depthwise_norm(y, fade), frozen).to(dtype)
        y = self.project_norm(self.project(y, t, frozen), fade).to(dtype)
        return x + y if self.shape.residual else y


@dataclass(frozen=True)
class TransformerShape:
    """The transformer blocks of a student; the options of the library's B-cos ViT."""

    depth: int = 0
    tokens: int = 352
    """The width of the tokens, which is that of the last stage."""
    width: int = 192
    """The width of attention."""
    num_heads: int = 6
    hidden: int = 768
    """The width of the MLP between its layers."""
    grid: int = 7
    """The rows and columns of tokens in images of 224 pixels, the largest that a prior covers."""
    gain: float = 200.0
    """The factor on all layers is this over the root of their inputs. With 200, what a new block
    adds before its factors is about as large as its tokens."""


class UnitBcos(nn.Module):
    """The library's B-cos transform: weights of norm one, B = 2, the larger of two units."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(2 * outputs, inputs)))
        self.scale = gain / inputs**0.5

    def forward(self, x: Tensor, frozen: bool) -> Tensor:
        units = F.linear(x, F.normalize(self.weight).to(x.dtype)).unflatten(-1, (-1, 2)).float()
        y = torch.maximum(units[..., 0], units[..., 1])
        cos = y.abs() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
        if frozen:
            cos = cos.detach()
        return (self.scale * y * cos).to(x.dtype)


class TransformerBlock(nn.Module):
    """Attention and an MLP of B-cos transforms; each adds to its tokens, times learned factors.

    The factors start at 0. Attention has a prior that depends on the distance of two tokens. Its
    heads start with different reach, the first reading hardly more than the token itself.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape, tokens, width = shape, shape.tokens, shape.width
        self.norm = nn.LayerNorm(tokens)
        self.query, self.key = nn.Linear(tokens, width), nn.Linear(tokens, width)
        self.value = UnitBcos(tokens, width, shape.gain)
        self.project = UnitBcos(width, tokens, shape.gain)
        self.attention_scale = nn.Parameter(torch.zeros(tokens))
        self.up = UnitBcos(tokens, shape.hidden, shape.gain)
        self.down = UnitBcos(shape.hidden, tokens, shape.gain)
        self.mlp_scale = nn.Parameter(torch.zeros(tokens))
        apart = torch.arange(1.0 - shape.grid, shape.grid) ** 2
        square = apart[:, None] + apart[None, :]
        reach = 0.5 * 8 ** torch.linspace(0, 1, shape.num_heads)  # 0.5 to 4 tokens
        self.prior = nn.Parameter(-square / (2 * reach[:, None, None] ** 2))

    def prior_logits(self, rows: int, columns: int) -> Tensor:
        """The prior over pairs of tokens [heads, t, t]; far pairs of large grids share entries."""
        last = self.shape.grid - 1
        y = torch.arange(rows, device=self.prior.device)
        x = torch.arange(columns, device=self.prior.device)
        y = (y[None, :] - y[:, None]).clamp(-last, last) + last  # [query, key]
        x = (x[None, :] - x[:, None]).clamp(-last, last) + last
        table = self.prior[:, y[:, None, :, None], x[None, :, None, :]]
        return table.reshape(-1, rows * columns, rows * columns)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, prior: Tensor, frozen: bool) -> Tensor:
        dtype = x.dtype
        known = x.detach() if frozen else x
        known = self.norm(known.float()).to(dtype)
        q, k = (
            self._split(F.linear(known, layer.weight.to(dtype), layer.bias.to(dtype)))
            for layer in (self.query, self.key)
        )
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
        matrix = (scores + prior).softmax(-1).to(dtype)
        mixed = matrix @ self._split(self.value(x, frozen))
        added = self.project(mixed.transpose(1, 2).flatten(2), frozen)
        x = x + self.attention_scale.to(dtype) * added
        return x + self.mlp_scale.to(dtype) * self.down(self.up(x, frozen), frozen)


class Student(nn.Module):
    """The network on its way from the teacher to a B-cos network; it starts from the teacher.

    Args:
        state: The weights of an EfficientNet-lite2.
        transformer: The transformer blocks before its head; none by default.
    """

    def __init__(self, state: State, transformer: TransformerShape | None = None) -> None:
        super().__init__()
        self.register_buffer("t", torch.tensor(0.0))
        self.register_buffer("fade", torch.tensor(1.0))
        kernels, constant = _stem(state)
        self.stem_norm = norm = UncenteredNorm(state, "bn0", constant)
        with torch.no_grad():
            # x + (1 - x) = 1: the stem's constant is a linear function of the encoding.
            mean, variance = _statistics(state, "bn0")[2:]
            square, gain = norm.mean_square.double(), norm.gain.double()
            shift = norm.constant.double() * (square + EPS).sqrt() / gain
            kernels = kernels + shift[:, None, None, None] / 27
            moved = variance + (mean - constant - shift) ** 2
            norm.gain.copy_(gain * ((moved + EPS) / (square + EPS)).sqrt())
            norm.mean_square.copy_(moved)
            norm.constant.zero_()
        self.stem = Bcos(kernels.permute(0, 2, 3, 1).flatten(1))
        self.blocks = nn.ModuleList(
            Block(state, f"blocks.{i}", shape) for i, shape in enumerate(BLOCKS)
        )
        self.transformer = transformer or TransformerShape()
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(self.transformer) for _ in range(self.transformer.depth)
        )
        self.head = Bcos(state["conv_head.weight"].flatten(1))
        self.head_norm = UncenteredNorm(state, "bn1")
        self.fc = Bcos(state["fc.weight"])
        self.register_buffer("fc_constant", state["fc.bias"].float().clone())

    def stem_weight(self) -> Tensor:
        """The stem's weight [32, 5·5·6] on patches."""
        return widen(self.stem.weight.t().reshape(3, 3, 6, -1), self.t).flatten(0, 2).t()

    def forward(self, x: Tensor, frozen: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Computes logits and features of patches.

        Args:
            x: What `patches` returns.
            frozen: Whether the gradient of a logit is the row of the matrix W(x) that explains it
                (with t = 1 and fade = 0).
        """
        dtype, t, fade = x.dtype, self.t, self.fade
        features = []
        x = self.stem_norm(self.stem(x, t, frozen, self.stem_weight()), fade)
        x = relu6(x, frozen).to(dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, t, fade, frozen)
            if i in STAGE_ENDS:
                features.append(x)
        if self.transformer_blocks:
            rows, columns = x.shape[1:3]
            x = x.flatten(1, 2)
            for block in self.transformer_blocks:
                x = block(x, block.prior_logits(rows, columns), frozen)
            x = x.unflatten(1, (rows, columns))
        x = relu6(self.head_norm(self.head(x, t, frozen), fade), frozen).to(dtype)
        return self.fc(x, t, frozen).mean((1, 2)) + fade * self.fc_constant, features

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Sets the reference cosines of all layers on patches of a few photographs."""

        def measure(module: Bcos, args: tuple[Any, ...], output: Tensor) -> None:
            x, weight = args[0].float(), args[3] if len(args) > 3 else module.weight
            y = F.linear(x, weight.float())
            lengths = (x.norm(dim=-1, keepdim=True) + 1e-6, weight.norm(dim=1).clamp(min=1e-6))
            cos = (y / lengths[0] / lengths[1]).abs()
            if module is self.fc:  # the logit of the top class counts
                top = y.mean((1, 2), keepdim=True).argmax(-1, keepdim=True)
                top = top.expand(*y.shape[:3], 1)
                y, cos = y.gather(-1, top).clamp(min=0), cos.gather(-1, top)
                module.reference.copy_((y * cos).sum() / y.sum())
            else:
                module.reference.copy_(((y * cos).square().sum() / y.square().sum()).sqrt())

        layers = [module for module in self.modules() if isinstance(module, Bcos)]
        hooks = [layer.register_forward_hook(measure) for layer in layers]
        training = self.training
        self.eval()(x)
        self.train(training)
        for hook in hooks:
            hook.remove()

"""DenseNets: the B-cos ones of the paper and its sequel, and torchvision's.

Module names follow torchvision's DenseNet, so published state dicts load by their own keys.
``features`` can stop after any dense block: a tokenizer's backbone is the same network, cut.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from bcosvit.models.base import Classifier, LogitLayer
from bcosvit.models.config import DenseNetConfig
from bcosvit.models.registry import register_model
from bcosvit.nn.conv import BcosConv2d
from bcosvit.nn.encoding import BcosEncoding, ImageNetEncoding
from bcosvit.nn.norm import AvgPool2d, BatchNormUncentered2d
from bcosvit.ops.dispatch import computed_in

VARIANTS = {"bcos_densenet121": {"flavor": "v1"}, "densenet121": {"flavor": "conventional"}}


class DenseLayer(nn.Module):
    """1×1 then 3×3 convolution on everything the block has computed so far."""

    def __init__(self, width: int, config: DenseNetConfig) -> None:
        super().__init__()
        inner = config.bottleneck * config.growth
        self.norm1 = _norm(width, config)
        self.conv1 = _conv(width, inner, 1, config)
        self.norm2 = _norm(inner, config)
        self.conv2 = _conv(inner, config.growth, 3, config, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.norm2(self.conv1(self.norm1(x))))


class DenseBlock(nn.ModuleDict):
    """Layers whose outputs are appended to their input."""

    def __init__(self, width: int, layers: int, config: DenseNetConfig) -> None:
        super().__init__()
        for i in range(layers):
            self[f"denselayer{i + 1}"] = DenseLayer(width + i * config.growth, config)

    def forward(self, x: Tensor) -> Tensor:
        if not _writes_in_place(x, self):
            for layer in self.values():
                x = torch.cat([x, layer(x)], dim=1)
            return x
        # Nothing is differentiated: every layer's output is written where the next ones read it.
        first = self["denselayer1"]
        assert isinstance(first, DenseLayer)
        growth = first.conv2.out_channels
        width = x.shape[1]
        shape = (len(x), width + len(self) * growth, *x.shape[2:])
        # A position's channels lie side by side, as the kernels read them.
        layout = torch.channels_last
        out = torch.empty(shape, dtype=computed_in(x), device=x.device, memory_format=layout)
        out[:, :width] = x
        for layer in self.values():
            out[:, width : width + growth] = layer(out[:, :width])
            width += growth
        return out


def _writes_in_place(x: Tensor, block: nn.Module) -> bool:
    """Whether nothing but the block's result is wanted: by autograd, or by a captured graph.

    On a CPU oneDNN would copy the slices that layers read, as concatenating does.
    """
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    asked = x.requires_grad or any(p.requires_grad for p in block.parameters())
    return not (torch.is_grad_enabled() and asked)


def dense_features(config: DenseNetConfig, tap: int | None = None) -> nn.Sequential:
    """The convolutional part; with ``tap`` it ends with that dense block's output."""
    if config.flavor == "conventional":
        return _torchvision_features(config, tap)
    width = config.stem_width
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv0"] = _conv(6, width, 7, config, stride=2, padding=3)
    parts["norm0"] = _norm(width, config)
    parts["pool0"] = AvgPool2d(3, stride=2, padding=1)
    for block, layers in enumerate(config.blocks, start=1):
        parts[f"denseblock{block}"] = DenseBlock(width, layers, config)
        width += layers * config.growth
        if block == tap:
            return nn.Sequential(parts)
        if block < len(config.blocks):
            transition: OrderedDict[str, nn.Module] = OrderedDict()
            transition["norm"] = _norm(width, config)
            transition["conv"] = _conv(width, width // 2, 1, config)
            transition["pool"] = AvgPool2d(2, stride=2)
            parts[f"transition{block}"] = nn.Sequential(transition)
            width //= 2
    parts["norm5"] = _norm(width, config)
    return nn.Sequential(parts)


class DenseHead(nn.Module):
    """What a B-cos DenseNet computes behind a dense block, from its map [n, c, h, w] to [n, k].

    Args:
        config: The DenseNet.
        tap: The number of the block.
    """

    def __init__(self, config: DenseNetConfig, tap: int) -> None:
        super().__init__()
        front = {name for name, _ in dense_features(config, tap).named_children()}
        parts = dense_features(config).named_children()
        self.features = nn.Sequential(
            OrderedDict((name, part) for name, part in parts if name not in front)
        )
        self.classifier = _conv(config.width_at(len(config.blocks)), config.num_classes, 1, config)

    def forward(self, features: Tensor) -> Tensor:
        return self.from_head_inputs(self.features(features))

    def from_head_inputs(self, inputs: Tensor) -> Tensor:
        """The same from what ``features`` returns."""
        logits: Tensor = self.classifier(inputs).mean((2, 3))
        return logits


@register_model("densenet", DenseNetConfig, variants=VARIANTS)
class DenseNet(Classifier[DenseNetConfig]):
    """A DenseNet with its classifier, which is what tokenizers are pretrained as.

    Args:
        config: What it is made of.

    Examples:
        >>> model = DenseNet(DenseNetConfig(flavor="v2", blocks=(1, 1), num_classes=2))
        >>> model(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 2])
    """

    head_name = "classifier"

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__()
        width = config.width_at(len(config.blocks))
        self.config = config
        self.classifier: nn.Module
        if config.flavor == "conventional":
            self.encoding = ImageNetEncoding()
            self.features = dense_features(config)
            self.classifier = nn.Linear(width, config.num_classes)
        else:
            self.encoding = BcosEncoding()
            self.features = dense_features(config)
            self.classifier = _conv(width, config.num_classes, 1, config)
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)

    def from_encoded(self, encoded: Tensor) -> Tensor:
        return self.from_head_inputs(self.head_inputs(encoded))

    def head_inputs(self, encoded: Tensor) -> Tensor:
        features = self.features(encoded)
        if self.config.flavor == "conventional":
            features = features.relu().mean((2, 3))
        return features

    def from_head_inputs(self, inputs: Tensor) -> Tensor:
        logits = self.classifier(inputs)
        # B-cos models classify every position, then average (as the authors' do).
        return self.logit(logits if logits.ndim == 2 else logits.mean((2, 3)))

    def forward_features(self, images: Tensor) -> Tensor:
        return self.features(self.encoding(images))

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        maps, x = [], self.encoding(images)
        for name, part in self.features.named_children():
            x = part(x)
            if f"features.{name}" in self.config.feature_info.modules:
                maps.append(x)
        return maps


def _conv(
    inputs: int,
    outputs: int,
    kernel: int,
    config: DenseNetConfig,
    stride: int = 1,
    padding: int = 0,
) -> BcosConv2d:
    """A B-cos convolution of the flavor: v1 has MaxOut 2 and γ = 100/√c, v2 neither."""
    v1 = config.flavor == "v1"
    return BcosConv2d(
        inputs,
        outputs,
        kernel,
        stride=stride,
        padding=padding,
        maxout=2 if v1 else 1,
        scale=100 / (kernel**2 * inputs) ** 0.5 if v1 else 1.0,
    )


def _norm(width: int, config: DenseNetConfig) -> nn.Module:
    return BatchNormUncentered2d(width) if config.flavor == "v2" else nn.Identity()


def _torchvision_features(config: DenseNetConfig, tap: int | None) -> nn.Sequential:
    from bcosvit._torchvision import torchvision

    features: nn.Sequential = torchvision.models.DenseNet(
        growth_rate=config.growth,
        block_config=config.blocks,
        num_init_features=config.stem_width,
        bn_size=config.bottleneck,
    ).features
    if tap is None:
        return features
    names = [name for name, _ in features.named_children()]
    kept = names[: names.index(f"denseblock{tap}") + 1]
    return nn.Sequential(OrderedDict((name, getattr(features, name)) for name in kept))

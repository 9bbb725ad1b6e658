"""The B-cos vision transformer and its conventional counterpart.

Both are tokenizer → (embedding) → blocks → average pooling → head → logits; they differ in what
the parts are made of. Letters: n batch, t tokens, d width.
"""

import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bcosvit.models import taps
from bcosvit.models.base import Classifier, LogitLayer
from bcosvit.models.config import BcosifiedConfig, DenseNetConfig, ModelConfig, StemConfig
from bcosvit.models.densenet import DenseHead, dense_features
from bcosvit.models.network import Network, Program
from bcosvit.models.registry import register_model
from bcosvit.models.weights import load_state
from bcosvit.nn.attention import Attention
from bcosvit.nn.conv import BcosConv2d
from bcosvit.nn.encoding import BcosEncoding, ImageNetEncoding
from bcosvit.nn.linear import BcosLinear, BcosMLP, LayerScale, Linear
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.prior import AttentionPrior, PositionalEmbedding, resize_embedding, resize_pairs
from bcosvit.ops.bcos import BcosOptions
from bcosvit.ops.dispatch import wide

FAMILIES = {"bcos_vit": "bcos", "vit": "conventional"}
SIZES = {
    "ti": {"width": 192, "num_heads": 3},
    "s": {"width": 384, "num_heads": 6},
    "b": {"width": 768, "num_heads": 12},
}
TAPS = {"13": 1, "38": 2, "87": 3}
VARIANTS = {
    f"{family}_{size}_{tap}": {"family": FAMILIES[family], **SIZES[size], "tap": TAPS[tap]}
    for family, size, tap in product(FAMILIES, SIZES, TAPS)
} | {
    f"bcos_vit_{size}": {"family": "bcos", **SIZES[size], "keep_head": True, "layer_scale": 0.0}
    for size in SIZES
}
"""The paper's, and one per size that takes any B-cos network as its ``backbone``."""


class Tokenizer(nn.Module):
    """From an encoded image [n, c, h, w] to tokens [n, t, d] (the paper's Sec. 3.2).

    Convolutional features are cut into tokens by one more convolution. The backbone is frozen
    unless the config says otherwise.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bcos, backbone, patch = config.family == "bcos", config.backbone, config.patch
        self.backbone: nn.Module
        if isinstance(backbone, DenseNetConfig):
            self.backbone = dense_features(backbone, config.block)
        elif isinstance(backbone, StemConfig):
            self.backbone = _bcos_stem(backbone, config) if bcos else _conv_stem(backbone.widths)
        else:
            program = Program(**backbone.program)
            self.backbone = Network(taps.front(program, taps.named(program, str(config.tap))))
            self.backbone.reset_parameters()
        width = config.feature_width
        self.feature_scale = config.feature_scale
        self.patches: nn.Module
        if config.keep_head:
            self.patches = nn.Identity()
        elif bcos:
            options = bcos_options(config, width * patch**2)
            self.patches = BcosConv2d(width, config.width, patch, stride=patch, **options)
        else:
            self.patches = nn.Conv2d(width, config.width, patch, patch)
        self.trains_backbone = bool(config.train_backbone)
        self.backbone.requires_grad_(self.trains_backbone)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Tokenizer":
        super().train(mode)
        # A frozen backbone keeps its running statistics too.
        self.backbone.train(mode and self.trains_backbone)
        return self

    def forward(self, encoded: Tensor) -> Tensor:
        return self.from_features(self.backbone(encoded))

    def from_features(self, features: Tensor) -> Tensor:
        """Tokens from the backbone's features, which a frozen backbone need compute only once."""
        tokens: Tensor = self.patches(self.feature_scale * features)
        # All that follows keeps this order in memory.
        return tokens.flatten(2).transpose(1, 2).contiguous()


class GeluMLP(nn.Module):
    """LayerNorm, then two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.up = Linear(width, hidden)
        self.act = nn.GELU()
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(self.norm(x))))
        return y


class Block(nn.Module):
    """Attention and MLP, each with its skip connection (the paper's Eq. 14 and 16).

    ``attention_scale`` and ``mlp_scale`` are learned factors where the config has them.
    """

    def __init__(
        self, attention: Attention, mlp: nn.Module, width: int, layer_scale: float | None
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_scale = _layer_scale(width, layer_scale)
        self.mlp = mlp
        self.mlp_scale = _layer_scale(width, layer_scale)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention_scale(self.attention(tokens))
        tokens = tokens + self.mlp_scale(self.mlp(tokens))
        return tokens


def _layer_scale(width: int, start: float | None) -> nn.Module:
    return nn.Identity() if start is None else LayerScale(width, start)


@register_model("vit", ModelConfig, variants=VARIANTS)
class VisionTransformer(Classifier[ModelConfig]):
    """A vision transformer; where its family is B-cos, logits = W(x)·x + residual + bias, exactly.

    Args:
        config: What it is made of.

    Examples:
        >>> model = VisionTransformer(ModelConfig(depth=1, num_classes=2, backbone=StemConfig()))
        >>> model(torch.rand(1, 3, 224, 224)).shape
        torch.Size([1, 2])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bcos = config.family == "bcos"
        tokens = config.grid[0] * config.grid[1]
        self.config = config
        self.encoding = BcosEncoding() if bcos else ImageNetEncoding()
        self.tokenizer = Tokenizer(config)
        self.position: nn.Module = (
            PositionalEmbedding(tokens, config.token_width)
            if config.position == "emb"
            else nn.Identity()
        )
        self.blocks = nn.Sequential(*(_block(config, tokens) for _ in range(config.depth)))
        # B-cos blocks have no norm to undo; conventional ones need a last one before the head.
        self.norm: nn.Module = nn.Identity() if bcos else LayerNorm(config.width)
        self.head = _head(config)
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)
        if not bcos:
            _init_transformer(self)
        self.train(self.training)

    def train(self, mode: bool = True) -> "VisionTransformer":
        super().train(mode)
        if self.config.keep_head:
            # It is trained, but the norms of a frozen backbone keep their statistics in it, too.
            self.head.train(mode and self.tokenizer.trains_backbone)
        return self

    def from_encoded(self, encoded: Tensor) -> Tensor:
        self._check_size(encoded)
        return self.from_features(self.tokenizer.backbone(encoded))

    def tokens(self, images: Tensor) -> Tensor:
        """The tokens [n, t, d] that enter the transformer, before any positional embedding."""
        encoded = self.encoding(images)
        self._check_size(encoded)
        return self.tokenizer(encoded)

    def from_features(self, features: Tensor) -> Tensor:
        """Logits from the backbone's features."""
        patch = self.config.patch
        grid = (features.shape[-2] // patch, features.shape[-1] // patch)
        return self.from_tokens(self.tokenizer.from_features(features), grid)

    def from_tokens(self, tokens: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Logits from the tokens that enter the transformer.

        ``grid`` has their rows and columns where images have another size than the config's.
        """
        return self.classify(self._transformed(tokens), grid)

    def classify(self, tokens: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Logits from the tokens behind the last block (and the norm of a conventional model)."""
        if not self.config.keep_head:
            return self.logit(self.head(tokens.mean(1)))
        maps = tokens.transpose(1, 2).unflatten(2, grid or self.config.grid)
        # Logits in half precision would miss the sum of their contributions by one part in 2,000.
        device = maps.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return self.logit(self.head(maps))
        with torch.autocast(device, enabled=False):
            return self.logit(self.head(wide(maps)))

    def head_inputs(self, encoded: Tensor) -> Tensor:
        self._check_size(encoded)
        features = self.tokenizer.backbone(encoded)
        patch = self.config.patch
        tokens = self._transformed(self.tokenizer.from_features(features))
        if not self.config.keep_head:
            return tokens.mean(1)
        grid = (features.shape[-2] // patch, features.shape[-1] // patch)
        maps = tokens.transpose(1, 2).unflatten(2, grid)
        if isinstance(self.head, DenseHead):
            return self.head.features(maps)
        assert isinstance(self.head, Network)
        return taps.around(self.head, _last_layer(self.config))[0](self.head, maps)

    def from_head_inputs(self, inputs: Tensor) -> Tensor:
        if not self.config.keep_head:
            return self.logit(self.head(inputs))
        if isinstance(self.head, DenseHead):
            return self.logit(self.head.from_head_inputs(inputs))
        assert isinstance(self.head, Network)
        return self.logit(taps.around(self.head, _last_layer(self.config))[1](self.head, inputs))

    def get_classifier(self) -> nn.Module:
        if not self.config.keep_head:
            return self.head
        return self.head.get_submodule(_last_layer(self.config))

    def _replace_head(self, num_classes: int) -> None:
        if not self.config.keep_head:
            return super()._replace_head(num_classes)
        self.config = self.config.replace(num_classes=num_classes)
        fresh = _head(self.config).to(next(self.parameters()))
        last = f"{_last_layer(self.config)}."
        old = {k: t for k, t in self.head.state_dict().items() if not k.startswith(last)}
        fresh.load_state_dict({**fresh.state_dict(), **old})
        self.head = fresh
        self.logit = LogitLayer(self.config.logit_scale, self.config.logit_bias)
        self.train(self.training)

    def start_from(self, trunk: Classifier[Any]) -> None:
        """Takes over the weights of the network that the backbone was described by.

        The head is taken over where it is kept; its last layer stays new where the numbers of
        classes differ.

        Args:
            trunk: A converted model, or a B-cos DenseNet.

        Raises:
            ValueError: Its weights do not fit.
        """
        name = type(trunk).__name__
        converted = isinstance(trunk.config, BcosifiedConfig)
        whole = (trunk.get_submodule("network") if converted else trunk).state_dict()
        within = "" if converted else "features."
        own = [f"{within}{key}" for key in self.tokenizer.backbone.state_dict()]
        state = {key.removeprefix(within): whole[key] for key in own if key in whole}
        load_state(self.tokenizer.backbone, state, source=f"The {name}")
        if not self.config.keep_head:
            return
        new = self.head.state_dict()
        if trunk.config.num_classes != self.config.num_classes:
            last = f"{_last_layer(self.config)}."
            whole |= {key: tensor for key, tensor in new.items() if key.startswith(last)}
        load_state(self.head, {k: t for k, t in whole.items() if k in new}, source=f"The {name}")

    def forward_features(self, images: Tensor) -> Tensor:
        return self._transformed(self.tokens(images))

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        grid = self.config.grid_of(images.shape[-2], images.shape[-1])
        maps, tokens = [], self.position(self.tokens(images))
        for block in self.blocks:
            tokens = block(tokens)
            maps.append(tokens.transpose(1, 2).unflatten(2, grid))
        return maps

    def _transformed(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.position(tokens)))

    def _check_size(self, encoded: Tensor) -> None:
        size = (encoded.shape[-2], encoded.shape[-1])
        config = self.config
        if config.position != "none" and size != config.image_size:
            raise ValueError(
                f"Images are {size[0]}×{size[1]}, but the model's {config.position!r} prior is for "
                f"{config.image_size[0]}×{config.image_size[1]}; resize the images, or the model "
                f"with bcosvit.resize_prior(model, {size})."
            )
        if size != config.image_size and min(config.grid_of(*size)) < 1:
            raise ValueError(
                f"Images are {size[0]}×{size[1]}, too small for a single token; "
                f"give at least {config.min_size} pixels a side."
            )


def resize_prior(model: VisionTransformer, image_size: int | tuple[int, int]) -> VisionTransformer:
    """Makes a copy of a model for another image size, its priors or embedding interpolated.

    With the multiplicative prior a finer grid spreads each row of the prior over more tokens, so
    that attention branches shrink by the ratio of token counts: fine-tune after large changes.

    Args:
        model: A vision transformer, which stays as it is.
        image_size: Height and width in pixels; an int means a square.

    Returns:
        The resized copy.

    Raises:
        ValueError: No token would be left of an image of this size.

    Examples:
        >>> model = VisionTransformer(ModelConfig(depth=1, backbone=StemConfig(), image_size=32))
        >>> resize_prior(model, 48).config.grid
        (12, 12)
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    config = model.config.replace(image_size=size)
    old, new = model.config.grid, config.grid
    resized = copy.deepcopy(model)
    resized.config = config
    for module in resized.modules():
        if isinstance(module, AttentionPrior) and module.logits is not None:
            module.logits = nn.Parameter(resize_pairs(module.logits.data, old, new))
        elif isinstance(module, PositionalEmbedding):
            module.weight = nn.Parameter(resize_embedding(module.weight.data, old, new))
    return resized


def _head(config: ModelConfig) -> nn.Module:
    """From the mean of all tokens to the classes, or what the backbone computes behind its tap."""
    if config.family == "conventional":
        return Linear(config.width, config.num_classes)
    if not config.keep_head:
        options = bcos_options(config, config.width, maxout=1)
        return BcosLinear(config.width, config.num_classes, **options)
    if isinstance(config.backbone, DenseNetConfig):
        return DenseHead(config.backbone, config.block)
    assert isinstance(config.backbone, BcosifiedConfig)
    program = Program(**config.backbone.program)
    parts = taps.halves(program, taps.named(program, str(config.tap)))
    assert parts is not None  # checked by the config
    head = Network(parts[1])
    head.reset_parameters()
    return head


def _last_layer(config: ModelConfig) -> str:
    """The path of the last layer with weights in the backbone's head."""
    backbone = config.backbone
    return backbone.head if isinstance(backbone, BcosifiedConfig) else "classifier"


def _block(config: ModelConfig, tokens: int) -> Block:
    width, hidden = config.width, int(config.width * config.mlp_ratio)
    outer = config.token_width
    kind = config.position if config.position in ("add", "mul") else "none"
    value: BcosLinear | Linear
    project: BcosLinear | Linear
    if config.attention == "shifted":
        b = config.attention_b
        value = BcosLinear(outer, width, **bcos_options(config, outer, b=b))
        project = BcosLinear(width, outer, **bcos_options(config, width, b=b))
    else:
        value, project = Linear(outer, width), Linear(width, outer)
    attention = Attention(
        width,
        config.num_heads,
        kind=config.attention,
        prior=AttentionPrior(kind, config.num_heads, tokens),
        value=value,
        project=project,
        token_width=outer,
    )
    mlp: nn.Module
    if config.family == "conventional":
        mlp = GeluMLP(width, hidden)
    else:
        up = BcosLinear(outer, hidden, **bcos_options(config, outer))
        mlp = BcosMLP(up, BcosLinear(hidden, outer, **bcos_options(config, hidden)))
    return Block(attention, mlp, outer, config.layer_scale)


def bcos_options(
    config: ModelConfig,
    inputs: int,
    *,
    b: float | None = None,
    maxout: int | None = None,
    gain: float | None = None,
) -> BcosOptions:
    """Options of a layer whose units have ``inputs`` inputs: γ = f/√inputs (Sec. C.1)."""
    return {
        "b": config.b if b is None else b,
        "maxout": config.maxout if maxout is None else maxout,
        "scale": (config.layer_gain if gain is None else gain) / inputs**0.5,
        "eps": config.eps,
    }


def _bcos_stem(stem: StemConfig, config: ModelConfig) -> nn.Sequential:
    """3×3 B-cos convolutions of stride 2."""
    layers: list[nn.Module] = []
    inputs = 6
    for width in stem.widths:
        options = bcos_options(config, 9 * inputs, gain=stem.gain)
        layers.append(BcosConv2d(inputs, width, 3, stride=2, padding=1, **options))
        inputs = width
    return nn.Sequential(*layers)


def _conv_stem(widths: tuple[int, ...]) -> nn.Sequential:
    """3×3 convolutions of stride 2, each with batch norm and ReLU."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in widths:
        conv = nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


def _init_transformer(model: nn.Module) -> None:
    """The usual ViT start: truncated normal weights, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

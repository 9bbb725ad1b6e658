"""The B-cos vision transformer and its conventional counterpart.

Both are tokenizer → (embedding) → blocks → average pooling → head → logits; they differ in what
the parts are made of. Letters: n batch, t tokens, d width.
"""

import copy
from itertools import product

from torch import Tensor, nn

from bcosvit.models.base import Classifier, LogitLayer
from bcosvit.models.config import DenseNetConfig, ModelConfig, StemConfig
from bcosvit.models.densenet import dense_features
from bcosvit.models.registry import register_model
from bcosvit.nn.attention import Attention
from bcosvit.nn.conv import BcosConv2d
from bcosvit.nn.encoding import BcosEncoding, ImageNetEncoding
from bcosvit.nn.linear import BcosLinear, BcosMLP, Linear
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.prior import AttentionPrior, PositionalEmbedding, resize_embedding, resize_pairs
from bcosvit.ops.bcos import BcosOptions

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
}


class Tokenizer(nn.Module):
    """From an encoded image [n, c, h, w] to tokens [n, t, d] (the paper's Sec. 3.2).

    Convolutional features are cut into tokens by one more convolution. The backbone is frozen
    unless the config says otherwise.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bcos, backbone, patch = config.family == "bcos", config.backbone, config.patch
        if isinstance(backbone, DenseNetConfig):
            self.backbone = dense_features(backbone, config.tap)
            width = backbone.width_at(config.tap)
        else:
            self.backbone = _bcos_stem(backbone, config) if bcos else _conv_stem(backbone.widths)
            width = backbone.widths[-1]
        self.feature_scale = config.feature_scale
        self.patches: nn.Module = (
            BcosConv2d(
                width, config.width, patch, stride=patch, **bcos_options(config, width * patch**2)
            )
            if bcos
            else nn.Conv2d(width, config.width, patch, patch)
        )
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
        return tokens.flatten(2).transpose(1, 2)


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
    """Attention and MLP, each with its skip connection (the paper's Eq. 14 and 16)."""

    def __init__(self, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(tokens)
        tokens = tokens + self.mlp(tokens)
        return tokens


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
            PositionalEmbedding(tokens, config.width) if config.position == "emb" else nn.Identity()
        )
        self.blocks = nn.Sequential(*(_block(config, tokens) for _ in range(config.depth)))
        # B-cos blocks have no norm to undo; conventional ones need a last one before the head.
        self.norm: nn.Module = nn.Identity() if bcos else LayerNorm(config.width)
        self.head: nn.Module = (
            BcosLinear(
                config.width, config.num_classes, **bcos_options(config, config.width, maxout=1)
            )
            if bcos
            else Linear(config.width, config.num_classes)
        )
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)
        if not bcos:
            _init_transformer(self)

    def from_encoded(self, encoded: Tensor) -> Tensor:
        self._check_size(encoded)
        return self.from_tokens(self.tokenizer(encoded))

    def tokens(self, images: Tensor) -> Tensor:
        """The tokens [n, t, d] that enter the transformer, before any positional embedding."""
        encoded = self.encoding(images)
        self._check_size(encoded)
        return self.tokenizer(encoded)

    def from_features(self, features: Tensor) -> Tensor:
        """Logits from the backbone's features."""
        return self.from_tokens(self.tokenizer.from_features(features))

    def from_tokens(self, tokens: Tensor) -> Tensor:
        """Logits from the tokens that enter the transformer."""
        return self.logit(self.head(self._transformed(tokens).mean(1)))

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
        if min(config.grid_of(*size)) < 1:
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


def _block(config: ModelConfig, tokens: int) -> Block:
    width, hidden = config.width, int(config.width * config.mlp_ratio)
    kind = config.position if config.position in ("add", "mul") else "none"
    value: BcosLinear | Linear
    project: BcosLinear | Linear
    if config.attention == "shifted":
        options = bcos_options(config, width, b=config.attention_b)
        value, project = BcosLinear(width, width, **options), BcosLinear(width, width, **options)
    else:
        value, project = Linear(width, width), Linear(width, width)
    attention = Attention(
        width,
        config.num_heads,
        kind=config.attention,
        prior=AttentionPrior(kind, config.num_heads, tokens),
        value=value,
        project=project,
    )
    if config.family == "conventional":
        return Block(attention, GeluMLP(width, hidden))
    up = BcosLinear(width, hidden, **bcos_options(config, width))
    down = BcosLinear(hidden, width, **bcos_options(config, hidden))
    return Block(attention, BcosMLP(up, down))


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

"""The B-cos vision transformer and its conventional counterpart, from one skeleton.

Both are tokenizer → (embedding) → blocks → average pooling → head → logits; they differ in what
the parts are made of. Letters: n batch, t tokens, d width.
"""

import copy
import dataclasses

from torch import Tensor, nn

from bcosvit.models.base import Classifier, LogitLayer
from bcosvit.models.config import ModelConfig
from bcosvit.models.conventional import GeluMLP, init_transformer
from bcosvit.models.tokenizer import Tokenizer, bcos_options
from bcosvit.nn.attention import Attention
from bcosvit.nn.encoding import BcosEncoding, ImageNetEncoding
from bcosvit.nn.linear import BcosLinear, BcosMLP, Linear
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.prior import AttentionPrior, PositionalEmbedding, resize_embedding, resize_pairs


class Block(nn.Module):
    """B-cos AttBlock and MLPBlock, each with its skip connection (the paper's Eq. 14, 15)."""

    def __init__(self, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(tokens)
        tokens = tokens + self.mlp(tokens)
        return tokens


class VisionTransformer(Classifier[ModelConfig]):
    """logits = W(x)·x + residual + bias, exactly, where the family is B-cos."""

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
            init_transformer(self)

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
    """A copy of ``model`` for another image size, its priors or embedding interpolated.

    Under ``mul`` a finer grid spreads each row's prior over more tokens, so attention branches
    shrink by the ratio of token counts: fine-tune after large changes.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    config = dataclasses.replace(model.config, image_size=size)
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

"""From an encoded image to tokens: convolutional features, cut by one more convolution."""

from typing import TypedDict

from torch import Tensor, nn

from bcosvit.models.config import DenseNetConfig, ModelConfig, StemConfig
from bcosvit.models.conventional import conv_stem
from bcosvit.models.densenet import dense_features
from bcosvit.nn.conv import BcosConv2d


class BcosOptions(TypedDict):
    """What the B-cos layers of one model have in common."""

    b: float
    maxout: int
    scale: float
    eps: float


def bcos_options(
    config: ModelConfig,
    inputs: int,
    *,
    b: float | None = None,
    maxout: int | None = None,
    gain: float | None = None,
) -> BcosOptions:
    """Options of a layer whose units have ``inputs`` inputs: γ = f/√inputs (SPEC 1.4)."""
    return {
        "b": config.b if b is None else b,
        "maxout": config.maxout if maxout is None else maxout,
        "scale": (config.layer_gain if gain is None else gain) / inputs**0.5,
        "eps": config.eps,
    }


class Tokenizer(nn.Module):
    """[n, c, h, w] -> [n, t, d]; the backbone is frozen unless the config says otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bcos, backbone, patch = config.family == "bcos", config.backbone, config.patch
        if isinstance(backbone, DenseNetConfig):
            self.backbone = dense_features(backbone, config.tap)
            width = backbone.width_at(config.tap)
        else:
            self.backbone = bcos_stem(backbone, config) if bcos else conv_stem(backbone.widths)
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


def bcos_stem(stem: StemConfig, config: ModelConfig) -> nn.Sequential:
    """3×3 B-cos convolutions of stride 2."""
    layers: list[nn.Module] = []
    inputs = 6
    for width in stem.widths:
        options = bcos_options(config, 9 * inputs, gain=stem.gain)
        layers.append(BcosConv2d(inputs, width, 3, stride=2, padding=1, **options))
        inputs = width
    return nn.Sequential(*layers)

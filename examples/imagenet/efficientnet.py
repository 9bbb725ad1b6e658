"""EfficientNet-lite: a conventional network without squeeze-and-excitation, with ReLU6.

Module names follow the published PyTorch checkpoints without their leading underscores;
`efficientnet_state` renames a checkpoint. Convolutions pad as TensorFlow's "same" does, with the
larger half behind the image, and images are standardized with `MEAN` and `STD`, not ImageNet's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
"""What the published weights expect to be subtracted from RGB in [0, 1], and divided by."""


class Stage(NamedTuple):
    """One row of the EfficientNet-B0 table (Tan and Le, 2019), before scaling."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    width: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


@dataclass(frozen=True, kw_only=True)
class EfficientNetConfig:
    """The scaling of an EfficientNet-lite. The defaults give EfficientNet-lite2."""

    width: float = 1.1
    """Multiplies the widths of all blocks, rounded to multiples of 8."""
    depth: float = 1.2
    """Multiplies the blocks of every stage but the first and the last."""
    num_classes: int = 1000
    stem_width: int = 32
    head_width: int = 1280
    smooth_strides: bool = False
    """Whether kernels of strided convolutions are larger by 2, which is room for a binomial filter.

    A filter (1, 2, 1)/4 along both axes before subsampling makes every pixel count alike, so that
    explanations have no checkerboard.
    """
    local_logits: bool = False
    """Whether every position is classified before averaging, as in B-cos networks."""

    def stages(self) -> list[Stage]:
        """The scaled stages."""
        ends = (0, len(STAGES) - 1)
        return [
            stage._replace(
                repeats=stage.repeats if i in ends else math.ceil(stage.repeats * self.depth),
                width=_round_width(stage.width * self.width),
            )
            for i, stage in enumerate(STAGES)
        ]


LITE = {
    "efficientnet_lite0": EfficientNetConfig(width=1.0, depth=1.0),
    "efficientnet_lite1": EfficientNetConfig(width=1.0, depth=1.1),
    "efficientnet_lite2": EfficientNetConfig(width=1.1, depth=1.2),
    "efficientnet_lite3": EfficientNetConfig(width=1.2, depth=1.4),
    "efficientnet_lite4": EfficientNetConfig(width=1.4, depth=1.8),
}


class SameConv2d(nn.Conv2d):
    """A convolution without bias whose output has ``ceil(size / stride)`` positions per side."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if stride == 1:
            return F.conv2d(input, self.weight, padding=kernel // 2, groups=self.groups)
        y, x = (same_padding(size, kernel, stride) for size in input.shape[2:])
        return F.conv2d(F.pad(input, (*x, *y)), self.weight, stride=stride, groups=self.groups)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """The zeros before and after a side of ``size`` positions."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class MBConv(nn.Module):
    """An inverted residual block: expand, filter every channel by itself, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand_conv = SameConv2d(inputs, inner, 1) if expansion > 1 else nn.Identity()
        self.bn0 = _norm(inner) if expansion > 1 else nn.Identity()
        self.relu0 = nn.ReLU6() if expansion > 1 else nn.Identity()
        self.depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self.bn1 = _norm(inner)
        self.relu1 = nn.ReLU6()
        self.project_conv = SameConv2d(inner, outputs, 1)
        self.bn2 = _norm(outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu0(self.bn0(self.expand_conv(x)))
        y = self.relu1(self.bn1(self.depthwise_conv(y)))
        y = self.bn2(self.project_conv(y))
        out: Tensor = x + y if self.residual else y
        return out


class EfficientNet(nn.Module):
    """An EfficientNet-lite classifier of images that are standardized with `MEAN` and `STD`.

    Args:
        config: The scaling; EfficientNet-lite2 unless told otherwise.

    Example:
        >>> import torch
        >>> model = EfficientNet(LITE["efficientnet_lite0"]).eval()
        >>> model(torch.rand(2, 3, 64, 64)).shape
        torch.Size([2, 1000])
    """

    def __init__(self, config: EfficientNetConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or EfficientNetConfig()
        wider = 2 if config.smooth_strides else 0
        self.conv_stem = SameConv2d(3, config.stem_width, 3 + wider, 2)
        self.bn0 = _norm(config.stem_width)
        self.relu0 = nn.ReLU6()
        blocks: list[nn.Module] = []
        width = config.stem_width
        for stage in config.stages():
            for i in range(stage.repeats):
                stride = stage.stride if i == 0 else 1
                kernel = stage.kernel + (wider if stride > 1 else 0)
                blocks.append(MBConv(width, stage.width, kernel, stride, stage.expansion))
                width = stage.width
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = SameConv2d(width, config.head_width, 1)
        self.bn1 = _norm(config.head_width)
        self.relu1 = nn.ReLU6()
        self.fc = nn.Linear(config.head_width, config.num_classes)

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns the feature map [n, c, h, w] that the classifier averages."""
        x = self.blocks(self.relu0(self.bn0(self.conv_stem(images))))
        features: Tensor = self.relu1(self.bn1(self.conv_head(x)))
        return features

    def forward(self, images: Tensor) -> Tensor:
        features = self.forward_features(images).permute(0, 2, 3, 1)
        if self.config.local_logits:
            local: Tensor = self.fc(features).mean((1, 2))
            return local
        logits: Tensor = self.fc(features.mean((1, 2)))
        return logits


def efficientnet_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of a published checkpoint (``_blocks.0._bn1.weight``) to ours."""
    return {
        ".".join(part.removeprefix("_") for part in name.split(".")): tensor
        for name, tensor in state.items()
    }


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


def _round_width(width: float) -> int:
    """A multiple of 8, never down by more than a tenth."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * width else rounded + 8

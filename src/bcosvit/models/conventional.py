"""The parts of conventional vision transformers that have no B-cos counterpart (SPEC 2.5)."""

from torch import Tensor, nn

from bcosvit.nn.linear import Linear
from bcosvit.nn.norm import LayerNorm


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


def conv_stem(widths: tuple[int, ...]) -> nn.Sequential:
    """3×3 convolutions of stride 2, each with batch norm and ReLU."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in widths:
        conv = nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


def init_transformer(model: nn.Module) -> None:
    """The usual ViT start: truncated normal weights, zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

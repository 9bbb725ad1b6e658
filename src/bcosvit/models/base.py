"""What every model of the library is: an encoding, then logits with a known scale and bias."""

from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from bcosvit.models.config import Config
from bcosvit.nn.dynamic import DynamicModule
from bcosvit.nn.encoding import Encoding
from bcosvit.ops.common import wide

C = TypeVar("C", bound=Config)


class LogitLayer(DynamicModule):
    """scale·x + bias, both fixed; the bias is the logit before any evidence."""

    def __init__(self, scale: float, bias: float) -> None:
        super().__init__()
        self.scale = scale
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        # Half precision has too few digits for a small difference between logits near the bias.
        return self.scale * wide(x) + self.bias

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, bias={self.bias:g}"


class Classifier(nn.Module, Generic[C]):
    """Images [B, 3, H, W], RGB in [0, 1] -> logits [B, K]."""

    config: C
    encoding: Encoding
    logit: LogitLayer

    def forward(self, images: Tensor) -> Tensor:
        return self.from_encoded(self.encoding(images))

    def from_encoded(self, encoded: Tensor) -> Tensor:
        """Logits from what ``encoding`` returns: the function that explanations are about."""
        raise NotImplementedError


AnyModel = Classifier[Any]

"""What every model of the library is: an encoding, then logits with a known scale and bias."""

import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from bcosvit.models.config import FROM_FAMILY, Config
from bcosvit.models.hub import HubMixin
from bcosvit.nn.encoding import Encoding
from bcosvit.nn.views import DynamicModule
from bcosvit.ops.dispatch import wide

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


class Classifier(HubMixin, nn.Module, Generic[C]):
    """Images [B, 3, H, W], RGB in [0, 1] -> logits [B, K]."""

    head_name: ClassVar[str] = "head"
    """The attribute that is the last layer with weights."""

    config: C
    encoding: Encoding
    logit: LogitLayer

    def forward(self, images: Tensor) -> Tensor:
        return self.from_encoded(self.encoding(images))

    def from_encoded(self, encoded: Tensor) -> Tensor:
        """Logits from what ``encoding`` returns: the function that explanations are about."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """What the head averages: tokens [n, t, d] of a transformer, maps [n, c, h, w] else."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Module:
        """The head."""
        return getattr(self, self.head_name)

    def reset_classifier(self, num_classes: int) -> None:
        """Puts a fresh head for ``num_classes`` classes in place of the old one."""
        config = dataclasses.replace(self.config, num_classes=num_classes)
        # A bias that came from the number of classes comes from the new one; a chosen one stays.
        if dataclasses.replace(self.config, logit_bias=FROM_FAMILY) == self.config:
            config = dataclasses.replace(config, logit_bias=FROM_FAMILY)
        # A new model's head is right by construction: its layer, its scale and its start.
        make: Any = type(self)
        fresh: Classifier[C] = make(config)
        head = fresh.get_classifier().to(next(self.parameters())).train(self.training)
        setattr(self, self.head_name, head)
        self.logit, self.config = fresh.logit, config


AnyModel = Classifier[Any]

"""A kind of model of another package: one B-cos convolution, averaged."""

from dataclasses import dataclass

from bcosvit.models import Classifier, Config, register_model
from bcosvit.models.base import LogitLayer
from bcosvit.nn import BcosConv2d, BcosEncoding


@dataclass(frozen=True, kw_only=True)
class PatchConfig(Config):
    noun = "patch classifier"
    patch: int = 4
    image_size: tuple[int, int] = (32, 32)
    logit_scale: float = 1.0
    logit_bias: float = 0.0

    @property
    def family(self):
        return "bcos"


@register_model("patches", PatchConfig, variants={"patch_classifier": {}})
class PatchClassifier(Classifier[PatchConfig]):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoding = BcosEncoding()
        self.head = BcosConv2d(6, config.num_classes, config.patch, stride=config.patch)
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)

    def from_encoded(self, encoded):
        return self.logit(self.head(encoded).mean((2, 3)))

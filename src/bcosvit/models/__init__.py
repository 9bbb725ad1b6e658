"""Vision transformers and DenseNets, by name or by config.

Importing this package registers the models of bcosvit.
"""

from bcosvit.models.base import Classifier, create_model, features, from_pretrained, load, save
from bcosvit.models.bcosify import Bcosified, BcosifySchedule
from bcosvit.models.config import Config, DenseNetConfig, ModelConfig, StemConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.published import load_backbone
from bcosvit.models.registry import list_models, model_config, register_model
from bcosvit.models.vit import VisionTransformer, resize_prior

__all__ = [
    "Bcosified",
    "BcosifySchedule",
    "Classifier",
    "Config",
    "DenseNet",
    "DenseNetConfig",
    "ModelConfig",
    "StemConfig",
    "VisionTransformer",
    "create_model",
    "features",
    "from_pretrained",
    "list_models",
    "load",
    "load_backbone",
    "model_config",
    "register_model",
    "resize_prior",
    "save",
]

"""Tokenizers and vision transformers, by name or by config."""

from bcosvit.models.base import Classifier
from bcosvit.models.bcosify import Bcosified, BcosifySchedule, bcosify
from bcosvit.models.catalog import create_model, list_models, model_config
from bcosvit.models.config import DenseNetConfig, ModelConfig, StemConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.features import features
from bcosvit.models.vit import VisionTransformer, resize_prior
from bcosvit.models.weights import load, load_backbone, save

__all__ = [
    "Bcosified",
    "BcosifySchedule",
    "Classifier",
    "DenseNet",
    "DenseNetConfig",
    "ModelConfig",
    "StemConfig",
    "VisionTransformer",
    "bcosify",
    "create_model",
    "features",
    "list_models",
    "load",
    "load_backbone",
    "model_config",
    "resize_prior",
    "save",
]

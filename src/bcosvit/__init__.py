"""B-cos vision transformers: models whose prediction is its own explanation."""

from bcosvit.attribution import Attribution, explain, explainers
from bcosvit.models import (
    BcosifySchedule,
    DenseNetConfig,
    ModelConfig,
    StemConfig,
    bcosify,
    create_model,
    features,
    list_models,
    load,
    load_backbone,
    resize_prior,
    save,
)
from bcosvit.nn import explaining, frozen_view

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "BcosifySchedule",
    "DenseNetConfig",
    "ModelConfig",
    "StemConfig",
    "bcosify",
    "create_model",
    "explain",
    "explainers",
    "explaining",
    "features",
    "frozen_view",
    "list_models",
    "load",
    "load_backbone",
    "resize_prior",
    "save",
]

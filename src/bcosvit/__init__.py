"""B-cos vision transformers: models whose prediction is its own explanation."""

from typing import TYPE_CHECKING, Any

from bcosvit.attribution import Attribution, Explainer, Top, explain, explainers, register_explainer
from bcosvit.models import (
    BcosifySchedule,
    DenseNetConfig,
    ModelConfig,
    StemConfig,
    create_model,
    features,
    list_models,
    load,
    load_backbone,
    resize_prior,
    save,
)
from bcosvit.models.bcosify import bcosify
from bcosvit.nn import explaining, frozen_view

if TYPE_CHECKING:
    from bcosvit.predictor import Explanation, Predictor

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "BcosifySchedule",
    "DenseNetConfig",
    "Explainer",
    "Explanation",
    "ModelConfig",
    "Predictor",
    "StemConfig",
    "Top",
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
    "register_explainer",
    "resize_prior",
    "save",
]


def __getattr__(name: str) -> Any:
    # Reading pictures needs Pillow, which `import bcosvit` does not.
    if name in ("Explanation", "Predictor"):
        from bcosvit import predictor

        return getattr(predictor, name)
    raise AttributeError(f"module 'bcosvit' has no attribute {name!r}")

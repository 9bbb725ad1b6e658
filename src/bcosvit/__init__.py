"""B-cos vision transformers: models whose prediction is its own explanation.

Importing this package imports nothing else, not even torch: each public name is imported when it is
used for the first time.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcosvit.api import Comparison, ImageAttribution, explain
    from bcosvit.attribution import Attribution, Explainer, Top, explainers, register_explainer
    from bcosvit.auditing.run import audit
    from bcosvit.models import (
        BcosifySchedule,
        DenseNetConfig,
        ModelConfig,
        StemConfig,
        create_model,
        features,
        from_pretrained,
        list_models,
        load,
        load_backbone,
        resize_prior,
        save,
    )
    from bcosvit.models.bcosify import bcosify
    from bcosvit.nn import explaining, frozen_view
    from bcosvit.predictor import Explanation, Predictor

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "BcosifySchedule",
    "Comparison",
    "DenseNetConfig",
    "Explainer",
    "Explanation",
    "ImageAttribution",
    "ModelConfig",
    "Predictor",
    "StemConfig",
    "Top",
    "audit",
    "bcosify",
    "create_model",
    "explain",
    "explainers",
    "explaining",
    "features",
    "from_pretrained",
    "frozen_view",
    "list_models",
    "load",
    "load_backbone",
    "register_explainer",
    "resize_prior",
    "save",
]

_HOMES = {
    **dict.fromkeys(("Comparison", "ImageAttribution", "explain"), "api"),
    **dict.fromkeys(
        ("Attribution", "Explainer", "Top", "explainers", "register_explainer"), "attribution"
    ),
    **dict.fromkeys(("explaining", "frozen_view"), "nn"),
    **dict.fromkeys(("Explanation", "Predictor"), "predictor"),
    "audit": "auditing.run",
    "bcosify": "models.bcosify",
}
"""The modules of public names that are not in ``models``."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = import_module(f"bcosvit.{_HOMES.get(name, 'models')}")
        found = globals()[name] = getattr(home, name)
        return found
    if not name.startswith("_") and _is_module(name):
        return import_module(f"bcosvit.{name}")
    from bcosvit.guesses import no_attribute

    raise AttributeError(no_attribute(name, __all__))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_module(name: str) -> bool:
    path = Path(__file__).with_name(name)
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()

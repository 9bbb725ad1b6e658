"""Training on your own images: recipes, and the function `train` that follows them.

Importing this package imports Lightning, which takes seconds; ``import bcosvit`` does not.
"""

# Before Lightning: its metrics import torchvision, which fails unless it is imported this way.
from bcosvit._torchvision import torchvision as _torchvision  # noqa: F401
from bcosvit.train.callbacks import Stopped
from bcosvit.train.losses import LOSSES, Loss, register_loss
from bcosvit.train.recipe import (
    QUICK_MODEL,
    RECIPES,
    Recipe,
    RegisteredRecipe,
    get_recipe,
    register_recipe,
)
from bcosvit.train.run import Run, train

__all__ = [
    "LOSSES",
    "QUICK_MODEL",
    "RECIPES",
    "Loss",
    "Recipe",
    "RegisteredRecipe",
    "Run",
    "Stopped",
    "get_recipe",
    "register_loss",
    "register_recipe",
    "train",
]

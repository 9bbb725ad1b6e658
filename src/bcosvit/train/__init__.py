"""Training on anyone's images: recipes, and the engine that follows them.

Importing this package imports Lightning, which takes seconds; ``import bcosvit`` does not.
"""

# Lightning's metrics import torchvision by the front door, which only opens after this one.
from bcosvit._torchvision import torchvision as _torchvision  # noqa: F401
from bcosvit.train.machines import Machines
from bcosvit.train.recipe import QUICK_MODEL, RECIPES, Recipe
from bcosvit.train.run import Run, train
from bcosvit.train.signals import Stopped

__all__ = ["QUICK_MODEL", "RECIPES", "Machines", "Recipe", "Run", "Stopped", "train"]

"""Entry points for torch.hub.

torch.hub.load("OWNER/bcosvit", "create_model", "bcos_vit_ti_38", num_classes=10)
torch.hub.load("OWNER/bcosvit", "load")  # the shipped model with its weights
"""

import sys
from pathlib import Path
from typing import Any

dependencies = ["torch", "torchvision", "numpy", "safetensors"]

# torch.hub imports this file from a checkout without installing the package.
sys.path.insert(0, str(Path(__file__).parent / "src"))

import bcosvit  # noqa: E402
from bcosvit.shipped import DEFAULT  # noqa: E402


def create_model(name: str, **options: Any) -> Any:
    """Creates a model with random weights by its name (``bcosvit.list_models()``)."""
    return bcosvit.create_model(name, **options)


def load(where: str = DEFAULT) -> Any:
    """Loads a shipped model, a path, https://...#sha256=..., or hf://OWNER/REPO."""
    return bcosvit.load(where)


def load_backbone(path: str, name: str = "bcos_vit_ti_38", **options: Any) -> Any:
    """Creates a model and loads a published DenseNet into its tokenizer."""
    model = bcosvit.create_model(name, **options)
    bcosvit.load_backbone(model, path)
    return model

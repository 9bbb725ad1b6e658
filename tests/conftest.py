"""Small models and pictures that every test can share."""

import gc
import os
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run in Python, where tests call them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from bcosvit import DenseNetConfig, ModelConfig, StemConfig, create_model
from bcosvit.models import Classifier
from bcosvit.registry import Registry


@pytest.fixture(autouse=True, scope="module")
def _collected() -> None:
    """What has been imported so far is not looked at again whenever garbage is collected, which
    takes more time than small tests and runs do themselves."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter and statistic away from its start, so that nothing is zero or one by luck."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        positive = name.endswith("running_var") or ("norm" in name and name.endswith("weight"))
        tensor.copy_(noise.abs() + 0.5 if positive else noise)
    return model


def tiny_config(**options: object) -> ModelConfig:
    """Two blocks on a real but thin DenseNet: 2×2 tokens from 32×32 pixels at every tap."""
    flavor = options.pop("flavor", "v1")
    dense = DenseNetConfig(flavor=flavor, growth=2, blocks=(2, 1, 1), stem_width=4, bottleneck=2)
    defaults = {"width": 8, "num_heads": 2, "depth": 2, "mlp_ratio": 2, "tap": 2, "image_size": 32}
    return ModelConfig(**{**defaults, "num_classes": 3, "backbone": dense, **options})


def small_config(**options: object) -> ModelConfig:
    """A model from scratch for 16×16 pixels: what most tests explain."""
    defaults = {"width": 12, "num_heads": 3, "depth": 2, "mlp_ratio": 2, "image_size": 16}
    stem = StemConfig(widths=(6, 8))
    return ModelConfig(**{**defaults, "num_classes": 5, "backbone": stem, **options})


@pytest.fixture
def model() -> Classifier:
    return randomize(create_model(small_config())).double().eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(4, 3, 16, 16, dtype=torch.float64)


@pytest.fixture
def restored_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what examples register when their test is over."""
    for registry in registries():
        registry.names()  # Loads entry points.
        for attribute in ("_items", "_origins"):
            monkeypatch.setattr(registry, attribute, dict(getattr(registry, attribute)))


def registries() -> tuple[Registry[Any], ...]:
    """All registries; imported late, since training takes seconds to import."""
    from bcosvit.attribution import METHODS
    from bcosvit.data.sources import SOURCES
    from bcosvit.metrics import METRICS
    from bcosvit.models.registry import KINDS
    from bcosvit.paper import FIGURES
    from bcosvit.train import LOSSES, RECIPES

    return (KINDS, LOSSES, METHODS, METRICS, RECIPES, SOURCES, FIGURES)

"""What a GPU computes together, and layers in place of the usual ones."""

import pytest
import torch
from torch import nn

from bcosvit.nn import Attention, AttentionPrior, BcosLinear, Linear
from bcosvit.nn import attention as attention_module


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Queries and keys are computed as on a GPU; the rest of attention is not."""
    monkeypatch.setattr(attention_module, "use_triton", lambda backend, x: True)


def attention(project: nn.Module | None = None) -> Attention:
    layers = BcosLinear(8, 8, maxout=2), project or BcosLinear(8, 8, maxout=2)
    prior = AttentionPrior("mul", 2, 5)
    return Attention(8, 2, kind="shifted", prior=prior, value=layers[0], project=layers[1])


def results(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]


def test_queries_and_keys_from_one_product_are_the_same(monkeypatch):
    layer, x = attention(), torch.randn(3, 5, 8)
    separate = results(layer, x)
    calls = []
    monkeypatch.setattr(attention_module, "use_triton", lambda backend, x: True)
    monkeypatch.setattr(Linear, "forward", lambda self, x: calls.append(self))
    torch.testing.assert_close(results(layer, x), separate)
    assert not calls


@pytest.mark.parametrize("name", ["query", "key", "project"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_run(name, kind, as_on_a_gpu):
    layer, x, seen = attention(), torch.randn(3, 5, 8), []
    expected = layer(x)
    getattr(getattr(layer, name), kind)(lambda part, *_: seen.append(part))
    torch.testing.assert_close(layer(x), expected)
    assert seen == [getattr(layer, name)]


@pytest.mark.parametrize("name", ["query", "key"])
def test_layers_without_a_bias_are_called(name, as_on_a_gpu):
    layer, x = attention(), torch.randn(3, 5, 8)
    part = getattr(layer, name)
    with torch.no_grad():
        part.bias.zero_()
    expected = layer(x)
    part.bias = None
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("name", ["query", "key", "project"])
def test_layers_of_another_class_are_called(name, as_on_a_gpu):
    layer, x = attention(), torch.randn(3, 5, 8)

    class Doubled(type(getattr(layer, name))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    usual = layer(x)
    part = getattr(layer, name)
    part.__class__ = Doubled
    found = layer(x)
    if name == "project":
        torch.testing.assert_close(found, 2 * usual)
        return
    part.__class__ = Linear
    with torch.no_grad():
        part.weight.mul_(2)
        part.bias.mul_(2)
    torch.testing.assert_close(found, layer(x))
    assert not torch.allclose(found, usual)

"""Compiled once, the explanations stay what they are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from bcosvit import BcosifySchedule, bcosify, create_model, explain
from bcosvit.attribution.inherent import CompiledInherent
from tests.conftest import randomize, small_config, tiny_config


@pytest.mark.parametrize("config", [small_config, tiny_config])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"position": "emb", "attention": "standard"}, marks=pytest.mark.slow)],
)
def test_equals_the_eager_one(config, options):
    model = randomize(create_model(config(**options))).double().eval()
    side = model.config.image_size[0]
    images = torch.rand(3, 3, side, side, dtype=torch.float64)
    method = CompiledInherent(model, backend="aot_eager")
    for target in (None, 1, torch.tensor([0, 2, 1]), "all"):
        expected, found = (explain(model, images, target, way) for way in ("inherent", method))
        for field in ("map", "weights", "residual", "logit", "target"):
            torch.testing.assert_close(getattr(found, field), getattr(expected, field))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own imports
def test_of_a_converted_network(backend):
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, groups=8)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = bcosify(randomize(network).eval(), image_size=16, b=1.0).double()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    method = CompiledInherent(model, backend=backend)
    graphs = []
    for progress in (0.0, 0.1, 1.0):
        BcosifySchedule(end=0.3).apply(model, progress)
        expected, found = explain(model, images), method(model, images)
        for field in ("map", "weights", "residual", "logit"):
            torch.testing.assert_close(getattr(found, field), getattr(expected, field))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert (expected.residual == 0).all()
    # λ and B are data: moving them compiles nothing again.
    assert len(set(graphs)) == 1


def test_compiles_once(model, images):
    method = CompiledInherent(model, backend="aot_eager")
    method(model, images)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for target in (None, 2, "all"):
        method(model, images.flip(0), target)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_sees_weights_that_were_trained_on(model, images):
    method = CompiledInherent(model, backend="aot_eager")
    before = method(model, images).map
    with torch.no_grad():
        model.head.weight.mul_(-1)
    after = method(model, images)
    torch.testing.assert_close(after.map, explain(model, images).map)
    assert not torch.allclose(after.map, before)


def test_refuses_a_model_with_another_head(model, images):
    method = CompiledInherent(model, backend="aot_eager")
    model.head = nn.Linear(12, 5).double()
    with pytest.raises(ValueError, match="a part of it was replaced"):
        method(model, images)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.float(),
        lambda model: setattr(model.head.weight, "data", torch.rand(5, 12).double()),
    ],
    ids=["cast", "other numbers"],
)
def test_refuses_a_model_whose_tensors_lie_elsewhere(model, images, change):
    """The view would go on with the old ones."""
    method = CompiledInherent(model, backend="aot_eager")
    change(model)
    with pytest.raises(ValueError, match="replaced, cast or moved"):
        method(model, images)


def test_refuses_another_model(model, images):
    other = randomize(create_model(small_config()), seed=1).double().eval()
    with pytest.raises(ValueError, match="another model"):
        CompiledInherent(model, backend="aot_eager")(other, images)


def test_threads_take_turns(model, images):
    method = CompiledInherent(model, backend="aot_eager")
    method(model, images)
    batches = [images.roll(i, 0) for i in range(4)]
    expected = [explain(model, batch).map for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: method(model, batch).map, batches))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_lingers(model, images):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    CompiledInherent(model, backend="aot_eager")(model, images, "all")
    assert all(p.grad is None for p in model.parameters())
    assert not any(getattr(m, "frozen", False) for m in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_results_in_inference_mode_are_ordinary_tensors(model, images):
    method = CompiledInherent(model, backend="aot_eager")
    with torch.inference_mode():
        found = method(model, images)
    expected = explain(model, images)
    torch.testing.assert_close(found.map, expected.map)
    # What is made in inference mode cannot be part of a graph later.
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    (found.map * scale).sum().backward()
    torch.testing.assert_close(scale.grad, expected.map.sum())

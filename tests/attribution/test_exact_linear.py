"""The dynamic matrix of conventional models."""

import pytest
import torch

import bcosvit
from bcosvit import DenseNetConfig, create_model
from bcosvit.attribution import ExactLinear, exact_linear
from tests.conftest import randomize, small_config

MODELS = {
    "vit": lambda: create_model(small_config(family="conventional")),
    "densenet": lambda: create_model(
        DenseNetConfig(
            flavor="conventional",
            growth=4,
            blocks=(2, 2),
            stem_width=8,
            bottleneck=2,
            num_classes=5,
        )
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_sums_to_the_logit(kind: str) -> None:
    model = randomize(MODELS[kind]()).double().eval()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    found = bcosvit.explain(model, images, method=ExactLinear())
    with torch.no_grad():
        logits = model(images)
    torch.testing.assert_close(found.logit, logits.max(1).values)
    assert found.map.shape == (3, 16, 16)
    assert found.residual.abs().min().item() > 0
    assert (found.completeness_error() <= 1e-10 * found.logit.abs().clamp_min(1)).all()


def test_follows_the_weights() -> None:
    model = randomize(MODELS["vit"]()).double().eval()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    method = ExactLinear()
    before = bcosvit.explain(model, images, target=1, method=method)
    again = bcosvit.explain(model, images, target=1, method=method)
    assert torch.equal(before.map, again.map)
    with torch.no_grad():
        model.head.weight.mul_(2)
    after = bcosvit.explain(model, images, target=1, method=method)
    torch.testing.assert_close(after.map, 2 * before.map)
    # By a way that leaves the version of the tensor as it is.
    model.head.weight.data.mul_(0.5)
    back = bcosvit.explain(model, images, target=1, method=method)
    torch.testing.assert_close(back.map, before.map)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.mlp, "act", torch.nn.ReLU()),
        lambda block: setattr(block.mlp.norm, "eps", 1.0),
        lambda block: setattr(block.mlp, "forward", lambda x: x),
    ],
    ids=["activation", "option", "forward"],
)
def test_follows_layers_without_weights(change) -> None:
    model = randomize(MODELS["vit"]()).double().eval()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    bcosvit.explain(model, images, method=ExactLinear())
    for block in model.blocks:
        change(block)
    found = bcosvit.explain(model, images, method=ExactLinear())
    torch.testing.assert_close(found.logits, model(images).detach())


def test_a_model_that_stays_as_it_is_is_converted_once(monkeypatch) -> None:
    model, images = MODELS["vit"](), torch.rand(1, 3, 16, 16)
    conversions = []

    def counted(*given):
        conversions.append(given)
        return convert(*given)

    convert = exact_linear._convert
    monkeypatch.setattr(exact_linear, "_convert", counted)
    for mode in (True, False, False):
        bcosvit.explain(model.train(mode), images, method="exact-linear")
    assert len(conversions) == 1

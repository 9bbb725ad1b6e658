"""The dynamic matrix of conventional models."""

import pytest
import torch

import bcosvit
from bcosvit import DenseNetConfig, create_model
from bcosvit.attribution import ExactLinear
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

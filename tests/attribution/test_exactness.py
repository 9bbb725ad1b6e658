"""W(x) itself, against an explicit product of dynamic matrices; completeness of the real models.

B-cos networks with MaxOut are positively homogeneous, so even *unfrozen* input × gradient sums to
the logit: completeness alone proves nothing about freezing. Hence the matrices.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from bcosvit import create_model, explain, list_models
from bcosvit.models import VisionTransformer
from bcosvit.models.registry import needs_backbone
from tests.conftest import randomize, tiny_config
from tests.reference import dynamic

SIZES = [(6, 3), (8, 2), (12, 4)]
POSITIONS = ["none", "emb", "add", "mul"]
ATTENTIONS = [("shifted", 1.0), ("shifted", 2.0), ("standard", 2.0)]


@cache
def image() -> torch.Tensor:
    return torch.rand(1, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def numpy_state(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}


@cache
def backbone(flavor: str, tap: int) -> tuple[dict[str, torch.Tensor], dynamic.Affine, tuple]:
    """A backbone's weights and its explicit matrix, shared by all transformers on top of it."""
    model = create_model(tiny_config(flavor=flavor, tap=tap)).double()
    features = randomize(model.tokenizer.backbone, seed=tap)
    encoded = torch.cat([image(), 1 - image()], 1)[0].numpy()
    affine, shape = dynamic.dense_backbone(
        encoded, numpy_state(features), flavor, (2, 1, 1)[:tap], growth=2
    )
    return features.state_dict(), affine, shape


def check(model: VisionTransformer, flavor: str, tap: int) -> None:
    state, affine, shape = backbone(flavor, tap)
    model.tokenizer.backbone.load_state_dict(state)
    config = model.config
    options = {
        name: getattr(config, name)
        for name in (
            *("num_heads", "position", "attention", "attention_b", "maxout", "depth"),
            *("feature_scale", "logit_scale"),
        )
    }
    expected = dynamic.transformer(
        affine, shape, numpy_state(model), {**options, "f": config.layer_gain}
    )
    result = explain(model, image(), "all")
    w = result.weights[0].reshape(config.num_classes, -1).numpy()
    size = np.abs(expected.matrix).max()
    assert size > 0
    assert np.abs(w - expected.matrix).max() <= 1e-9 * size
    scale = np.abs(expected.value).max()
    logits = model(image())[0].detach().numpy() - config.logit_bias
    assert np.abs(logits - expected.value).max() <= 1e-9 * scale
    residual = result.residual[0].numpy()
    assert np.abs(residual - expected.offset).max() <= 1e-9 * max(scale, np.abs(residual).max())
    if config.position != "emb" and config.attention == "shifted":
        assert (residual == 0).all()
    else:
        assert (residual != 0).all()
    assert (result.completeness_error() <= 1e-9 * max(scale, 1)).all()


@pytest.mark.parametrize("flavor", ["v1", "v2"])
@pytest.mark.parametrize("tap", [1, 2, 3])
@pytest.mark.parametrize(("attention", "attention_b"), ATTENTIONS)
def test_w_is_the_product_of_dynamic_matrices(flavor, tap, attention, attention_b):
    for (width, heads), position, maxout in product(SIZES, POSITIONS, [1, 2]):
        config = tiny_config(
            flavor=flavor,
            tap=tap,
            width=width,
            num_heads=heads,
            position=position,
            maxout=maxout,
            attention=attention,
            attention_b=attention_b,
            # Small gains and feature scales keep W(x) of random weights within a few magnitudes.
            gain=1.0,
            prior_gain=4.0,
            feature_scale=2.0,
            logit_scale=0.5,
        )
        check(randomize(create_model(config), seed=width).double().eval(), flavor, tap)


def test_unfrozen_gradient_is_not_w(model, images):
    """What a completeness test cannot see: without freezing the rows are others."""
    result = explain(model, images, 0)
    encoded = torch.cat([images, 1 - images], 1).requires_grad_()
    (unfrozen,) = torch.autograd.grad(model.from_encoded(encoded)[:, 0].sum(), encoded)
    assert (unfrozen - result.weights).abs().max() > 0.1 * result.weights.abs().max()


PAPER_MODELS = [n for n in list_models() if n.startswith("bcos_vit") and not needs_backbone(n)]


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_real_models_are_complete_in_float32(name):
    # Without the logit bias: at random weights its digits would swallow the evidence's.
    model = create_model(name, num_classes=4, logit_bias=0.0).eval()
    result = explain(model, torch.rand(1, 3, 224, 224))
    assert result.logit.abs().item() > 1e-6
    assert (result.completeness_error() <= 1e-3 * result.logit.abs()).all()

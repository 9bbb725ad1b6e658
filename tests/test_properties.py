"""What holds for every shape, target, dtype and config, on examples that hypothesis draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bcosvit import DenseNetConfig, ModelConfig, StemConfig, create_model, explain
from bcosvit.nn import BcosConv2d, BcosLinear, frozen_view
from tests.conftest import randomize, small_config

# The same examples in every run; deadlines would depend on the machine.
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)

SMALL = st.integers(1, 4)


def refusal(make) -> str | None:
    """What a ``ValueError`` says, if there is one; anything else fails."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def assert_linear(layer: torch.nn.Module, x: torch.Tensor) -> None:
    """The frozen view at x is linear, and at x it gives what the layer gives."""
    view, out = frozen_view(layer), layer(x)
    x = x.clone().requires_grad_()
    seeds = torch.randn_like(out)
    (row,) = torch.autograd.grad((view(x) * seeds).sum(), x)
    torch.testing.assert_close((row * x).sum(), (out * seeds).sum(), rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(shape=st.tuples(SMALL, SMALL, SMALL), out=SMALL, b=st.floats(1, 4), maxout=st.integers(1, 3))
def test_linear_layers(shape, out, b, maxout):
    layer = BcosLinear(shape[-1], out, b=b, maxout=maxout).double()
    x = torch.randn(shape, dtype=torch.float64)
    assert layer(x).shape == (*shape[:-1], out)
    assert_linear(layer, x)


@EXAMPLES
@given(data=st.data())
def test_convolutions(data):
    groups = data.draw(st.integers(1, 2))
    inputs, outputs = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel, stride, padding, dilation = (
        data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))
        for low, high in ((1, 3), (1, 3), (0, 2), (1, 2))
    )
    size = data.draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    b, maxout = data.draw(st.floats(1, 3)), data.draw(st.integers(1, 2))
    layer = BcosConv2d(inputs, outputs, kernel, **options, b=b, maxout=maxout).double()
    x = torch.randn(2, inputs, *size, dtype=torch.float64)
    plain = torch.nn.Conv2d(inputs, outputs, kernel, **options).double()
    assert layer(x).shape == plain(x).shape
    assert_linear(layer, x)


TARGETS = st.one_of(
    st.none(),
    st.integers(-3, 8),
    st.booleans(),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.just("all"),
    st.lists(st.integers(-1, 6), max_size=4).map(torch.tensor),
    st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), max_size=4).map(torch.tensor),
)


@pytest.fixture(scope="module")
def shared_model():
    torch.manual_seed(0)
    return randomize(create_model(small_config(depth=1))).double().eval()


@EXAMPLES
@given(target=TARGETS)
def test_targets_are_explained_or_refused(shared_model, target):
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    classes = shared_model.config.num_classes
    refused = refusal(lambda: explain(shared_model, images, target))
    if refused is not None:
        assert "\n" not in refused
        assert isinstance(target, torch.Tensor) or (target is not None and target != "all")
        return
    found = explain(shared_model, images, target)
    assert found.target.min() >= 0 and found.target.max() < classes
    assert found.map.shape[0] == 3 and found.map.isfinite().all()
    assert (found.completeness_error() < 1e-9).all()


@settings(EXAMPLES, max_examples=12)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    batch=st.integers(1, 3),
    scale=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_dtypes(dtype, batch, scale):
    model = randomize(create_model(small_config(depth=1))).to(dtype).eval()
    images = scale * torch.rand(batch, 3, 16, 16, dtype=dtype)
    found = explain(model, images)
    assert found.map.dtype == dtype and found.map.shape == (batch, 16, 16)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    size = found.logit.abs().max().clamp_min(1.0)
    assert (found.completeness_error() <= tolerance * size).all()


NUMBERS = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([10**9, 10**18, math.inf, math.nan, 0.5, None, "x", [], True]),
)


FIELDS = (
    *("width", "num_heads", "depth", "mlp_ratio", "maxout", "b", "patch", "eps", "image_size"),
    *("num_classes", "gain", "layer_scale", "logit_scale", "tap"),
)


@EXAMPLES
@given(
    options=st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, NUMBERS)),
    dense=st.booleans(),
)
def test_configs_are_refused_in_one_sentence_or_can_be_built(options, dense):
    stem = StemConfig(widths=(4,))
    backbone = DenseNetConfig(growth=2, blocks=(1, 1, 1), stem_width=4) if dense else stem
    fields = {"width": 4, "num_heads": 1, "depth": 1, "image_size": 16, "backbone": backbone}
    refused = refusal(lambda: ModelConfig(**{**fields, **options}))
    if refused is not None:
        assert "\n" not in refused and len(refused) < 600
        return
    config = ModelConfig(**{**fields, **options})
    if config.depth > 3:
        return  # it can be built, but not at once
    with torch.device("meta"):
        model = create_model(config)
    assert model.config == config

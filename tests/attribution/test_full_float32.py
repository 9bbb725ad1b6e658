"""Explanations compute in all of float32, and never touch what the process is set to."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcosvit import bcosify, create_model, explain, frozen_view
from bcosvit.attribution.inherent import CompiledInherent
from bcosvit.attribution.layers import input_contributions, token_contributions
from bcosvit.ops import products
from tests.conftest import randomize, small_config

aten = torch.ops.aten
RUNS = [
    lambda model, images: explain(model, images),
    lambda model, images: explain(model, images, "all"),
    lambda model, images: token_contributions(model, images, 0),
    lambda model, images: input_contributions(model, images, 1, 0),
]


@pytest.fixture
def model(model):
    return model.float()


@pytest.fixture
def images(images):
    return images.float()


def settings() -> tuple[str, ...]:
    read = torch._C._get_fp32_precision_getter
    return tuple(read(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv"))


@pytest.fixture(params=["highest", "high", "medium", "new"])
def before(request):
    """PyTorch as somebody has set it; the two ways to do so exclude each other."""
    if request.param == "new":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(request.param)
    yield settings()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def watched(monkeypatch):
    """Whether each product of float32 was computed in all of float32."""
    full = []
    original = products._is_full

    def is_full(x, frozen, op):
        found = original(x, frozen, op)
        full.append(found or not products.rounds(x.device.type, op))
        return found

    monkeypatch.setattr(products, "_is_full", is_full)
    return full


@pytest.mark.parametrize("run", RUNS)
def test_explanations_are_exact_under_every_setting(run, model, images, before, watched):
    found = run(model, images)
    scale = found.logit.abs().max() + abs(found.bias)
    assert (found.completeness_error() / scale).max() < 1e-5
    assert watched
    assert all(watched)
    assert settings() == before


class Products(TorchDispatchMode):
    """Records the dtypes of products of matrices."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **kwargs or {})


def test_with_more_classes_than_inputs_of_the_last_layer(images):
    model = randomize(create_model(small_config(num_classes=20, position="emb"))).eval()
    torch.set_float32_matmul_precision("medium")
    try:
        with Products() as products:
            found = explain(model, images, "all")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert products.dtypes == {torch.float64}
    scale = found.logit.abs().max() + abs(found.bias)
    assert (found.completeness_error() / scale).max() < 1e-5


def test_the_settings_are_not_touched_meanwhile(model, images, before):
    """Other threads compute with them."""
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(settings()))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: explain(model, images[:1], 0), range(12)))
    assert set(seen) == {before}


@pytest.mark.slow
@pytest.mark.parametrize("before", ["highest", "high"], indirect=True)
def test_a_compiled_explanation_too(model, images, before):
    found = explain(model, images, method=CompiledInherent(model, backend="aot_eager"))
    scale = found.logit.abs().max() + abs(found.bias)
    assert (found.completeness_error() / scale).max() < 1e-5
    assert settings() == before


def test_layers_of_converted_networks(monkeypatch):
    """Their convolutions, linear layers and attention all go the same way."""
    monkeypatch.setattr(products, "_is_full", lambda x, frozen, op: frozen)
    monkeypatch.setattr(products, "rounds", lambda device, op: True)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, padding="valid"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding="same", groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    model = bcosify(network, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), image_size=16).eval()
    found = explain(model, torch.rand(2, 3, 16, 16), "all")
    assert found.completeness_error().max() < 1e-5


def test_a_convolution_of_torch_in_a_frozen_view(monkeypatch):
    monkeypatch.setattr(products, "_is_full", lambda x, frozen, op: frozen)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False))
    x = torch.randn(1, 3, 6, 6, requires_grad=True)
    y = frozen_view(model)(x)
    assert type(y.grad_fn).__name__ == "_ConvolutionBackward"
    torch.testing.assert_close(y, model(x))
    with pytest.raises(ValueError, match="not dynamic linear"):
        frozen_view(nn.Sequential(nn.Conv2d(3, 4, 3)))

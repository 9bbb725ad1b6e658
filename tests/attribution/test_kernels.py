"""W(x) by the Triton kernels is W(x) by the reference ops, layer upon layer."""

import copy

import pytest
import torch

from bcosvit import create_model, explain
from bcosvit.nn.views import view
from tests.conftest import randomize, small_config, tiny_config

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("options", [{}, {"maxout": 1, "position": "add"}, {"attention_b": 1}])
@pytest.mark.parametrize("config", [small_config, tiny_config])
def test_rows_agree(config, options):
    model = randomize(create_model(config(**options))).to(DEVICE).eval()
    kernels = view(model, mark=lambda module: {"backend": "triton"})
    exact = copy.deepcopy(model).double()
    plain = view(exact, mark=lambda module: {"backend": "reference"})
    side = model.config.image_size[0]
    images = torch.rand(2, 3, side, side, device=DEVICE)
    truth = explain(plain, images.double(), "all")
    single = explain(view(model, mark=lambda module: {"backend": "reference"}), images, "all")
    ours = explain(kernels, images, "all")
    for field in ("logit", "weights", "map"):
        a, b, c = (getattr(each, field).double() for each in (ours, truth, single))
        # What float32 loses in a deep network is not the kernels' doing.
        error, allowed = (a - b).norm() / b.norm(), (c - b).norm() / b.norm()
        assert error < 1e-5 + 4 * allowed, f"{field}: {error:.1e}, reference {allowed:.1e}"

"""The exact core on a GPU; skipped where there is none. By hand: `pytest tests/test_gpu.py`."""

import pytest
import torch

from bcosvit import create_model, explain, explainers
from tests.conftest import randomise, small_config, tiny_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("options", [{}, {"position": "emb"}, {"attention": "standard"}])
@pytest.mark.parametrize("config", [small_config, tiny_config])
def test_gpu_equals_cpu(config, options):
    model = randomise(create_model(config(**options))).double().eval()
    side = model.config.image_size[0]
    images = torch.rand(3, 3, side, side, dtype=torch.float64)
    cpu = explain(model, images, "all")
    gpu = explain(model.cuda(), images.cuda(), "all")
    for field in ("weights", "map", "residual", "logit"):
        torch.testing.assert_close(getattr(gpu, field).cpu(), getattr(cpu, field))
    assert (gpu.completeness_error() < 1e-9 * (1 + gpu.logit.abs())).all()


@pytest.mark.parametrize("family", ["bcos", "conventional"])
def test_every_method_runs(family):
    model = randomise(create_model(small_config(family=family))).cuda().eval()
    images = torch.rand(2, 3, 16, 16, device="cuda")
    for method in explainers(model):
        result = explain(model, images, 1, method)
        assert result.map.device.type == "cuda"
        assert result.map.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bcos_vit_ti_38", "bcos_vit_b_87"])
def test_mixed_precision(name, dtype):
    model = create_model(name, num_classes=4, logit_bias=0.0).cuda().eval()
    images = torch.rand(4, 3, 224, 224, device="cuda")
    exact = explain(model, images)
    assert (exact.completeness_error() < 1e-3 * exact.logit.abs()).all()
    with torch.autocast("cuda", dtype):
        narrow = explain(model, images, exact.target)
    assert narrow.map.isfinite().all()
    cosine = torch.cosine_similarity(narrow.map.flatten(1), exact.map.flatten(1))
    assert (cosine > 0.8).all(), cosine


# What inductor imports warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_training_step_equals_eager():
    model = create_model(small_config()).cuda()
    images = torch.rand(8, 3, 16, 16, device="cuda")
    eager = torch.autograd.grad(model(images).square().sum(), model.head.weight)[0]
    compiled = torch.compile(model)
    fast = torch.autograd.grad(compiled(images).square().sum(), model.head.weight)[0]
    torch.testing.assert_close(fast, eager, rtol=1e-2, atol=1e-2 * eager.abs().max().item())

"""The exact core on a GPU; skipped where there is none. By hand: `pytest tests/test_gpu.py`."""

import pytest
import torch
from torch import nn

from bcosvit import create_model, explain, explainers
from bcosvit.metrics import PixelPerturbation, evaluate
from bcosvit.models import DenseNetConfig
from bcosvit.nn import AvgPool2d, CUDAGraphRunner
from tests.conftest import randomize, small_config, tiny_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("options", [{}, {"position": "emb"}, {"attention": "standard"}])
@pytest.mark.parametrize("config", [small_config, tiny_config])
def test_gpu_equals_cpu(config, options):
    model = randomize(create_model(config(**options))).double().eval()
    side = model.config.image_size[0]
    images = torch.rand(3, 3, side, side, dtype=torch.float64)
    cpu = explain(model, images, "all")
    gpu = explain(model.cuda(), images.cuda(), "all")
    for field in ("weights", "map", "residual", "logit"):
        torch.testing.assert_close(getattr(gpu, field).cpu(), getattr(cpu, field))
    assert (gpu.completeness_error() < 1e-9 * (1 + gpu.logit.abs())).all()


@pytest.mark.parametrize("family", ["bcos", "conventional"])
def test_every_method_runs(family):
    model = randomize(create_model(small_config(family=family))).cuda().eval()
    images = torch.rand(2, 3, 16, 16, device="cuda")
    for method in explainers(model):
        result = explain(model, images, 1, method)
        assert result.map.device.type == "cuda"
        assert result.map.isfinite().all()


@pytest.mark.parametrize("windows", [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_average_pooling(windows, layout):
    x = torch.rand(2, 8, 12, 12, dtype=torch.float64)
    grad = torch.rand_like(AvgPool2d(*windows)(x))
    (truth,) = torch.autograd.grad(nn.AvgPool2d(*windows)(x.requires_grad_()), x, grad)
    there = x.detach().cuda().to(memory_format=layout).requires_grad_()
    (found,) = torch.autograd.grad(AvgPool2d(*windows)(there), there, grad.cuda())
    torch.testing.assert_close(found.cpu(), truth)


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


# What inductor imports warns of itself, and inductor of what it would like to round.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")
def test_compiled_training_step_equals_eager():
    model = create_model(small_config()).cuda()
    images = torch.rand(8, 3, 16, 16, device="cuda")
    eager = torch.autograd.grad(model(images).square().sum(), model.head.weight)[0]
    compiled = torch.compile(model)
    fast = torch.autograd.grad(compiled(images).square().sum(), model.head.weight)[0]
    torch.testing.assert_close(fast, eager, rtol=1e-2, atol=1e-2 * eager.abs().max().item())


NETWORKS = {
    "vit": lambda: create_model(small_config()),
    "on a frozen backbone": lambda: create_model(tiny_config()),
    "densenet": lambda: create_model(
        DenseNetConfig(flavor="v2", blocks=(2, 2), growth=8, stem_width=16, num_classes=4)
    ),
}


def _steps(model, run, batches):
    """Losses and, at the end, all that training changed."""
    # Its steps are small whatever the gradients of a toy.
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    losses = []
    for images in batches:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(images).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return torch.stack(losses), {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_replayed_training_is_training(name):
    model = NETWORKS[name]().cuda().train()
    side = 32 if name == "densenet" else model.config.image_size[0]
    # The last batch is smaller, as at the end of an epoch.
    batches = [torch.rand(n, 3, side, side, device="cuda") for n in (8, 8, 8, 5)]
    start = {k: v.clone() for k, v in model.state_dict().items()}
    losses, trained = _steps(model, model, batches)
    model.load_state_dict(start)
    again, replayed = _steps(model, CUDAGraphRunner(model), batches)
    assert losses.unique().numel() == len(losses)
    torch.testing.assert_close(again, losses, rtol=1e-2, atol=0)
    for key, tensor in trained.items():
        torch.testing.assert_close(replayed[key], tensor, rtol=1e-2, atol=1e-3, msg=key)


def test_replayed_inference_follows_the_weights():
    model = NETWORKS["densenet"]().cuda().eval()
    replay = CUDAGraphRunner(model)
    for _ in range(2):
        with torch.no_grad():
            for n in (4, 4, 3):
                images = torch.rand(n, 3, 32, 32, device="cuda")
                torch.testing.assert_close(replay(images), model(images), rtol=1e-4, atol=1e-5)
            model.classifier.weight.normal_()


def test_evaluation_equals_cpu(monkeypatch):
    # Convolutions would round to ten bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = randomize(create_model(small_config())).eval()
    images = torch.rand(18, 3, 16, 16)
    # All are right, so that there are pictures to perturb; the last batch is smaller.
    labels = model(images).argmax(1).tolist()
    data = [(images[n], label, str(n)) for n, label in enumerate(labels)]

    def measured():
        metric = PixelPerturbation(images=10)
        return evaluate(model, data, metrics=[metric], batch_size=4)

    cpu = measured()
    model.cuda()
    gpu = measured()
    for mine, theirs in zip(gpu.accuracy.predictions, cpu.accuracy.predictions, strict=True):
        assert (mine.key, mine.predicted) == (theirs.key, theirs.predicted)
        assert mine.log_odds == pytest.approx(theirs.log_odds, rel=1e-3, abs=1e-3)
    assert [image.key for image in gpu["perturbation"].images] == [
        image.key for image in cpu["perturbation"].images
    ]
    torch.testing.assert_close(
        gpu["perturbation"].confidences["inherent"],
        cpu["perturbation"].confidences["inherent"],
        rtol=0,
        atol=0.05,
    )

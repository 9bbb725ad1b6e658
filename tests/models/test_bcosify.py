"""Conversion of other libraries' models: equality, completeness, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcosvit
from bcosvit import BcosifySchedule, bcosify
from bcosvit._torchvision import torchvision
from tests.reference import converted

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Name -> image size. Sizes are small; models with a fixed size are built for it where they can be.
QUICK = {
    "torchvision:resnet18": 64,
    "torchvision:mobilenet_v2": 64,
    "torchvision:mobilenet_v3_small": 64,
    "torchvision:shufflenet_v2_x1_0": 64,
    "torchvision:regnet_y_400mf": 64,
    "timm:tf_efficientnet_lite0": 72,
    "timm:vit_tiny_patch16_224": 48,
    "timm:deit_tiny_patch16_224": 48,
    "timm:edgenext_xx_small": 64,
}
SLOW = {
    "torchvision:resnet50": 64,
    "torchvision:densenet121": 64,
    "torchvision:efficientnet_b0": 64,
    "torchvision:vgg16_bn": 32,
    "torchvision:convnext_tiny": 64,
    "torchvision:vit_b_16": 32,
    "torchvision:swin_t": 64,
    "timm:mixer_s32_224": 224,
    "timm:tiny_vit_5m_224": 224,
}
MODELS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def original(name: str) -> nn.Module:
    """A model with random weights and statistics, so that no constant is zero by luck."""
    library, _, kind = name.partition(":")
    size = (QUICK | SLOW)[name]
    if library == "torchvision":
        sized = {"image_size": size} if kind.startswith("vit") else {}
        model = torchvision.models.get_model(kind, weights=None, num_classes=5, **sized)
    else:
        timm = pytest.importorskip("timm")
        sized = {"img_size": size} if kind.startswith(("vit", "deit")) else {}
        model = timm.create_model(kind, num_classes=5, **sized)
    return randomized(model).double().eval()


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            else:
                tensor.add_(noise * (0.02 if tensor.ndim > 1 else 0.3))
    return model


def normalized(images: Tensor) -> Tensor:
    mean, std = (images.new_tensor(s).view(3, 1, 1) for s in (MEAN, STD))
    return (images - mean) / std


@pytest.mark.parametrize("b", [None, 1.0], ids=["linear", "bcos"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_and_complete(name: str, b: float | None) -> None:
    model, size = original(name), (QUICK | SLOW)[name]
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        expected = model(normalized(images))
    copy = bcosify(model, mean=MEAN, std=STD, image_size=size, b=b)
    with torch.no_grad():
        torch.testing.assert_close(copy(images), expected, rtol=1e-9, atol=1e-9)
    attribution = bcosvit.explain(copy, images)
    scale = expected.abs().max().item()
    assert attribution.completeness_error().max().item() <= 1e-9 * scale
    assert attribution.residual is not None and attribution.residual.abs().min().item() > 0


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:vit_tiny_patch16_224"])
def test_no_residual_without_constants(name: str) -> None:
    model, size = original(name), QUICK[name]
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    copy = bcosify(model, mean=MEAN, std=STD, image_size=size, b=1.0)
    schedule = BcosifySchedule(end=0.4)
    for progress in (0.1, 0.3):
        schedule.apply(copy, progress)
        attribution = bcosvit.explain(copy, images)
        error = attribution.completeness_error() / attribution.logit.abs()
        assert error.max().item() <= 1e-9
        assert attribution.residual.abs().min().item() > 0
    schedule.apply(copy, 0.5)
    assert (copy.fade.item(), copy.b.item()) == (0.0, 2.0)
    attribution = bcosvit.explain(copy, images)
    assert (attribution.residual == 0).all()
    assert (attribution.completeness_error() <= 1e-9 * attribution.logit.abs()).all()


class Refused(nn.Module):
    """A network whose only nonlinearity is ``function``."""

    def __init__(self, function) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = Called(function)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.conv(x)).mean((2, 3)))


class Called(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (torch.sigmoid, "sigmoid at 'act'"),
        (lambda x: x + torch.sin(x), "sin at 'act'"),
        (lambda x: x * x, "mul at 'act'"),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=2.0), "pad at 'act'"),
        (lambda x: x.clamp(1, 2), "clamp at 'act'"),
    ],
    ids=["sigmoid", "sin", "square", "pad", "clamp"],
)
def test_refused_by_name_and_place(function, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        bcosify(Refused(function), image_size=16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sin(x),
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: torch.sigmoid(x).mean(1, keepdim=True) * x,
        lambda x: x - x.mean((2, 3), keepdim=True) + 0.5,
        lambda x: x.relu_().add_(1),
        F.hardtanh,
        F.elu,
        F.mish,
        torch.tanh,
    ],
)
def test_gates_may_be_anything(function) -> None:
    model = randomized(Refused(function)).double().eval()
    images = torch.rand(2, 3, 12, 16, dtype=torch.float64)
    copy = bcosify(model, mean=MEAN, std=STD, image_size=16)
    with torch.no_grad():
        torch.testing.assert_close(copy(images), model(normalized(images)))
    assert bcosvit.explain(copy, images).completeness_error().max().item() < 1e-12


def test_original_is_untouched() -> None:
    model = original("torchvision:resnet18").train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    copy = bcosify(model, mean=MEAN, std=STD, image_size=64)
    with torch.no_grad():
        for tensor in copy.parameters():
            tensor.zero_()
    assert model.training
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


MOBILENET = [
    # kernel, width within, width, squeeze and excitation, activation, stride
    (3, 8, 8, False, "RE", 1),
    (3, 16, 8, True, "HS", 2),
    (5, 24, 8, True, "HS", 1),
]


def small_mobilenet() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    settings, width = [], 8
    for kernel, within, out, squeezes, act, stride in MOBILENET:
        row = (width, kernel, within, out, squeezes, act, stride, 1, 1.0)
        settings.append(InvertedResidualConfig(*row))
        width = out
    return MobileNetV3(settings, last_channel=10, num_classes=5)


def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=8,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=12,
        mlp_dim=20,
        num_classes=5,
    )


def reference_of(name: str, encoded, setting) -> converted.Affine:
    if name == "resnet18":
        return converted.resnet18(encoded, setting)
    if name == "vit":
        return converted.vit(encoded, setting, layers=2, heads=2, patch=4)
    blocks, width = [], 8
    for kernel, within, out, squeezes, act, stride in MOBILENET:
        adds = stride == 1 and out == width
        blocks.append((kernel, within != width, squeezes, act == "HS", stride, adds))
        width = out
    return converted.mobilenet_v3(encoded, setting, blocks)


@pytest.mark.parametrize(
    ("b", "fade"), [(None, 1.0), (None, 0.3), (1.0, 1.0), (1.6, 0.3), (2.0, 0.0)]
)
@pytest.mark.parametrize(
    "name", ["mobilenet_v3", "vit", pytest.param("resnet18", marks=pytest.mark.slow)]
)
def test_rows_of_w_are_products_of_matrices(name: str, b: float | None, fade: float) -> None:
    make = {
        "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
        "mobilenet_v3": small_mobilenet,
        "vit": small_vit,
    }[name]
    model = randomized(make()).double().eval()
    size = 8 if name == "vit" else 16
    copy = bcosify(model, mean=MEAN, std=STD, image_size=size, b=b, fade=fade)
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    found = bcosvit.explain(copy, images, target="all")
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    for i, image in enumerate(copy.encoding(images).numpy()):
        setting = converted.Setting(weights, np.array(MEAN), np.array(STD), fade, b)
        expected = reference_of(name, image, setting)
        np.testing.assert_allclose(found.logit[i], expected.value, rtol=1e-8, atol=1e-12)
        rows = found.weights[i].flatten(1).numpy()
        scale = np.abs(expected.matrix).max()
        np.testing.assert_allclose(rows, expected.matrix, rtol=0, atol=1e-9 * scale)
        np.testing.assert_allclose(found.residual[i], expected.offset, rtol=1e-8, atol=1e-12)

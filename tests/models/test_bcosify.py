"""Conversion of other libraries' models: equality, completeness, and what is refused."""

import copy as pycopy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcosvit
from bcosvit import BcosifySchedule, bcosify
from bcosvit._torchvision import torchvision
from bcosvit.nn.bcosified import ConvertedBatchNorm
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


def test_a_schedule_may_jump() -> None:
    schedule = BcosifySchedule(start=0.5, end=0.5)
    assert [schedule.at(p) for p in (0.0, 0.4, 0.5, 1.0)] == [(1.0, 1.0)] * 2 + [(0.0, 2.0)] * 2
    assert BcosifySchedule(start=0.2, end=0.6).at(0.4) == pytest.approx((0.5, 1.5))


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
        (lambda x: x**3, "__pow__ at 'act'"),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=2.0), "pad at 'act'"),
        (lambda x: x.clamp(1, 2), "clamp at 'act'"),
        (lambda x: x.to(torch.int32).float(), "to at 'act'"),
    ],
    ids=["sigmoid", "sin", "square", "power", "pad", "clamp", "integers"],
)
def test_refused_by_name_and_place(function, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        bcosify(Refused(function), image_size=16)


def attention_by_hand(x: Tensor) -> Tensor:
    query, key = x.flatten(2).transpose(1, 2).chunk(2, -1)
    matrix = (query @ key.transpose(1, 2)).softmax(-1)
    return (matrix @ x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sin(x),
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: torch.sigmoid(x).mean(1, keepdim=True) * x,
        lambda x: x - x.mean((2, 3), keepdim=True) + 0.5,
        lambda x: x.relu_().add_(1),
        lambda x: torch.cat([x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sin().exp()] * 2, 1),
        lambda x: torch.cat([x.chunk(2, 1)[0] * F.silu(x.chunk(2, 1)[1])] * 2, 1),
        lambda x: attention_by_hand(x),
        lambda x: torch.addcmul(x, x.sigmoid(), x, value=0.5),
        lambda x: x.flatten(2).reshape(x.shape) + x.flatten(1).view_as(x),
        lambda x: torch.div(torch.mul(input=x, other=torch.add(x, other=3.0).sin()), other=2.0),
        lambda x: torch.einsum("bchw,dc->bdhw", x, torch.eye(4, dtype=x.dtype)),
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


def test_samples_that_change_their_order_are_refused() -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            both = self.conv(torch.cat([x, x.flip(-1)])).relu()
            return sum(half.mean((2, 3)) for half in both.chunk(2))

    with pytest.raises(ValueError, match="samples may not lie in order"):
        bcosify(randomized(Flips()), image_size=16)


def test_original_is_untouched() -> None:
    model = original("torchvision:resnet18").train()
    model.bn1.eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    copy = bcosify(model, mean=MEAN, std=STD, image_size=64)
    with torch.no_grad():
        for tensor in copy.parameters():
            tensor.zero_()
    assert model.training and not model.bn1.training
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


@pytest.mark.parametrize(
    ("name", "any_size"),
    [("timm:tf_efficientnet_lite0", True), ("timm:vit_tiny_patch16_224", False)],
)
def test_other_image_sizes(name: str, any_size: bool) -> None:
    model, size = original(name), QUICK[name]
    copy = bcosify(model, mean=MEAN, std=STD, image_size=size)
    assert copy.config.any_size is any_size
    # Odd sizes are padded asymmetrically.
    images = torch.rand(1, 3, size + 9, size + 14, dtype=torch.float64)
    if any_size:
        with torch.no_grad():
            torch.testing.assert_close(copy(images), model(normalized(images)))
        assert bcosvit.explain(copy, images).completeness_error().item() < 1e-9
    else:
        with pytest.raises(ValueError, match=f"converted for {size}×{size}"):
            copy(images)


def test_sizes_that_take_another_way_are_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            if x.shape[-1] > 100:
                x = x * 2
            return x.mean((2, 3))

    model = Branches().double()
    copy = bcosify(model, mean=MEAN, std=STD, image_size=24)
    assert copy.config.any_size
    images = torch.rand(1, 3, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(copy(images), model(normalized(images)))
    with pytest.raises(ValueError, match="another way"):
        copy(torch.rand(1, 3, 120, 120, dtype=torch.float64))


@pytest.mark.parametrize("name", ["timm:edgenext_xx_small", "torchvision:mobilenet_v3_small"])
def test_saved_and_loaded(name: str, tmp_path) -> None:
    copy = bcosify(original(name).float(), image_size=64, b=1.0, fade=0.5)
    copy.b.fill_(1.5)
    images = torch.rand(5, 3, 64, 64)
    bcosvit.save(copy, tmp_path / "model.safetensors")
    loaded = bcosvit.load(tmp_path / "model.safetensors")
    assert loaded.config == copy.config
    with torch.no_grad():
        assert torch.equal(loaded(images), copy(images))
        assert torch.equal(pickle.loads(pickle.dumps(copy))(images), copy(images))
    loaded.classes = ("cat",) * loaded.config.num_classes
    loaded.reset_classifier(3)
    assert loaded.classes is None
    assert loaded(images).shape == (5, 3)
    bcosvit.save(loaded, tmp_path / "other.safetensors")
    assert torch.equal(bcosvit.load(tmp_path / "other.safetensors")(images), loaded(images))
    assert loaded.forward_features(images).ndim == 4


@pytest.mark.parametrize(
    "wrong",
    [
        ["function", "torch.load", [{"variable": 0}], {}],
        ["function", "os.system", ["true"], {}],
        ["layer", "__class__", [{"variable": 0}], {}],
        ["get", "__class__.__init__", [], {}],
    ],
)
def test_files_cannot_call_what_they_like(wrong) -> None:
    copy = bcosify(Refused(F.relu), image_size=16)
    program = pycopy.deepcopy(copy.config.program)
    program["instructions"].insert(0, [99, *wrong])
    with pytest.raises(ValueError, match="is no function"):
        bcosvit.create_model(dataclasses.replace(copy.config, program=program))


def test_a_network_that_was_cut_before_its_head_can_be_pickled() -> None:
    copy = bcosify(Refused(F.relu), image_size=16)
    encoded = copy.encoding(torch.rand(1, 3, 16, 16))
    inputs = copy.head_inputs(encoded)
    for twin in (pickle.loads(pickle.dumps(copy)), pycopy.deepcopy(copy)):
        assert torch.equal(twin.head_inputs(encoded), inputs)


@pytest.mark.parametrize("value", ["x", None, 2.0])
def test_files_cannot_give_layers_other_than_results(value) -> None:
    copy = bcosify(Refused(F.relu), image_size=16, b=1.0)
    program = pycopy.deepcopy(copy.config.program)
    (first, *_) = [i for i in program["instructions"] if i[1] == "layer" and len(i[3]) >= 3]
    first[3][-1] = value
    with pytest.raises(ValueError, match="instead of results"):
        dataclasses.replace(copy.config, program=program)


@pytest.mark.slow
def test_training_compiles_once() -> None:
    copy = bcosify(original("torchvision:mobilenet_v3_small").float(), image_size=32, b=1.0)
    copy.train()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(copy, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.01)
    before = copy.network.state_dict()["original.features.0.1.running_square"].clone()
    for progress in (0.0, 0.1, 0.2, 1.0):
        BcosifySchedule(end=0.3).apply(compiled, progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(compiled(torch.rand(4, 3, 32, 32)), torch.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.isfinite().all() for p in copy.parameters())
    assert len(compilations) == 1
    after = copy.network.state_dict()["original.features.0.1.running_square"]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("fade", [1.0, 0.4])
@pytest.mark.parametrize("uncentered", [False, True])
def test_batch_norms_train_on_their_batch(uncentered: bool, fade: float) -> None:
    norm = ConvertedBatchNorm(3, uncentered=uncentered).double().train()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64) + 2
    found = norm(x, torch.tensor(fade, dtype=torch.float64))
    square, mean = x.square().mean((0, 2, 3)), x.mean((0, 2, 3))
    power = square if uncentered else square - mean.square()
    shift = fade * (norm.bias - (0 if uncentered else mean / (power + 1e-5).sqrt() * norm.weight))
    scale = norm.weight / (power + 1e-5).sqrt()
    torch.testing.assert_close(found, x * scale.view(3, 1, 1) + shift.view(3, 1, 1))
    if fade == 1 and not uncentered:
        expected = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        torch.testing.assert_close(found, expected)


def test_layers_that_stay_linear() -> None:
    copy = bcosify(original("timm:vit_tiny_patch16_224"), image_size=48, b=1.0, linear=["*.fc2"])
    block = copy.network.original.blocks.get_submodule("0")
    assert block.attn.proj.bcos and block.mlp.fc1.bcos
    assert not block.attn.qkv.bcos and not block.mlp.fc2.bcos
    assert copy.get_classifier() is copy.network.original.head

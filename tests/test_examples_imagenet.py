"""The example that trained the shipped ImageNet model trains, converts and continues."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import bcosvit
from bcosvit.data.images import to_tensor
from bcosvit.data.scenes import Scenes
from bcosvit.shipped import DEFAULT

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the example, whose modules import each other by their names."""
    monkeypatch.syspath_prepend(EXAMPLE)
    names = [path.stem for path in EXAMPLE.glob("*.py")]
    assert not sys.modules.keys() & set(names)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def run(script: str, *arguments: object) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, EXAMPLE / script, *map(str, arguments)]
    done = subprocess.run(command, env=env | {"OMP_NUM_THREADS": "1"}, text=True, stderr=-1)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_trains_converts_and_continues(tmp_path: Path, example):
    convert, network = example("convert"), example("network")
    folder, data, out = tmp_path / "scenes", tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    scenes = Scenes("train", size=96, length=12)
    for i in range(len(scenes)):
        scenes[i].image.save(folder / f"{i}.png")
    (folder / "broken.png").write_text("no image")
    teacher, classes = tmp_path / "teacher.pth", tmp_path / "classes.txt"
    torch.manual_seed(0)
    torch.save(
        {f"_{k}": v for k, v in example("efficientnet").EfficientNet().state_dict().items()},
        teacher,
    )
    classes.write_text("".join(f"class {i}\n" for i in range(1000)))
    run("photographs.py", "train", data, folder, "--workers", 1)
    assert np.load(data / "photographs-meta.npy").shape == (12, 2)

    tiny = ("--phases", "0.5:32:4,1:64:4", "--held-out", 4, "--device", "cpu", "--no-compile")
    tiny = (data, "--teacher", teacher, *tiny)
    # The averaged weights follow every fourth step.
    run("distill.py", *tiny, "--steps", 4, "--ramp", 0, "--fade", 0, "--out", out)
    run("convert.py", out / "final.safetensors", tmp_path / "model.safetensors",
        "--classes", classes, "--float32")  # fmt: skip
    images = torch.stack([to_tensor(scenes[i].image) for i in range(2)])
    student = network.Student(example("efficientnet").EfficientNet().state_dict()).eval()
    patches = network.patches(network.encode(images))

    def logits(path: Path) -> torch.Tensor:
        convert.load_student(path, student)
        with torch.no_grad():
            return student(patches)[0]

    model = bcosvit.load(tmp_path / "model.safetensors")
    expected = logits(out / "final.safetensors")
    started = torch.load(teacher, weights_only=True)["_conv_head.weight"].flatten(1)
    assert not torch.equal(student.head.weight, started)
    near = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, **near)
    torch.testing.assert_close(logits(tmp_path / "model.safetensors"), expected, **near)
    assert bcosvit.explain(model, images).completeness_error().max() < 1e-4

    run("convert.py", out / "final.safetensors", tmp_path / "half.safetensors")
    again = tmp_path / "again"
    resume = ("--resume", tmp_path / "half.safetensors", "--steps", 1, "--lr", "1:0")
    run("distill.py", *tiny, *resume, "--out", again)
    torch.testing.assert_close(
        logits(again / "final.safetensors"),
        logits(tmp_path / "half.safetensors"),
        **near,
    )
    last = json.loads((again / "log.jsonl").read_text().splitlines()[-1])
    assert last["at"] == "final" and last["views"] == 4


def test_transformer_blocks_convert_and_come_back(tmp_path: Path, example):
    convert, network = example("convert"), example("network")
    torch.manual_seed(0)
    shape = network.TransformerShape(depth=convert.depth_of(DEFAULT))
    student = network.Student(example("efficientnet").EfficientNet().state_dict(), shape).eval()
    convert.load_student(DEFAULT, student)
    images = torch.rand(1, 3, 224, 224)
    patches = network.patches(network.encode(images))
    with torch.no_grad():
        before, _ = student(patches)
        for block in student.transformer_blocks:
            block.attention_scale.normal_()
            block.mlp_scale.normal_()
            block.prior.add_(torch.randn_like(block.prior))
        expected, _ = student(patches)
    assert (before - expected).abs().max() > 0.1 * before.abs().max() > 0
    model = convert.to_library(student)
    near = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, **near)
    path = tmp_path / "model.safetensors"
    bcosvit.save(model, path)
    assert convert.depth_of(path) == shape.depth > 0
    again = network.Student(example("efficientnet").EfficientNet().state_dict(), shape).eval()
    convert.load_student(path, again)
    with torch.no_grad():
        torch.testing.assert_close(again(patches)[0], expected, **near)


def test_half_precision_holds_large_mean_squares(example):
    convert, network = example("convert"), example("network")
    torch.manual_seed(0)
    student = network.Student(example("efficientnet").EfficientNet().state_dict()).eval()
    patches = network.patches(network.encode(torch.rand(1, 3, 32, 32)))
    with torch.no_grad():
        norm = student.blocks[3].expand_norm
        norm.mean_square[0] = 2e5
        norm.gain[0] = 1e3
        student.blocks[2].depthwise_norm.mean_square[1] = 7e4
        student.blocks[2].depthwise_norm.gain[1] = 1e3
        before, _ = student(patches)
        convert.fit_half(student)
        after, _ = student(patches)
    assert all(tensor.half().isfinite().all() for tensor in student.state_dict().values())
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kernel", "stride", "size", "channels"), [(3, 1, 6, 40), (7, 2, 9, 24)])
def test_depthwise_kernels(example, kernel: int, stride: int, size: int, channels: int):
    module: ModuleType = example("depthwise_triton")
    if module.triton is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is needed.")
    x = torch.randn(2, size, size, channels, requires_grad=True)
    weight = torch.randn(kernel**2, channels, requires_grad=True)
    found = module.depthwise_forward(x, weight, kernel, stride)
    padding = example("efficientnet").same_padding(size, kernel, stride) * 2
    kernels = weight.t().reshape(channels, 1, kernel, kernel)
    padded = F.pad(x.permute(0, 3, 1, 2), padding)
    expected = F.conv2d(padded, kernels, stride=stride, groups=channels).permute(0, 2, 3, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight), grad, retain_graph=True),
        torch.autograd.grad(expected, (x, weight), grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # The gradient of a function of a gradient.
    seconds = []
    for output in (found, expected):
        (row,) = torch.autograd.grad((output * grad).sum(), x, create_graph=True)
        seconds += torch.autograd.grad((row * x.detach()).clamp(min=0).square().sum(), weight)
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-3, atol=1e-3)


def test_loss_on_explanations(example):
    guide, convert, network = example("guide"), example("convert"), example("network")
    torch.manual_seed(0)
    shape = network.TransformerShape(depth=convert.depth_of(DEFAULT))
    student = network.Student(example("efficientnet").EfficientNet().state_dict(), shape).eval()
    convert.load_student(DEFAULT, student)
    views, classes = torch.rand(4, 3, 64, 64), torch.tensor([3, 1, 4, 5])
    maps = guide.contributions(student, views, classes)
    with torch.no_grad():
        logits, _ = student(network.patches(network.encode(views)))
    chosen = logits.gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(maps.sum((1, 2)), chosen, rtol=1e-4, atol=1e-4)
    seen = F.one_hot(classes, 1000) * 20.0
    loss, share = guide.energy_loss(student, views, seen)
    assert 0 < share < 1
    torch.testing.assert_close(loss.detach(), 1 - share)
    loss.backward()
    for layer in (student.stem, student.blocks[5].project, student.head, student.fc):
        assert layer.weight.grad.isfinite().all() and layer.weight.grad.any()
    # Nothing can be said where all four photographs are of one kind.
    assert guide.energy_loss(student, views, seen[:1].expand(4, -1))[0] == 0


def test_near_copies_are_excluded(tmp_path: Path, example):
    photographs = example("photographs")
    picture = Scenes("train", size=256)[0].image
    other = Scenes("train", size=256)[1].image
    picture.resize((240, 240), Image.Resampling.BICUBIC).save(tmp_path / "copy.jpg", quality=60)
    excluded = photographs.hashes(picture.crop((16, 16, 240, 240)))
    assert photographs.decode(tmp_path / "copy.jpg", excluded) is None
    canvas, width, portrait = photographs.decode(tmp_path / "copy.jpg", photographs.hashes(other))
    assert canvas.shape == (176, 240, 3) and width == 176 and not portrait
    assert canvas[:, :176].any() and not canvas[:, 176:].any()

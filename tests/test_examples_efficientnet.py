"""EfficientNet-lite: its shapes, its padding, its checkpoints' names, and its conversion."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bcosvit

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples/imagenet/efficientnet.py"))
LITE, MEAN, STD = EXAMPLE["LITE"], EXAMPLE["MEAN"], EXAMPLE["STD"]
EfficientNet, EfficientNetConfig = EXAMPLE["EfficientNet"], EXAMPLE["EfficientNetConfig"]
SameConv2d, same_padding = EXAMPLE["SameConv2d"], EXAMPLE["same_padding"]
efficientnet_state = EXAMPLE["efficientnet_state"]
TINY = EfficientNetConfig(width=0.25, depth=0.5, num_classes=7, stem_width=8, head_width=32)


@pytest.mark.parametrize(
    ("name", "millions", "blocks", "widths"),
    [
        ("efficientnet_lite0", 4.652, 16, [16, 24, 40, 80, 112, 192, 320]),
        ("efficientnet_lite2", 6.092, 21, [16, 24, 48, 88, 120, 208, 352]),
        ("efficientnet_lite4", 13.007, 30, [24, 32, 56, 112, 160, 272, 448]),
    ],
)
def test_published_sizes(name: str, millions: float, blocks: int, widths: list[int]) -> None:
    with torch.device("meta"):
        model = EfficientNet(LITE[name])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 3) == millions
    assert len(model.blocks) == blocks
    assert [stage.width for stage in model.config.stages()] == widths


@pytest.mark.parametrize("size", [7, 8, 9, 16])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (1, 1)])
def test_same_padding_puts_the_larger_half_behind(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel, stride)
    assert 0 <= after - before <= 1
    conv = SameConv2d(2, 3, kernel, stride)
    x = torch.randn(1, 2, size, size)
    out = conv(x)
    assert out.shape[2:] == (-(-size // stride),) * 2
    padded = F.pad(x, (before, after, before, after))
    torch.testing.assert_close(out, F.conv2d(padded, conv.weight, stride=stride))


def test_checkpoints_load_by_their_own_names() -> None:
    model = EfficientNet(TINY)
    published = {}
    for name, tensor in model.state_dict().items():
        *modules, leaf = name.split(".")
        theirs = [part if part.isdigit() else f"_{part}" for part in modules]
        published[".".join([*theirs, leaf])] = tensor
    assert "_blocks.0._depthwise_conv.weight" in published
    EfficientNet(TINY).load_state_dict(efficientnet_state(published))


def test_classifying_every_position_averages_the_same_logits() -> None:
    model = EfficientNet(TINY).eval()
    other = EfficientNet(EfficientNetConfig(**{**vars(TINY), "local_logits": True})).eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(model(x), other(x))


def test_wider_strides_hold_the_same_function() -> None:
    model = EfficientNet(TINY).double().eval()
    smooth = EfficientNet(EfficientNetConfig(**{**vars(TINY), "smooth_strides": True}))
    smooth.double().eval()
    wide = smooth.state_dict()
    grown = [name for name, t in model.state_dict().items() if t.shape != wide[name].shape]
    assert len(grown) == 5
    state = model.state_dict() | {n: F.pad(model.state_dict()[n], (1, 1, 1, 1)) for n in grown}
    smooth.load_state_dict(state)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    torch.testing.assert_close(model(x), smooth(x))


def test_converts_to_an_equal_model_that_explains_itself() -> None:
    torch.manual_seed(0)
    model = EfficientNet(TINY).double()
    model.train()(torch.randn(16, 3, 64, 64, dtype=torch.float64))
    model.eval()
    converted = bcosvit.bcosify(model, mean=MEAN, std=STD, image_size=64, b=1.0)
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    expected = model((images * 255 - 127) / 128)
    torch.testing.assert_close(converted(images), expected, rtol=1e-9, atol=1e-9)
    assert bcosvit.explain(converted, images).completeness_error().max() < 1e-9

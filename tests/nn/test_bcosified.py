"""Layers of converted networks, each against the layer of PyTorch that it stands in for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.nn import frozen_view
from bcosvit.nn.bcosified import (
    ACTIVATIONS,
    AveragePool,
    ConvertedAttention,
    ConvertedBatchNorm,
    ConvertedConv,
    ConvertedNorm,
)

OPTIONS: dict[str, list[dict]] = {
    "gelu": [{}, {"approximate": "tanh"}],
    "clamp": [{"min": -0.5, "max": 0.7}],
}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in ACTIVATIONS for options in OPTIONS.get(name, [{}])],
)
def test_activations_are_gates_times_their_inputs(name: str, options: dict) -> None:
    function, gate = ACTIVATIONS[name]
    x = torch.linspace(-8, 8, 65, dtype=torch.float64)
    torch.testing.assert_close(gate(x, **options) * x, function(x, **options))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gates_at_zero_are_slopes_where_subnormal_numbers_are_zero(name: str) -> None:
    options = OPTIONS.get(name, [{}])[0]
    function, gate = ACTIVATIONS[name]
    near = torch.full((3,), 1e-6)
    supported = torch.set_flush_denormal(True)
    try:
        found = gate(torch.zeros(3), **options)
    finally:
        torch.set_flush_denormal(False)
    assert supported
    torch.testing.assert_close(found, function(near, **options) / near, rtol=1e-3, atol=0)


def causal(scores: int) -> Tensor:
    return torch.ones(scores, scores, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 5, 6), {}),
        ((3, 5, 6), {"scale": 0.3}),
        ((5, 6), {}),
        ((2, 4, 5, 6), {"is_causal": True}),
        ((2, 4, 5, 6), {"attn_mask": causal(5)}),
        ((2, 4, 5, 6), {"attn_mask": torch.linspace(-2, 2, 25).view(5, 5).double()}),
        ((2, 4, 5, 6), {"enable_gqa": True}),
    ],
    ids=[
        "plain",
        "without heads",
        "of one image",
        "causal",
        "boolean mask",
        "mask",
        "grouped queries",
    ],
)
def test_attention_of_a_frozen_view_is_torchs(shape: tuple[int, ...], options: dict) -> None:
    query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    if options.get("enable_gqa"):
        key, value = key[:, :2], value[:, :2]
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    layer = ConvertedAttention()
    torch.testing.assert_close(layer(query, key, value, **options), expected)
    torch.testing.assert_close(frozen_view(layer)(query, key, value, **options), expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        ((3, 2), {"padding": "same", "dilation": (2, 1)}),
        ((2, 4), {"padding": "same"}),
        ((3, 1), {"padding": (1, 0), "stride": (2, 1)}),
        ((2, 3), {"padding": "valid", "dilation": (1, 2)}),
    ],
)
def test_norms_of_patches_that_are_not_square(kernel: tuple[int, int], window: dict) -> None:
    layer = ConvertedConv([4, 3, *kernel], None, bcos=True, **window).double()
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    ones = torch.ones(1, 3, *kernel, dtype=torch.float64)
    squares = F.conv2d(x.square(), ones, **window)
    torch.testing.assert_close(
        layer.patch_norms(x, layer.weight), squares.sqrt(), rtol=1e-5, atol=1e-5
    )


def test_running_statistics_are_those_of_torch() -> None:
    ours = ConvertedBatchNorm(3).double().train()
    theirs = torch.nn.BatchNorm2d(3).double().train()
    # Few values, so that the unbiased variance is far from the biased one.
    x = torch.randn(2, 3, 2, 1, dtype=torch.float64) + 2
    ours(x, torch.ones((), dtype=torch.float64))
    theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_average_pooling_rearranges_nothing_on_a_cpu() -> None:
    x = torch.rand(2, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    found = AveragePool()(x, 3, 2, 1)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, F.avg_pool2d(x, 3, 2, 1))


@pytest.mark.parametrize(
    ("kind", "weight", "options"),
    [
        ("layer", [5, 6], {"dims": 2}),
        ("rms", [6], {}),
        ("group", [4], {"groups": 2}),
        ("instance", [4], {}),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_of_a_frozen_view_are_torchs(
    kind: str, weight: list[int], options: dict, affine: bool
) -> None:
    bias = weight if kind != "rms" else None
    layer = ConvertedNorm(kind, weight, bias, 1e-5, **options).double()
    if not affine:
        layer = ConvertedNorm(kind, None, None, 1e-5, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, fade = torch.randn(3, 4, 5, 6, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    parts = [layer.weight, layer.bias]
    expected = {
        "layer": lambda: F.layer_norm(x, [5, 6], *parts),
        "rms": lambda: F.rms_norm(x, [6], layer.weight, 1e-5),
        "group": lambda: F.group_norm(x, 2, *parts),
        "instance": lambda: F.instance_norm(x, weight=layer.weight, bias=layer.bias),
    }[kind]()
    torch.testing.assert_close(layer(x, fade), expected)
    torch.testing.assert_close(frozen_view(layer)(x, fade), expected)


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_are_used_as_torch_does(affine: bool) -> None:
    theirs = torch.nn.BatchNorm2d(3, affine=affine).double().eval()
    for tensor in theirs.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(3, dtype=torch.float64) + 0.5)
    ours = ConvertedBatchNorm(3, weight=affine, bias=affine).double().eval()
    ours.load_state_dict({key: theirs.state_dict()[key] for key in ours.state_dict()})
    x, fade = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(ours(x, fade), theirs(x))
    torch.testing.assert_close(frozen_view(ours)(x, fade), theirs(x))


@pytest.mark.parametrize(("groups", "is_half"), [(4, False), (1, True)])
def test_one_channel_per_group_is_not_multiplied_in_half_precision(
    groups: int, is_half: bool
) -> None:
    layer = ConvertedConv([4, 4 // groups, 3, 3], None, bcos=False, groups=groups)
    torch.nn.init.normal_(layer.weight)
    x, one = torch.randn(2, 4, 6, 6), torch.ones(())
    view = frozen_view(layer)
    expected = view(x, fade=one, b=one)
    with torch.autocast("cpu", torch.bfloat16):
        found = view(x, fade=one, b=one)
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert (error > 1e-4) if is_half else (error < 1e-6)

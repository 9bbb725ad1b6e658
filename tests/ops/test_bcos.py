"""The B-cos transform against slow references: exponents, MaxOut, patches, half precision."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from bcosvit.nn import BcosConv2d, BcosLinear, frozen_view
from bcosvit.ops import bcos_conv2d, bcos_linear, bcos_mlp
from bcosvit.ops.dispatch import unit_rows, window_sums
from tests.reference.dynamic import bcos_rows

EXPONENTS = [1.0, 1.5, 2.0, 2.5, 3.0]
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("b", EXPONENTS)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_linear_is_the_equation(b, m):
    x, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(4 * m, 5, dtype=torch.float64)
    y = bcos_linear(x, unit_rows(weight), b=b, maxout=m, scale=1.7)
    for sample, out in zip(x.numpy(), y.numpy(), strict=True):
        expected = bcos_rows(sample, weight.numpy(), b, m, 1.7, 1e-6) @ sample
        np.testing.assert_allclose(out, expected, rtol=1e-10)


@pytest.mark.parametrize("b", EXPONENTS)
def test_gradients_are_those_of_the_equation(b):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: bcos_linear(x, unit_rows(weight), b=b, maxout=2, scale=0.5), (x, weight)
    )


def unfolded_conv(x, weight, stride, padding, dilation, groups, b, m, scale):
    """Patches cut out by ``unfold``, group by group, each through the definition."""
    outputs = []
    units = weight.shape[0] // groups
    for g, part in enumerate(x.chunk(groups, 1)):
        kernel = weight.shape[2:]
        patches = F.unfold(part, kernel, dilation=dilation, padding=padding, stride=stride)
        rows = weight[g * units : (g + 1) * units].flatten(1)
        unit = rows / rows.norm(dim=1, keepdim=True)
        linear = torch.einsum("up,npl->nul", unit, patches)
        norm = (patches.square().sum(1, keepdim=True) + 1e-6).sqrt()
        every = scale * (linear / norm).abs() ** (b - 1) * linear
        outputs.append(every.unflatten(1, (units // m, m)).amax(2))
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    return torch.cat(outputs, 1).unflatten(2, size)


CONVOLUTIONS = [
    # kernel, stride, padding, dilation, groups
    (1, 1, 0, 1, 1),
    (3, 1, 1, 1, 1),
    (3, 2, 1, 1, 2),
    (7, 2, 3, 1, 1),
    (4, 4, 0, 1, 1),
    (2, 1, 2, 1, 1),
    ((3, 2), (2, 1), (1, 2), 1, 1),
    (3, 1, 2, 2, 1),
    (3, (1, 2), (2, 3), (2, 3), 4),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
@pytest.mark.parametrize("m", [1, 2])
def test_convolution_against_unfold(kernel, stride, padding, dilation, groups, m):
    for b in EXPONENTS:
        layer = BcosConv2d(
            *(4, 8, kernel),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            b=b,
            maxout=m,
            scale=1.3,
        ).double()
        x = torch.randn(2, 4, 11, 13, dtype=torch.float64)
        geometry = (layer.stride, layer.padding, layer.dilation, groups)
        expected = unfolded_conv(x, layer.weight, *geometry, b, m, 1.3)
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_cosine_never_exceeds_one(kernel, stride, padding, dilation, groups, dtype):
    """Where kernels *are* the patch: what B = 2 makes of B = 1 is the |cos| that was used."""
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    layer = BcosConv2d(4, 8, kernel, **options)
    layer.weight.data.fill_(1.0)
    layer, x = layer.to(dtype), torch.full((1, 4, 11, 13), 3.7, dtype=dtype)
    scaled = layer(x).double()
    layer.b = 1.0
    cos = (scaled / layer(x).double()).nan_to_num(0)
    assert (cos <= 1 + torch.finfo(dtype).eps).all()
    assert (cos > 0.99).any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("b", EXPONENTS)
@pytest.mark.parametrize("m", [1, 2])
def test_zero_input_in_half_precision(dtype, b, m):
    for layer, shape in [
        (BcosLinear(16, 8, b=b, maxout=m), (3, 16)),
        (BcosConv2d(4, 8, 3, padding=1, b=b, maxout=m), (2, 4, 5, 5)),
    ]:
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        y = layer.to(dtype)(x)
        assert (y == 0).all()
        y.sum().backward()
        assert x.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("b", EXPONENTS)
def test_large_input_in_half_precision(dtype, b):
    """‖x‖ = 1e4, whose square no half-precision number holds."""
    for layer, shape in [
        (BcosLinear(64, 32, b=b, maxout=2), (5, 64)),
        (BcosConv2d(16, 32, 2, stride=2, b=b, maxout=2), (5, 16, 2, 2)),
    ]:
        x = torch.randn(shape)
        x = 1e4 * x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))
        x = x.to(dtype).float()
        exact = layer(x).flatten(1)
        narrow = layer.to(dtype)(x.to(dtype)).float().flatten(1)
        assert narrow.isfinite().all()
        assert (F.cosine_similarity(narrow, exact) > 0.999).all()
        assert ((narrow.norm(dim=1) / exact.norm(dim=1) - 1).abs() < 0.02).all()


def test_norms_are_wide_under_autocast():
    layer, x = BcosLinear(64, 32), 1e3 * torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert (F.cosine_similarity(y.float(), layer(x)) > 0.999).all()


def test_b_one_is_a_unit_row_linear_layer():
    x, weight = torch.randn(3, 6), torch.randn(4, 6)
    expected = x @ (weight / weight.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(bcos_linear(x, unit_rows(weight), b=1.0), expected)
    kernel = weight.view(4, 6, 1, 1)
    torch.testing.assert_close(
        bcos_conv2d(x.view(3, 6, 1, 1), unit_rows(kernel), b=1.0).flatten(1), expected
    )


def test_zero_weights_stay_finite():
    assert (unit_rows(torch.zeros(2, 3)) == 0).all()
    assert unit_rows(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BcosLinear(4, 4, b=0.5), "B = 0.5"),
        (lambda: BcosLinear(4, 4, b=float("nan")), "B = nan"),
        (lambda: BcosConv2d(4, 4, 3, b=float("inf")), "B = inf"),
        (lambda: BcosLinear(4, 4, maxout=0), "maxout = 0"),
        (lambda: BcosLinear(4, 4, scale=-1.0), "scale = -1.0 .*above 0"),
        (lambda: BcosConv2d(4, 4, 3, eps=0.0), "eps = 0.0 .*above 0"),
        (lambda: BcosConv2d(4, 6, 3, groups=4), "groups = 4"),
        (lambda: BcosConv2d(4, 6, 3, groups=0), "groups = 0"),
        (lambda: BcosConv2d(4, 6, 3, padding="same"), "padding = 'same' .*number of zeros"),
    ],
)
def test_impossible_layers_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_sums_over_windows(dilation):
    images, window = torch.rand(2, 3, 9, 10), {"stride": (2, 1), "padding": (1, 2)}
    found = window_sums(images, (3, 2), dilation=dilation, **window)
    ones = torch.ones(3, 1, 3, 2)
    expected = F.conv2d(images, ones, groups=3, dilation=dilation, **window)
    torch.testing.assert_close(found, expected)


LAYERS = {
    "linear": lambda m: (BcosLinear(24, 16, maxout=m), (3, 5, 24)),
    "pixels": lambda m: (BcosConv2d(24, 16, 1, maxout=m), (2, 24, 5, 4)),
    "patches": lambda m: (BcosConv2d(6, 16, 3, stride=2, padding=1, maxout=m), (2, 6, 9, 7)),
    "depthwise": lambda m: (BcosConv2d(6, 6, 3, padding=1, groups=6, maxout=m), (3, 6, 9, 7)),
    "groups": lambda m: (BcosConv2d(6, 12, 3, padding=1, groups=3, maxout=m), (3, 6, 9, 7)),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_all_ways_through_a_layer_agree(kind, m, last):
    """With and without autograd, frozen, traced, in any layout: one function, one W(x)."""
    layer, shape = LAYERS[kind](m)
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    if last and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    given, view = x.clone(), frozen_view(layer, with_parameter_grad=False)
    traced = make_fx(layer)(x)(x)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(traced, expected)
    assert torch.equal(x, given)
    x.requires_grad_()
    frozen = view(x)
    torch.testing.assert_close(frozen, expected)
    seeds = torch.randn(4, *frozen.shape, dtype=torch.float64)
    rows = [torch.autograd.grad(frozen, x, seed, retain_graph=True)[0] for seed in seeds]
    # The dynamic matrix reproduces the output, row by row.
    for row, seed in zip(rows, seeds, strict=True):
        torch.testing.assert_close((row * x).sum(), (seed * frozen).sum())
    batched = torch.vmap(lambda s: torch.autograd.grad(frozen, x, s, retain_graph=True)[0])(seeds)
    torch.testing.assert_close(batched, torch.stack(rows))
    plain = make_fx(lambda x, seed: torch.autograd.grad(view(x), x, seed)[0])(x, seeds[0])
    torch.testing.assert_close(plain(x, seeds[0]), rows[0])
    assert torch.equal(x, given)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by torch.func.jvp
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_jacobians_are_the_same_however_they_are_computed(kind, m, dtype, frozen):
    """Row by row, all rows at once, by ``torch.func``, and forwards."""
    layer, shape = LAYERS[kind](m)
    layer, x = layer.to(dtype), torch.randn(1, *shape[1:], dtype=dtype)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    run = frozen_view(layer, with_parameter_grad=False) if frozen else layer
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(run, x)
    for found in (
        jacobian(run, x, vectorize=True),
        torch.func.jacrev(run)(x),
        torch.func.jacfwd(run)(x),
    ):
        torch.testing.assert_close(found, expected)


def test_of_equal_units_the_first_one_is_explained():
    weight = unit_rows(torch.randn(4, 5, dtype=torch.float64)).repeat_interleave(2, 0)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    units = F.linear(x, weight).detach()
    y = bcos_linear(x, weight, maxout=2, frozen=True)
    seen = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    factor = units[:, ::2].abs() / (x.detach().square().sum(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(seen, factor @ weight[::2])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("b", [2, 2.5])
def test_a_cosine_is_at_most_one(b, grad, frozen):
    """Of aligned vectors in half precision, rounding alone would make it larger."""
    x = torch.randn(200, 64).half()
    weight = unit_rows(x)
    products = torch.nn.functional.linear(x, weight)
    with torch.set_grad_enabled(grad):
        found = bcos_linear(x.requires_grad_(grad), weight, b=b, frozen=frozen, backend="reference")
    assert (products.float().diag() > x.float().norm(dim=1)).any()
    assert (found.abs() <= products.abs()).all()


def test_gradients_of_two_in_a_row_are_those_of_both():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    up, down = (unit_rows(torch.randn(shape, dtype=torch.float64)) for shape in ((8, 5), (3, 4)))
    up_by, down_by = ({"b": 2.0, "maxout": maxout, "scale": 0.5, "eps": 1e-6} for maxout in (2, 1))
    assert torch.autograd.gradcheck(lambda x: bcos_mlp(x, up, down, up_by, down_by), (x,))
    expected = bcos_linear(bcos_linear(x, up, **up_by), down, **down_by)
    torch.testing.assert_close(bcos_mlp(x, up, down, up_by, down_by), expected)


def test_layers_have_one_unit_per_output_and_plain_numbers():
    for layer in (BcosLinear(6, 4), BcosConv2d(6, 4, 3)):
        assert layer.weight.shape[:2] == (4, 6)
    # Numbers go into kernels, exported programs and files, which know neither arrays nor texts.
    options = BcosLinear(6, 4, b=np.float32(2), scale=np.float32(0.5)).options
    assert [type(options[name]) for name in ("b", "scale")] == [float, float]


def test_what_is_left_out_has_its_usual_value():
    torch.manual_seed(0)
    usual = {"b": 2.0, "maxout": 1, "scale": 1.0, "eps": 1e-6, "frozen": False, "backend": "auto"}
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    x, weight = torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3)
    assert torch.equal(bcos_conv2d(x, weight), bcos_conv2d(x, weight, **window, **usual))
    x, weight = torch.randn(5, 4), torch.randn(6, 4)
    assert torch.equal(bcos_linear(x, weight), bcos_linear(x, weight, **usual))


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layout_changes_nothing(kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 7, 7), torch.randn(6, 4, kernel, kernel)
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(bcos_conv2d(last, weight), bcos_conv2d(x, weight))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_of_equal_units_one_alone_gets_the_gradient(backend):
    weight = unit_rows(torch.randn(3, 5)).repeat_interleave(2, 0).requires_grad_()
    bcos_linear(torch.randn(5), weight, maxout=2, backend=backend).sum().backward()
    moved = weight.grad.view(3, 2, 5).abs().sum(2) > 0
    assert (moved.sum(1) == 1).all()


def test_weights_start_as_those_of_torch():
    torch.manual_seed(0)
    ours, theirs = BcosLinear(64, 512).weight, torch.nn.Linear(64, 512).weight
    torch.testing.assert_close(ours.abs().max(), theirs.abs().max(), rtol=1e-2, atol=0)
    torch.testing.assert_close(ours.std(), theirs.std(), rtol=2e-2, atol=0)

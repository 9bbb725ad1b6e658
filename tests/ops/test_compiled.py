"""The compiled kernel of depthwise convolutions, and what happens where there is none."""

import ctypes
import stat

import pytest
import torch
import torch.nn.functional as F

from bcosvit.nn import BcosConv2d, frozen_view
from bcosvit.ops import bcos_conv2d, compiled
from bcosvit.ops.dispatch import unit_rows


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not looked for the kernel yet, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(compiled, "_found", [])
    return tmp_path / "bcosvit/kernels"


@pytest.fixture
def kernel(fresh):
    found = compiled.kernel()
    if found.run is None:
        pytest.skip(found.about)
    return found


def definition(x, weight, scale, eps, **window):
    """Patch by patch in float64: scale · |cos| · (w · a)."""
    x, weight = x.double(), weight.double()
    channels, (down, across) = x.shape[1], weight.shape[2:]
    patches = F.unfold(x, (down, across), **window).unflatten(1, (channels, -1))
    units = (patches * weight.flatten(1)[:, :, None]).sum(2)
    out = scale * units.abs() / (patches.square().sum(2) + eps).sqrt() * units
    return out.unflatten(2, F.conv2d(x, weight, groups=channels, **window).shape[2:])


def inputs(channels, size, taps):
    torch.manual_seed(channels)
    x = torch.randn(3, channels, *size).contiguous(memory_format=torch.channels_last)
    return x, unit_rows(torch.randn(channels, 1, *taps))


@pytest.mark.parametrize("channels", [32, 33, 63, 64, 100])
@pytest.mark.parametrize(
    ("taps", "stride", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 3), (2, 2), (1, 1), (1, 1)),
        ((5, 2), (1, 2), (0, 3), (1, 1)),
        ((3, 3), (2, 1), (4, 2), (2, 3)),
        ((1, 1), (1, 1), (0, 0), (1, 1)),
        ((2, 3), (1, 3), (6, 6), (1, 1)),
    ],
)
def test_the_kernel_is_the_equation(kernel, channels, taps, stride, padding, dilation):
    x, weight = inputs(channels, (9, 7), taps)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    out = compiled.depthwise(x, weight, **window, scale=1.7, eps=1e-3)
    assert out is not None
    expected = definition(x, weight, 1.7, 1e-3, **window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)


def test_layers_use_the_kernel(kernel, monkeypatch):
    calls = []

    def counted(*given):
        calls.append(given)
        return kernel.run(*given)

    monkeypatch.setattr(compiled, "_found", [compiled.Kernel(counted, "counted")])
    layer, x = BcosConv2d(40, 40, 3, padding=1, groups=40), torch.randn(2, 40, 8, 8)
    expected = layer(x).detach()
    assert not calls
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1
    x.requires_grad_()
    torch.testing.assert_close(frozen_view(layer)(x).detach(), expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert len(calls) == 1


def test_threads_share_the_rows(kernel, monkeypatch):
    monkeypatch.setattr(compiled, "SMALLEST_SHARE", 100)
    x, weight = inputs(32, (11, 5), (3, 3))
    how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "scale": 1.0, "eps": 1e-6}
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(compiled.depthwise(x, weight, **how))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_is_not_a_number_stays_so_where_it_is_seen(kernel):
    x, weight = inputs(32, (6, 6), (3, 3))
    x[1, 4, 0, 0] = torch.nan
    how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "scale": 1.0, "eps": 1e-6}
    seen = compiled.depthwise(x, weight, **how).isnan().nonzero().tolist()
    assert seen == [[1, 4, 0, 0], [1, 4, 0, 1], [1, 4, 1, 0], [1, 4, 1, 1]]


def test_images_smaller_than_the_kernel_are_refused_as_ever(kernel):
    x, weight = inputs(32, (2, 2), (3, 3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="Kernel size"):
        bcos_conv2d(x, weight, groups=32)


def test_it_is_compiled_once(kernel, fresh, monkeypatch):
    (file,) = fresh.iterdir()
    assert stat.S_ISREG(file.stat().st_mode)
    monkeypatch.setattr(compiled, "_found", [])
    monkeypatch.setattr(compiled.subprocess, "run", None)
    assert compiled.kernel().run is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda patch: patch.setenv(compiled.SWITCH, "0"), "BCOSVIT_CPU_KERNEL is 0"),
        (lambda patch: patch.setattr(compiled.shutil, "which", lambda name: None), "no C compiler"),
        (lambda patch: patch.setattr(compiled, "FLAGS", ("--no-such-flag",)), "failed"),
        (lambda patch: patch.setenv("XDG_CACHE_HOME", "/dev/null"), "failed"),
        (lambda patch: patch.setattr(compiled.os, "getuid", lambda: 12345), "another user"),
        (lambda patch: patch.setattr(ctypes, "CDLL", lambda path: object()), "failed"),
    ],
    ids=["switch", "no compiler", "compiler fails", "no cache", "owner", "wrong file"],
)
def test_without_a_kernel_pytorch_computes_the_same(fresh, monkeypatch, change, says):
    if says in ("failed", "another user") and compiled.shutil.which("cc") is None:
        pytest.skip("there is no C compiler that could fail")
    change(monkeypatch)
    layer, x = BcosConv2d(40, 40, 3, padding=1, groups=40), torch.randn(2, 40, 8, 8)
    window = {"padding": (1, 1), "groups": 40}
    with torch.no_grad():
        found = layer(x)
        reference = bcos_conv2d(x, layer.unit_weight(), **window, backend="reference")
    torch.testing.assert_close(found, reference)
    assert says in compiled.kernel().about and compiled.kernel().run is None

"""The compiled kernels for CPUs, and what happens where there are none."""

import copy
import ctypes
import functools
import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bcosvit.nn import BcosConv2d, BcosLinear, frozen_view
from bcosvit.ops import bcos_conv2d, bcos_linear, compiled
from bcosvit.ops.dispatch import unit_rows


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not looked for the kernels yet, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(compiled, "_found", [])
    return tmp_path / "bcosvit/kernels"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cache in which the kernels are once one test has compiled them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kernel(fresh, shared, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    found = compiled.kernels()
    if found.depthwise is None:
        pytest.skip(found.about)
    return found


@pytest.fixture
def wide_kernel(kernel):
    if kernel.winners is None:
        pytest.skip("the processor has short vectors")
    return kernel


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
        return kernel.depthwise(*given)

    monkeypatch.setattr(compiled, "_found", [compiled.Kernels("counted", counted)])
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


@pytest.mark.skipif(
    sys.platform != "linux" or "backend: OpenMP" not in torch.__config__.parallel_info(),
    reason="This PyTorch does not compute with OpenMP.",
)
def test_threads_are_those_of_pytorch(kernel):
    assert kernel.has_threads


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


def test_a_cosine_is_at_most_one(kernel):
    x = torch.full((1, 32, 2, 2), -1e-23).contiguous(memory_format=torch.channels_last)
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    # The square is zero.
    found = compiled.depthwise(x, torch.ones(32, 1, 1, 1), **window, scale=2.0, eps=0.0)
    assert torch.equal(found, 2 * x)


def test_memory_that_holds_other_numbers_is_not_read(kernel):
    x, weight = inputs(32, (6, 6), (3, 3))
    with torch.no_grad():
        found = bcos_conv2d(torch._neg_view(x), weight, groups=32)
        torch.testing.assert_close(found, bcos_conv2d(-x, weight, groups=32))
        nothing = torch._efficientzerotensor(x.shape).to(memory_format=torch.channels_last)
        assert not bcos_conv2d(nothing, weight, groups=32).any()


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


def winners_inputs(outputs, channels, taps, window, size=(9, 11), gradients=1):
    torch.manual_seed(outputs)
    weight = torch.randn(2 * outputs, channels, *taps)
    out = F.conv2d(torch.empty(3, channels, *size), weight, **window).permute(0, 2, 3, 1)
    factor = torch.randn(*out.shape[:3], outputs)
    grad = torch.randn(3 * gradients, *out.shape[1:3], outputs)
    return grad, factor, weight


def winners_definition(grad, factor, weight, size, **window):
    """The gradient of the larger units times the factors, by torch in float64."""
    factor = factor.repeat(len(grad) // len(factor), 1, 1, 1).double().permute(0, 3, 1, 2)
    x = torch.zeros(len(grad), weight.shape[1], *size, dtype=torch.float64, requires_grad=True)
    first, second = F.conv2d(x, weight.double(), **window).chunk(2, 1)
    y = torch.where(factor > 0, first, second) * factor.abs()
    return torch.autograd.grad(y, x, grad.double().permute(0, 3, 1, 2))[0].permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("outputs", "channels", "taps", "stride", "padding"),
    [
        (64, 6, (7, 7), (2, 2), (3, 3)),
        (32, 128, (3, 3), (1, 1), (1, 1)),
        (70, 144, (1, 1), (1, 1), (0, 0)),
        (300, 16, (1, 1), (1, 1), (0, 0)),
        (5, 40, (2, 3), (1, 2), (0, 2)),
        (3, 7, (3, 2), (4, 3), (5, 3)),
        (1, 1, (1, 1), (2, 3), (0, 0)),
        (4, 7, (1, 2), (3, 4), (0, 1)),
        (4, 80, (1, 1), (1, 1), (0, 0)),
        (4, 96, (1, 1), (1, 1), (0, 0)),
        (4, 112, (1, 1), (1, 1), (0, 0)),
        (4, 64, (1, 1), (1, 1), (0, 0)),
    ],
)
def test_the_adjoint_of_winners_is_torchs(wide_kernel, outputs, channels, taps, stride, padding):
    window = {"stride": stride, "padding": padding}
    for gradients, size in ((1, (9, 11)), (2, (8, 150)), (5, (7, 6))):
        given = winners_inputs(outputs, channels, taps, window, size, gradients)
        found = compiled.winners_adjoint(*given, size=size, **window)
        expected = winners_definition(*given, size, **window).float()
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_adjoint_of_winners_reads_gradients_as_they_lie(wide_kernel):
    window = {"stride": (1, 1), "padding": (1, 1)}
    grad, factor, weight = winners_inputs(8, 20, (3, 3), window)
    run = functools.partial(compiled.winners_adjoint, weight=weight, size=(9, 11), **window)
    expected = run(grad, factor)
    wider = torch.randn(5, 12, 14, 30)
    wider[1:4, 2:11, 1:12, 9:17] = grad
    assert torch.equal(run(wider[1:4, 2:11, 1:12, 9:17], factor), expected)
    by_channel = [t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) for t in (grad, factor)]
    assert torch.equal(run(*by_channel), expected)
    same = grad[:1, :1, :1].expand_as(grad)
    assert torch.equal(run(same, factor), run(same.contiguous(), factor))


@pytest.mark.parametrize("kind", ["linear", "pixels", "patches", "one row"])
def test_layers_use_the_adjoint_of_winners(wide_kernel, monkeypatch, kind):
    calls = []

    def counted(*given):
        calls.append(given)
        return wide_kernel.winners(*given)

    monkeypatch.setattr(
        compiled, "_found", [compiled.Kernels("counted", None, counted, wide_kernel.lanes)]
    )
    layer, shape = {
        "linear": lambda: (BcosLinear(24, 16, maxout=2), (3, 5, 24)),
        "pixels": lambda: (BcosConv2d(24, 16, 1, maxout=2), (2, 24, 5, 4)),
        "patches": lambda: (BcosConv2d(6, 8, 3, stride=2, padding=1, maxout=2), (2, 6, 9, 7)),
        "one row": lambda: (BcosLinear(24, 16, b=1.5, maxout=2), (24,)),
    }[kind]()
    x = torch.randn(shape)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)

    def rows(view, x):
        x = x.clone().requires_grad_()
        y = view(x)
        torch.manual_seed(0)
        seeds = torch.randn(4, *y.shape).to(y)
        one = torch.autograd.grad(y, x, seeds[0], retain_graph=True)[0]
        several = torch.vmap(lambda s: torch.autograd.grad(y, x, s, retain_graph=True)[0])(seeds)
        # Linear in what comes back.
        seed = seeds[1].clone().requires_grad_()
        back = torch.autograd.grad(y, x, seed, create_graph=True)[0]
        again = torch.autograd.grad((back * x.detach()).sum(), seed)[0]
        return y.detach(), one, several, again

    found = rows(frozen_view(layer, with_parameter_grad=False), x)
    assert len(calls) == 3
    expected = rows(
        frozen_view(copy.deepcopy(layer).double(), with_parameter_grad=False), x.double()
    )
    rows(frozen_view(layer), x)
    assert len(calls) == 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


def test_threads_share_the_rows_of_an_adjoint(wide_kernel, monkeypatch):
    monkeypatch.setattr(compiled, "SMALLEST_SHARE", 100)
    window = {"stride": (2, 1), "padding": (1, 1)}
    # So much that threads run at the same time.
    size = (40, 80)
    given = winners_inputs(64, 64, (3, 3), window, size, gradients=4)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 5, 5):
            torch.set_num_threads(threads)
            results.append(compiled.winners_adjoint(*given, size=size, **window))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], each) for each in results)


def test_what_is_not_a_number_stays_in_its_row(wide_kernel):
    window = {"stride": (1, 1), "padding": (0, 0)}
    grad, factor, weight = winners_inputs(4, 7, (1, 1), window)
    grad[1, 3, 5, 2] = torch.nan
    found = compiled.winners_adjoint(grad, factor, weight, size=(9, 11), **window)
    assert {tuple(at[:2]) for at in found.isnan().nonzero().tolist()} == {(1, 3)}
    assert found[1, 3, 5].isnan().all()


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "pixels", "patches"])
def test_layers_scale_in_one_pass(kernel, monkeypatch, kind, m):
    """Bit by bit as by PyTorch, with and without factors."""
    monkeypatch.setattr(compiled, "LEAST_UNITS", 1)
    calls = []

    def counted(*given):
        calls.append(given)
        return kernel.scale(*given)

    layer, shape = {
        "linear": lambda: (BcosLinear(24, 33, maxout=m, scale=1.7), (3, 5, 24)),
        "pixels": lambda: (BcosConv2d(24, 16, 1, maxout=m), (2, 24, 5, 4)),
        "patches": lambda: (BcosConv2d(6, 8, 3, stride=2, padding=1, maxout=m), (2, 6, 9, 7)),
    }[kind]()
    x = torch.randn(shape)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    view = frozen_view(layer, with_parameter_grad=False)

    def passes():
        with torch.no_grad():
            predicted = layer(x)
        given = x.clone().requires_grad_()
        y = view(given)
        return predicted, y.detach(), torch.autograd.grad(y, given, torch.ones_like(y))[0]

    expected = passes()
    monkeypatch.setattr(compiled, "_found", [compiled.Kernels("none")])
    plain = passes()
    monkeypatch.setattr(compiled, "_found", [compiled.Kernels("counted", scale=counted)])
    ours = passes()
    # An explanation without MaxOut multiplies by the factor as a step of its own.
    assert len(calls) == m
    for ours_, plain_ in zip(ours, plain, strict=True):
        assert torch.equal(ours_, plain_)
    for ours_, expected_ in zip(ours, expected, strict=True):
        torch.testing.assert_close(ours_, expected_)


def test_scaling_keeps_what_is_not_a_number(kernel, monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_UNITS", 1)
    units = torch.tensor([[1.0, 2, 3, -4, 5, 2], [0, 0, 0, 1, 1, 1], [-9, 9, 0, -9, 0, -0.0]])
    units[1, 0] = units[1, 4] = torch.nan
    norm = torch.tensor([[10.0], [1.0], [3.0]])
    found, factor = compiled.scaled(units, norm, maxout=2, scale=2.0, with_factor=True)
    assert found.isnan().tolist() == [[False] * 3, [True, True, False], [False] * 3]
    torch.testing.assert_close(found[0], torch.tensor([0.2, 5.0, 1.8]))
    torch.testing.assert_close(factor[0], torch.tensor([0.2, -1.0, 0.6]))
    assert factor.isnan().tolist() == found.isnan().tolist()
    # A cosine is at most one, and of equal units the first one counts.
    assert found[2].tolist() == [-18.0, 18.0, 0.0] and factor[2].tolist() == [2.0, 2.0, 0.0]
    assert torch.equal(compiled.scaled(units, norm, maxout=2, scale=2.0)[0][0], found[0])
    assert compiled.scaled(units.double(), norm, maxout=2, scale=2.0) is None
    assert compiled.scaled(units.T.contiguous().T, norm, maxout=2, scale=2.0) is None


def test_scaling_reads_norms_as_they_lie(kernel, monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_UNITS", 1)
    units, norm = torch.randn(5, 3, 8), 1 + torch.rand(3, 5, 1).transpose(0, 1)
    found, factor = compiled.scaled(units, norm, maxout=2, scale=1.0, with_factor=True)
    first, second = units.chunk(2, -1)
    largest = torch.maximum(first, second)
    expected = (largest.abs() / norm).clamp(max=1)
    torch.testing.assert_close(found, expected * largest)
    torch.testing.assert_close(factor, torch.where(second > first, -expected, expected))


def test_three_units_are_scaled_by_pytorch(kernel, monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_UNITS", 1)
    layer, x = BcosLinear(24, 33, maxout=3), torch.randn(5, 24)
    with torch.no_grad():
        expected = bcos_linear(x, layer.unit_weight(), maxout=3, backend="reference")
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("other", ["sources", "headers", "flags", "compiler", "processor", "user"])
def test_what_was_compiled_for_something_else_is_not_loaded(fresh, tmp_path, monkeypatch, other):
    runs = []

    def run(command):
        runs.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"compiled")

    monkeypatch.setattr(compiled, "_run", run)
    compiler = tmp_path / "compiler"
    compiler.touch()
    before = compiled._compiled(str(compiler))
    assert compiled._compiled(str(compiler)) == before
    changed = tmp_path / "changed"
    changed.write_text("")
    if other == "compiler":
        compiler.write_text("another version")
    elif other == "user":
        monkeypatch.setattr(compiled.os, "getuid", lambda: 12345)
    else:
        name, value = {
            "sources": ("SOURCES", [changed]),
            "headers": ("HEADERS", [changed]),
            "flags": ("FLAGS", ("-O1",)),
            "processor": ("_processor", lambda: ["another one"]),
        }[other]
        monkeypatch.setattr(compiled, name, value)
    with suppress(RuntimeError):  # the file that was made belongs to the real user
        assert compiled._compiled(str(compiler)) != before
    assert len(runs) == 2


def test_a_file_that_was_cut_off_is_compiled_again(fresh):
    """Loaded as it is, it would end the process, so that a process of its own tries."""
    if (about := compiled.kernels()).scale is None:
        pytest.skip(about.about)
    (file,) = fresh.glob("*.so")
    whole = file.read_bytes()
    file.write_bytes(whole[:5000])
    code = "from bcosvit.ops.compiled import kernels; print(kernels().about)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("compiled by"), done
    assert any(path.read_bytes() == whole for path in fresh.glob("*.so"))


@pytest.mark.skipif(os.name != "posix", reason="The compiler is a shell script.")
def test_a_compiler_that_hangs_is_ended_and_not_tried_again(fresh, tmp_path, monkeypatch):
    calls, compiler = tmp_path / "calls", tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {calls}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(compiled, "TIMEOUT", 0.5)
    for says in ("was ended", "to try again, remove"):
        monkeypatch.setattr(compiled, "_found", [])
        assert says in compiled.kernels().about
    (child,) = calls.read_text().split()
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("What the compiler had started goes on.")
    (marker,) = fresh.glob("*.timeout")
    os.utime(marker, (0, time.time() - compiled.RETRY_AFTER - 1))
    monkeypatch.setattr(compiled, "_found", [])
    assert "was ended" in compiled.kernels().about
    assert len(calls.read_text().split()) == 2


def test_it_is_compiled_once(kernel, shared, monkeypatch):
    (file,) = shared.glob("bcosvit/kernels/*")
    assert stat.S_ISREG(file.stat().st_mode)
    monkeypatch.setattr(compiled, "_found", [])
    monkeypatch.setattr(compiled, "_run", None)
    assert compiled.kernels().depthwise is not None


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
    layer, x = BcosConv2d(4, 4, 3, maxout=2), x[:, :4].clone().requires_grad_()
    one, other = (
        torch.autograd.grad(frozen_view(layer, with_parameter_grad=grad)(x).sum(), x)[0]
        for grad in (False, True)
    )
    torch.testing.assert_close(one, other)
    assert says in compiled.kernels().about and compiled.kernels().depthwise is None

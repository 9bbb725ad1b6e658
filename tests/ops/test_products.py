"""Products and convolutions in all of float32, whatever PyTorch is set to."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from bcosvit.ops import products

WINDOWS = {
    "plain": ((6, 3, 9, 8), (4, 3, 3, 3), (1, 0, 1, 1)),
    "stride and padding": ((2, 3, 10, 9), (4, 3, 3, 3), (2, 1, 1, 1)),
    "uneven": ((2, 4, 11, 8), (6, 2, 3, 2), ((3, 2), (2, 1), (2, 1), 2)),
    "depthwise": ((2, 4, 7, 7), (8, 1, 3, 3), (2, 1, 1, 4)),
    "same": ((2, 3, 9, 8), (4, 3, 3, 5), (1, "same", (2, 1), 1)),
    "valid": ((2, 3, 9, 8), (4, 3, 4, 3), (2, "valid", 1, 1)),
    "1d": ((2, 3, 9), (4, 3, 3), (2, 1, 1, 1)),
    "3d": ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), (2, 1, 1, 1)),
}
PLAIN = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


@pytest.fixture
def full(monkeypatch):
    """Everything that is frozen takes the way that it takes on a GPU."""
    monkeypatch.setattr(products, "_is_full", lambda x, frozen, op: frozen)


@pytest.fixture
def rounding(monkeypatch):
    """A machine whose float32 products keep ten bits of their inputs in both passes."""

    def narrow(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    original = torch.Tensor.__matmul__

    def matmul(a, b):
        if a.dtype == torch.float32 and products.rounds("cuda", "matmul"):
            a, b = narrow(a), narrow(b)
        return original(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    kinds = {(device, op) for device in ("cpu", "cuda") for op in ("matmul", "conv")}
    monkeypatch.setattr(
        products, "rounds", lambda device, op: RATE["rounds"] and (device, op) in kinds
    )
    RATE["rounds"] = True
    yield
    RATE["rounds"] = False


RATE = {"rounds": False}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_are_torchs(window, last, full):
    x_shape, weight_shape, options = WINDOWS[window]
    if last and len(x_shape) != 4:
        pytest.skip("channels last has four axes")
    x, weight = torch.randn(x_shape), torch.randn(weight_shape)
    if last:
        x = x.to(memory_format=torch.channels_last)
    bias = torch.randn(weight_shape[0])
    for each in (x, weight, bias):
        each.requires_grad_()
    ours = products.convolution(x, weight, bias, *options, frozen=True)
    theirs = PLAIN[x.ndim](x, weight, bias, *options)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    found = torch.autograd.grad(ours, (x, weight, bias), seed, retain_graph=True)
    expected = torch.autograd.grad(theirs, (x, weight, bias), seed, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Several rows of W(x) at once.
    seeds = torch.randn(3, *ours.shape)
    rows = torch.vmap(lambda s: torch.autograd.grad(ours, x, s, retain_graph=True)[0])(seeds)
    one_by_one = [torch.autograd.grad(theirs, x, s, retain_graph=True)[0] for s in seeds]
    torch.testing.assert_close(rows, torch.stack(one_by_one))


@pytest.mark.parametrize("trained", [False, True])
def test_convolutions_ask_their_backend_for_all_bits(trained, full, monkeypatch):
    asked = []
    original = torch._convolution

    def watched(*arguments):
        asked.append((arguments[6], arguments[-1]))
        return original(*arguments)

    monkeypatch.setattr(torch, "_convolution", watched)
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, requires_grad=trained)
    y = products.convolution(x, weight, frozen=True).sum()
    torch.autograd.grad(y, x)
    # Both passes, the second one transposed.
    assert asked == [(False, False), (True, False)]


def test_convolutions_can_be_differentiated_twice(full):
    x, weight = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)

    def second(convolve):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        slope = torch.autograd.grad(convolve(a, w).square().sum(), a, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), (a, w))

    ours = second(lambda a, w: products.convolution(a, w, None, 2, 1, frozen=True))
    torch.testing.assert_close(
        ours, second(lambda a, w: F.conv2d(a, w, None, 2, 1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "shapes", [((5, 4), (4, 3)), ((2, 3, 5, 4), (2, 3, 4, 6)), ((2, 5, 4), (4, 3))]
)
def test_products_use_all_bits_in_both_passes(shapes, full, rounding):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    ours = products.matmul(a, b, frozen=True)
    wide_a, wide_b = (x.detach().double().requires_grad_() for x in (a, b))
    truth = torch.matmul(wide_a, wide_b)
    seed = torch.randn_like(ours)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(ours, (a, b), seed)
    expected = torch.autograd.grad(truth, (wide_a, wide_b), seed.double())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    # The machine does round.
    assert (a.detach() @ b.detach() - truth).abs().max() > 1e-4


def test_a_setting_that_changes_during_a_product_is_noticed(full, rounding, monkeypatch):
    """Another thread switches rounding on after it was read, and before the product reads it."""
    answers = iter([False, True, True])
    monkeypatch.setattr(products, "rounds", lambda device, op: next(answers))
    a, b = torch.randn(5, 4), torch.randn(4, 3)
    ours = products.matmul(a, b, frozen=True)
    torch.testing.assert_close(ours.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_linear_layers_are_torchs(lead, bias, full):
    x, weight = torch.randn(*lead, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    added = torch.randn(3) if bias else None
    ours, theirs = products.linear(x, weight, added, frozen=True), F.linear(x, weight, added)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(ours.square().sum(), (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(theirs.square().sum(), (x, weight)))


def test_half_precision_and_other_layers_are_left_alone():
    x, weight = torch.randn(5, 4), torch.randn(3, 4)
    assert torch.equal(products.linear(x, weight, frozen=True), F.linear(x, weight))
    narrow = products.linear(x.bfloat16(), weight.bfloat16(), frozen=True)
    assert torch.equal(narrow, F.linear(x.bfloat16(), weight.bfloat16()))


def test_threads_do_not_share_anything(full):
    """Each thread's product is its own, while another switches the setting all the time."""
    stop = threading.Event()
    before = torch.get_float32_matmul_precision()

    def switching():
        while not stop.is_set():
            torch.set_float32_matmul_precision("medium")
            torch.set_float32_matmul_precision("highest")

    thread = threading.Thread(target=switching)
    thread.start()
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    truth = a.double() @ b.double()
    errors = [
        (products.matmul(a, b, frozen=True).double() - truth).abs().max().item() for _ in range(200)
    ]
    stop.set()
    thread.join()
    assert max(errors) < 1e-4
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("device", "op", "place", "rounded"),
    [
        ("cuda", "matmul", "cuda.matmul", "tf32"),
        ("cuda", "conv", "cudnn.conv", "tf32"),
        ("cpu", "matmul", "mkldnn.matmul", "bf16"),
    ],
)
def test_the_settings_of_pytorch_are_read(device, op, place, rounded):
    backend, name = place.split(".")
    setting = getattr(getattr(torch.backends, backend), name)
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "ieee"
        assert not products.rounds(device, op)
        setting.fp32_precision = rounded
        assert products.rounds(device, op)
    finally:
        setting.fp32_precision = before
    assert setting.fp32_precision == before


def test_wrapped_tensors_are_multiplied_with_all_bits_too(full, rounding):
    """Where kernels are not launched as they are, in `torch.vmap` and in traced graphs."""
    a, b = torch.randn(3, 5, 4), torch.randn(4, 6)
    truth = a.double() @ b.double()
    rounded = (a @ b).double() - truth
    found = torch.vmap(lambda each: products.matmul(each, b, frozen=True))(a)
    assert rounded.abs().max() > 1e-4
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=1e-6)


LARGE = {"rows": (64, 128), "tokens": (2, 33, 128), "one row": (8192,)}


@pytest.fixture
def onednn(monkeypatch):
    """Counts the products that oneDNN computes."""
    if not products.HAS_ONEDNN:
        pytest.skip("PyTorch has no oneDNN for this processor")
    calls, original = [], products._by_onednn

    def counted(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(products, "_by_onednn", counted)
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", LARGE)
def test_large_products_are_onednns(shape, bias, onednn):
    x = torch.randn(LARGE[shape], requires_grad=True)
    weight = torch.randn(128, x.shape[-1], requires_grad=True)
    given = [x, weight, *([torch.randn(128, requires_grad=True)] if bias else [])]

    def passes(linear):
        y = linear(*given)
        slopes = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        twice = torch.autograd.grad(slopes[0].square().sum(), given)
        return y, *slopes, *twice

    ours = passes(lambda *tensors: products.linear(*tensors, frozen=True))
    assert onednn
    exact = passes(lambda *tensors: F.linear(*(t.double() for t in tensors)))
    for found, expected in zip(ours, exact, strict=True):
        assert (found - expected).norm() <= 1e-6 * expected.norm()
    with torch.no_grad():
        assert torch.equal(products.linear(*given, frozen=False), ours[0])


def test_biases_of_any_kind_are_added_as_pytorch_does(onednn):
    x, weight = torch.randn(64, 128), torch.randn(128, 128)
    for bias in (torch.randn(256)[::2], torch.randn(1).expand(128), torch.randn(1)):
        found = products.linear(x, weight, bias, frozen=False)
        torch.testing.assert_close(found, F.linear(x, weight, bias))
    biases = torch.randn(3, 128)
    found = torch.vmap(lambda bias: products.linear(x, weight, bias, frozen=False))(biases)
    torch.testing.assert_close(found, F.linear(x, weight) + biases[:, None])
    assert not onednn


def test_wrong_widths_are_pytorchs_error():
    with pytest.raises(RuntimeError, match="64x128 and 127x128"):
        products.linear(torch.randn(64, 128), torch.randn(128, 127), frozen=False)


def test_no_rows_are_no_error(full):
    for lead in ((0,), (2, 0)):
        x = torch.randn(*lead, 4)
        assert products.linear(x, torch.randn(3, 4), frozen=True).shape == (*lead, 3)


def test_several_rows_are_one_product(onednn):
    x, weight = torch.randn(2, 33, 128, requires_grad=True), torch.randn(160, 128)
    y, seeds = products.linear(x, weight, frozen=True), torch.randn(3, 2, 33, 160)
    onednn.clear()
    rows = torch.vmap(lambda s: torch.autograd.grad(y, x, s, retain_graph=True)[0])(seeds)
    assert [given[0].shape for given in onednn] == [(3, 2, 33, 160)]
    torch.testing.assert_close(rows, seeds @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by torch.func.jvp
def test_what_is_not_a_plain_product_is_pytorchs(onednn, monkeypatch):
    x, weight = torch.randn(64, 128), torch.randn(128, 128)

    def plain(x=x, weight=weight):
        return products.linear(x, weight, frozen=True)

    expected = F.linear(x, weight)
    products.linear(x[:1], weight, frozen=True)
    plain(x.double(), weight.double())
    plain(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        plain()
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert torch.equal(plain(), expected)
    assert _Product()(x.to("meta"), weight.to("meta")).shape == expected.shape
    torch.testing.assert_close(torch.func.jvp(plain, (x,), (x,))[1], expected)
    torch.testing.assert_close(torch.func.grad(lambda x: plain(x).sum())(x)[0], weight.sum(0))
    stacked = torch.vmap(lambda weight: plain(x, weight))(torch.stack([weight, -weight]))
    torch.testing.assert_close(stacked, torch.stack([expected, -expected]))
    exported = torch.export.export(_Product(), (x, weight)).graph_module.code
    assert "mkldnn" not in exported
    assert not onednn
    torch.testing.assert_close(plain(), expected, rtol=1e-4, atol=1e-4)
    assert len(onednn) == 1


class _Product(torch.nn.Module):
    def forward(self, x, weight):
        return products.linear(x, weight, frozen=False)


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("kernel", [(7, 7), (1, 2), (2, 5), (3, 3)])
@pytest.mark.parametrize("padding", [[0, 0], [3, 1], [1, 2]])
def test_adjoints_by_phases_are_torchs(stride, kernel, padding):
    x = torch.randn(2, 3, 16, 13, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    y = F.conv2d(x, weight, None, stride, padding)
    seed = torch.randn_like(y)
    found = products.adjoint_by_phases(seed, weight, stride, padding, [16, 13])
    torch.testing.assert_close(found, torch.autograd.grad(y, x, seed)[0])


@pytest.mark.parametrize("channels", [3, 12], ids=["image", "features"])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(2, 3, 1), (1, 1, 1), (2, 2, 2)])
def test_a_cpu_reads_back_what_torch_does(channels, stride, padding, dilation):
    x = torch.randn(2, channels, 11, 9, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(5, channels, 3, 3, dtype=torch.float64)
    window = (stride, padding, dilation)
    ours = products.convolution(x, weight, None, *window, frozen=True)
    assert "Pixels" in type(ours.grad_fn).__name__
    theirs = F.conv2d(x, weight, None, *window)
    seeds = torch.randn(3, *ours.shape, dtype=torch.float64)
    rows = torch.vmap(lambda s: torch.autograd.grad(ours, x, s, retain_graph=True)[0])(seeds)
    one_by_one = [torch.autograd.grad(theirs, x, s, retain_graph=True)[0] for s in seeds]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(rows, torch.stack(one_by_one))
    # Linear in what comes back.
    seed = seeds[0].clone().requires_grad_()
    back = torch.autograd.grad(ours, x, seed, create_graph=True)[0]
    again = torch.autograd.grad((back * x.detach()).sum(), seed)[0]
    torch.testing.assert_close(again, theirs.detach())


@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_sums_over_patches_are_exact_whatever_surrounds_them(dilation):
    images = 1e4 * torch.rand(2, 3, 9, 10)
    window = {"stride": (2, 1), "padding": (1, 2), "dilation": dilation}
    expected = F.conv2d(images.double(), torch.ones(3, 1, 3, 2).double(), groups=3, **window)
    with torch.autocast("cpu", torch.bfloat16):
        found = products.patch_sums(images, (3, 2), **window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_what_is_recorded_is_plain_torch(onednn):
    """A recorder, such as that of `bcosify`, sees functions of torch and not those of oneDNN."""
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(LARGE["rows"]), torch.randn(256, 128)
    with Recorder():
        products.linear(x, weight, frozen=False)
    assert torch.nn.functional.linear in seen and onednn == []
    products.linear(x, weight, frozen=False)
    assert len(onednn) == 1


@pytest.mark.parametrize("window", ["plain", "stride and padding", "depthwise", "1d", "3d"])
def test_traced_convolutions_have_the_shapes_of_real_ones(window):
    x_shape, weight_shape, (stride, padding, dilation, groups) = WINDOWS[window]
    axes = len(x_shape) - 2
    window = [[number] * axes for number in (stride, padding, dilation)]
    x, weight = torch.rand(x_shape), torch.rand(weight_shape)
    grad = torch.rand_like(products._convolve(x, weight, *window, groups))
    tests = ("test_schema", "test_faketensor")
    for op, *arguments in (
        (products._convolve, x, weight, *window, groups),
        (products._adjoint, grad, weight, *window, groups, list(x_shape[2:])),
    ):
        torch.library.opcheck(op, tuple(arguments), test_utils=tests)


def test_importing_the_library_does_not_import_the_compiler():
    """Which takes as long as all else."""
    script = "import sys, bcosvit.report.explain; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert done.stdout.strip() == b"False"
    # The mark that it would be imported for.
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == vars(products.rounds)

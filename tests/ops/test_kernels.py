"""The Triton kernels against float64 references: values and every gradient, on odd shapes.

On a GPU (`pytest tests/ops/test_kernels.py`) they run for real; elsewhere through Triton's
interpreter, whose products do not know bfloat16. Inputs differ on every run; a failure names its
seed. Output memory starts out as NaN, so that what a kernel forgets to write is seen.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bcosvit.ops import bcos_conv2d, bcos_linear, bcos_mlp, dispatch, prior_attention
from bcosvit.ops.attention import prior_attention_and_squares
from bcosvit.ops.bcos import bcos_scale, row_norms
from bcosvit.ops.dispatch import unit_rows, use_triton

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture
def seed():
    """A fresh seed, and NaN in all memory that nobody wrote."""
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield seed
    torch.use_deterministic_algorithms(False)


def unless_interpreted(dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no bfloat16")


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def opposed(outputs: int, m: int, inputs: int) -> Tensor:
    """Unit rows; the two of an output are opposite, so that rounding never picks the winner."""
    weight = unit_rows(random(outputs, inputs, dtype=torch.float32))
    return torch.stack([weight, -weight][:m], 1).flatten(0, 1)


def results(run, inputs: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """The value, and the gradient of a fixed random sum with respect to each input."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = run(*leaves)
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randn(out.shape, generator=generator).to(out)
    grads = torch.autograd.grad(out, leaves, seeds, allow_unused=True)
    zeros = [torch.zeros_like(x) for x in leaves]
    return [out.detach(), *(z if g is None else g for z, g in zip(zeros, grads, strict=True))]


def check(run, inputs: list[Tensor], seed: int) -> None:
    """``run(backend, *inputs)`` by the kernels, against float64."""
    dtype = inputs[0].dtype
    ours = results(lambda *x: run("triton", *x), inputs, None)
    truth = results(lambda *x: run("reference", *x), inputs, torch.float64)
    for place, (a, b) in enumerate(zip(ours, truth, strict=True)):
        # Some gradients are zero in exact arithmetic: a softmax over one token.
        error = (a.double() - b).norm() / b.norm().clamp_min(1)
        assert error < TOLERANCE[dtype], f"result {place}: {error:.1e} (seed {seed})"


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("b", [1, 1.5, 2, 2.5])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype, m, b, frozen, seed):
    from bcosvit.ops import bcos_triton

    runs = {"reference": bcos_scale, "triton": bcos_triton.bcos_scale}

    def run(backend, units, norm):
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
        return runs[backend](units, norm, b=b, maxout=m, scale=1.7, frozen=frozen)

    check(run, [random(3, 7, 5 * m, dtype=dtype), random(3, 7, 1, dtype=dtype).abs() + 9], seed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("b", [1, 1.5, 2, 2.5])
# In half precision two units may be too close to call: `test_scale` has those.
@pytest.mark.parametrize(("dtype", "m"), [*((dtype, 1) for dtype in DTYPES), (torch.float32, 4)])
def test_linear(dtype, m, b, frozen, seed):
    x = random(3, 7, 13, dtype=dtype)
    weight = unit_rows(random(5 * m, 13, dtype=dtype))
    check(
        lambda backend, *t: bcos_linear(
            *t, b=b, maxout=m, scale=1.7, frozen=frozen, backend=backend
        ),
        [x, weight],
        seed,
    )


@pytest.mark.parametrize("shape", [(1, 1, 8), (513, 3, 24), (33, 2050, 16), (2, 4097, 8)])
def test_linear_shapes(shape, seed):
    rows, outputs, inputs = shape
    x, weight = random(rows, inputs, dtype=torch.float32), opposed(outputs, 2, inputs)
    check(lambda backend, *t: bcos_linear(*t, maxout=2, backend=backend), [x, weight], seed)


def test_linear_strides(seed):
    x = random(13, 6, 5, dtype=torch.float32).permute(2, 1, 0)
    weight = opposed(4, 2, 13).T.contiguous().T
    check(lambda backend, *t: bcos_linear(*t, maxout=2, backend=backend), [x, weight], seed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("b", [1, 2, 2.5])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_product(dtype, m, b, frozen, seed, monkeypatch):
    """The kernel that multiplies and scales in one, on shapes that no tile divides."""
    from bcosvit.ops import bcos_triton as triton

    unless_interpreted(dtype)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "TILES", triton.Tiles(32, 64, 32, 4, 2))

    def run(backend, x, weight):
        if backend == "reference":
            return bcos_linear(x, weight, b=b, maxout=m, scale=1.7, frozen=frozen, backend=backend)
        norm = row_norms(x, b, 1e-6, frozen)
        return triton.product(x, weight, norm, b=b, maxout=m, scale=1.7, frozen=frozen)[0]

    check(run, [random(3, 37, 40, dtype=dtype), opposed(48, m, 40).to(dtype)], seed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("b", [1, 2, 2.5])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_mlp(fused, m, b, frozen, seed, monkeypatch):
    """The second transform's norm comes from the first's pass, and its gradient goes back there."""
    from bcosvit.ops import bcos_triton as triton

    dtype = torch.float16 if fused else torch.float32
    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "TILES", triton.Tiles(32, 64, 32, 4, 2))
    monkeypatch.setattr(triton, "fuses", lambda x, weight, m: fused)
    by = {"b": b, "maxout": m, "scale": 1.7, "eps": 1e-6}
    up, down = opposed(80, m, 24).to(dtype), opposed(16, m, 80).to(dtype)

    def undecided(x: Tensor) -> Tensor:
        """Rows where rounding of the hidden values could change a winner behind them."""
        hidden = bcos_linear(x.double(), up.double(), **by, backend="reference")
        units = (hidden @ down.double().T).abs() / hidden.norm(dim=-1, keepdim=True)
        return (units < 2e-3).any(-1)

    x = random(2, 19, 24, dtype=dtype)
    while (rows := undecided(x)).any():
        x[rows] = random(int(rows.sum()), 24, dtype=dtype)
    check(
        lambda backend, *t: bcos_mlp(*t, by, by, frozen=frozen, backend=backend),
        [x, up, down],
        seed,
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("window", [((1, 1), (0, 0), (1, 1)), ((2, 1), (1, 2), (1, 2))])
def test_conv(window, m, groups, seed):
    stride, padding, dilation = window
    x = random(2, 4, 9, 8, dtype=torch.float32)
    weight = unit_rows(random(6 * m, 4 // groups, 3, 3, dtype=torch.float32))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    check(
        lambda backend, *t: bcos_conv2d(*t, maxout=m, **options, backend=backend), [x, weight], seed
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["none", "add", "mul"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 2, 40, 12), (9, 1, 17, 16), (1, 1, 196, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype, shape, kind, frozen, seed):
    unless_interpreted(dtype)
    inputs = [random(*shape, dtype=dtype) for _ in range(3)]
    heads, tokens = shape[1:3]
    if kind != "none":
        inputs.append(random(heads, tokens, tokens, dtype=dtype))

    def run(backend, query, key, value, prior=None):
        return prior_attention(query, key, value, prior, kind=kind, frozen=frozen, backend=backend)

    check(run, inputs, seed)


def test_attention_reads_heads_out_of_rows(seed):
    """As the layer calls it: heads interleaved in memory, and the result flattened for free."""
    rows = [random(2, 20, 3 * 16, dtype=torch.float32) for _ in range(3)]

    def run(backend, *rows):
        heads = [x.unflatten(-1, (3, 16)).transpose(1, 2) for x in rows]
        out = prior_attention(*heads, backend=backend)
        return out.transpose(1, 2).flatten(2)

    check(run, rows, seed)
    out = prior_attention(
        *(x.unflatten(-1, (3, 16)).transpose(1, 2) for x in rows), backend="triton"
    )
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["none", "mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_hands_on_the_norms_of_its_tokens(dtype, kind, frozen, seed):
    unless_interpreted(dtype)
    inputs = [random(3, 2, 20, 12, dtype=dtype) for _ in range(3)]
    weight = opposed(5, 1, 24).to(dtype)
    prior = [random(2, 20, 20, dtype=dtype)] if kind != "none" else []
    found = []

    def run(backend, query, key, value, weight, prior=None):
        how = {"kind": kind, "frozen": frozen, "backend": backend}
        mixed, squares = prior_attention_and_squares(query, key, value, prior, **how)
        found.append(squares)
        rows = mixed.transpose(1, 2).flatten(2)
        return bcos_linear(rows, weight, frozen=frozen, backend=backend, squares=squares)

    check(run, [*inputs, weight, *prior], seed)
    assert found[0].shape == (3, 20, 1)
    assert found[1] is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("classes", [1, 4, 6])
def test_several_classes_at_once(classes, frozen, seed):
    """The adjoint of several outputs in one pass equals one pass each."""
    x = random(12, 16, dtype=torch.float32).requires_grad_()
    weight = opposed(48, 2, 16)
    value = bcos_linear(x, weight, maxout=2, frozen=frozen, backend="triton").view(2, 3, 6, 16)
    query, key = (random(2, 3, 6, 16, dtype=torch.float32) for _ in range(2))
    prior = random(3, 6, 6, dtype=torch.float32)
    # Gradients of A itself are not computed for several outputs at once.
    out = prior_attention(query, key, value, prior, kind="mul", frozen=True, backend="triton")
    seeds = random(classes, *out.shape, dtype=torch.float32)
    (together,) = torch.autograd.grad(out, x, seeds, retain_graph=True, is_grads_batched=True)
    for each, grad in zip(seeds, together, strict=True):
        torch.testing.assert_close(torch.autograd.grad(out, x, each, retain_graph=True)[0], grad)


def test_a_zero_input_has_a_zero_output_and_finite_gradients(seed):
    x = torch.zeros(3, 8, device=DEVICE, requires_grad=True)
    weight = unit_rows(random(8, 8, dtype=torch.float32)).requires_grad_()
    for b in (1, 1.5, 2, 2.5):
        out = bcos_linear(x, weight, b=b, maxout=2, backend="triton")
        assert (out == 0).all()
        for grad in torch.autograd.grad(out.sum(), (x, weight)):
            assert grad.isfinite().all()


def test_the_same_bits_every_time(seed):
    inputs = [random(5, 2, 40, 16, dtype=torch.float16) for _ in range(3)]
    prior = random(2, 40, 40, dtype=torch.float16)
    runs = [
        results(
            lambda *t: prior_attention(*t, kind="mul", backend="triton"), [*inputs, prior], None
        )
        for _ in range(3)
    ]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_custom_ops_are_well_formed(seed):
    """Schema, fake implementation and autograd agree with the real thing."""
    from bcosvit.ops import attention_triton, bcos_triton

    units = random(6, 10, dtype=torch.float32).requires_grad_()
    norm = random(6, dtype=torch.float32).abs().add(1).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        bcos_triton._scale, (units, norm, 2, 2.0, 1.0, False, True, True), test_utils=tests
    )
    heads = [random(2, 2, 5, 8, dtype=torch.float32).requires_grad_() for _ in range(3)]
    prior = random(2, 5, 5, dtype=torch.float32).requires_grad_()
    for with_squares in (False, True):
        given = (*heads, prior, 2, False, with_squares)
        torch.library.opcheck(attention_triton._forward, given, test_utils=tests)


def test_traced_and_launched_agree(seed):
    """A compiled graph calls the kernels as ops, eager code launches them: the same numbers."""
    inputs = [random(2, 2, 20, 16, dtype=torch.float32) for _ in range(3)]
    prior, weight = random(2, 20, 20, dtype=torch.float32), opposed(16, 2, 16)

    def run(query, key, value, prior, weight):
        value = bcos_linear(value, weight, maxout=2, backend="triton")
        return prior_attention(query, key, value, prior, kind="mul", backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    launched = results(run, [*inputs, prior, weight], None)
    traced = results(compiled, [*inputs, prior, weight], None)
    for a, b in zip(launched, traced, strict=True):
        torch.testing.assert_close(a, b)


def test_auto_leaves_the_cpu_to_the_reference():
    assert not use_triton("auto", torch.zeros(1))
    assert not use_triton("reference", torch.zeros(1))


@pytest.mark.parametrize(
    ("dtype", "has_kernels"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)],
)
def test_auto_takes_the_kernels_on_a_gpu_for_what_they_know(dtype, has_kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.empty(1, dtype=dtype, device="cuda")
    assert use_triton("auto", tensor) == has_kernels


def test_the_wrong_backend_says_so(monkeypatch):
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        use_triton("cuda", torch.zeros(1))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="float64"):
        use_triton("triton", torch.zeros(1, dtype=torch.float64))

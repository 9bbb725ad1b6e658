"""Compressed gradients of MaxOut 2: the bits that say where numbers belong, and the products.

Without a GPU the kernels run in Triton's interpreter, and the product with a compressed matrix is
replaced by one with the matrix that its bits describe.
"""

import pytest
import torch
from torch import Tensor

from bcosvit.ops import bcos_linear
from bcosvit.ops.dispatch import unit_rows

pytest.importorskip("triton")

from bcosvit.ops import bcos_triton, sparse_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if DEVICE == "cpu" and not bcos_triton.triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")


def expanded(whole: Tensor, rows: int, outputs: int) -> Tensor:
    """The matrix [R, 2·C] that a compressed one describes, read bit by bit."""
    count = rows * outputs
    numbers, bits = whole[:count].view(rows, outputs), whole[count:].view(torch.uint8).tolist()
    matrix = torch.zeros(rows, 2 * outputs, dtype=whole.dtype, device=whole.device)
    for r in range(rows):
        for group in range(outputs // 2):
            tile = (r // 64) * (outputs // 16) + group // 8
            g, within = group % 8, r % 64
            byte = bits[256 * tile + 64 * (within // 16) + 8 * (r % 8) + 2 * (g % 4) + g // 4]
            places = byte >> 4 if r % 16 >= 8 else byte & 15
            matrix[r, 4 * group + places % 4] = numbers[r, 2 * group]
            matrix[r, 4 * group + places // 4] = numbers[r, 2 * group + 1]
    return matrix


@pytest.mark.parametrize(("rows", "outputs"), [(64, 32), (128, 96), (192, 16)])
def test_places_are_those_of_the_winners(rows, outputs):
    winner = torch.randint(2, (rows, outputs), dtype=torch.uint8, device=DEVICE)
    whole, numbers, places = sparse_triton.room(rows, outputs, torch.zeros(0, device=DEVICE).half())
    numbers.copy_(torch.arange(rows * outputs).view(rows, outputs) % 1000 + 1)
    sparse_triton.write_places(winner, places)
    truth = torch.zeros(rows, outputs, 2, dtype=whole.dtype, device=DEVICE)
    truth.scatter_(2, winner.long()[..., None], numbers[..., None])
    assert torch.equal(expanded(whole, rows, outputs), truth.flatten(1))


def test_several_gradients_of_the_same_rows_have_the_same_places():
    winner = torch.randint(2, (64, 32), dtype=torch.uint8, device=DEVICE)
    one, three = (torch.empty(n * 512, dtype=torch.uint8, device=DEVICE) for n in (1, 3))
    sparse_triton.write_places(winner, one)
    sparse_triton.write_places(winner, three)
    assert torch.equal(three, one.repeat(3))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("b", [1.0, 2.0, 2.5])
def test_gradients_of_a_layer_are_the_same(b, frozen, monkeypatch):
    """The whole path around the product: numbers, places and norms."""
    if DEVICE == "cpu":
        monkeypatch.setattr(bcos_triton, "TILES", bcos_triton.Tiles(32, 64, 32, 4, 2))
        monkeypatch.setattr(sparse_triton, "is_usable", lambda device, dtype: True)

        def multiply(whole: Tensor, weight: Tensor) -> Tensor:
            called.append(1)
            outputs = weight.shape[0] // 2
            return expanded(whole, whole.numel() * 8 // 9 // outputs, outputs) @ weight

        monkeypatch.setattr(sparse_triton, "multiply", multiply)
    called: list[int] = []
    torch.manual_seed(0)
    x = torch.randn(1024, 32, device=DEVICE).half().requires_grad_()
    half = unit_rows(torch.randn(32, 32, device=DEVICE))
    # Opposite units: rounding never picks the winner.
    weight = torch.stack([half, -half], 1).flatten(0, 1).half()
    seeds = torch.randn(1024, 32, device=DEVICE).half()

    def gradient(suits: bool) -> Tensor:
        monkeypatch.setattr(sparse_triton, "suits", lambda *args: suits)
        y = bcos_linear(x, weight, b=b, maxout=2, frozen=frozen, backend="triton")
        return torch.autograd.grad(y, x, seeds)[0]

    dense, sparse = gradient(False), gradient(True)
    assert len(called) == (DEVICE == "cpu")
    assert (dense - sparse).norm() <= 1e-3 * dense.norm()


def test_weights_that_are_learned_need_the_whole_gradient(monkeypatch):
    """Of which the gradient of the input then costs nothing more to make."""
    monkeypatch.setattr(sparse_triton, "suits", lambda *args: pytest.fail("asked for"))
    x = torch.randn(1024, 32, device=DEVICE).half().requires_grad_()
    weight = unit_rows(torch.randn(64, 32, device=DEVICE)).half().requires_grad_()
    bcos_linear(x, weight, maxout=2, backend="triton").sum().backward()
    assert weight.grad is not None


def test_it_is_for_large_products_in_half_precision():
    def suits(rows, outputs, inputs, dtype=torch.bfloat16):
        grad = _OnGpu(torch.empty(rows, outputs, dtype=dtype, device="meta"))
        weight = torch.empty(2 * outputs, inputs, dtype=dtype, device="meta")
        return sparse_triton.suits(grad, weight)  # type: ignore[arg-type]

    assert suits(50176, 768, 3072) and suits(50176, 3072, 768)
    assert not suits(50176, 768, 768) and not suits(784, 768, 3072)
    assert not suits(100352, 3072, 512)
    assert not suits(50177, 768, 3072) and not suits(50176, 768, 3072, torch.float32)


class _OnGpu:
    """A tensor's shape and dtype, as if it lay on a GPU."""

    is_cuda = True

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype = like.shape, like.dtype


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cusparselt_stores_what_is_expected(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    if not torch.backends.cusparselt.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the order of the bits is that of Hopper GPUs")
    assert sparse_triton.is_usable(device, dtype)
    rows, outputs, inputs = 256, 128, 64
    winner = torch.randint(2, (rows, outputs), dtype=torch.uint8, device=device)
    whole, numbers, places = sparse_triton.room(
        rows, outputs, torch.zeros(0, device=device).to(dtype)
    )
    numbers.normal_()
    sparse_triton.write_places(winner, places)
    weight = torch.randn(2 * outputs, inputs, device=device).to(dtype)
    truth = torch.zeros(rows, outputs, 2, device=device, dtype=torch.float64)
    truth.scatter_(2, winner.long()[..., None], numbers.double()[..., None])
    truth = truth.flatten(1) @ weight.double()
    found = sparse_triton.multiply(whole, weight)
    assert (found.double() - truth).norm() <= 1e-2 * truth.norm()

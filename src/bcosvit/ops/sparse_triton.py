"""Products with the gradient of MaxOut 2 on the sparse tensor cores of a GPU.

Of the two units of an output one has won, and the other one's gradient is zero: of any four numbers
in a row at least two are. That is the pattern "2:4" which tensor cores multiply at up to twice the
rate. cuSPARSELt, which comes with PyTorch for CUDA, wants such a matrix compressed: first the
numbers that are not zero, which are the outputs' gradients as they are, then four bits per four
units that say where they belong. So nothing is searched for zeros, and nothing is expanded.

The bits are stored in the order in which a Hopper GPU loads them. Tiles of 64 rows × 32 units
follow one another along the rows. With a row r of a tile, and g the number of a group of four
units in it:

    byte   64·(r // 16) + 8·(r % 8) + 2·(g % 4) + g // 4
    bits   0 to 3 where r % 16 < 8, else 4 to 7: first unit's place (0 or 1), second's (2 or 3)

This order is not documented. Before it is used in a process it is compared with what cuSPARSELt
itself writes; where the two differ, or there is no cuSPARSELt, the product is an ordinary one.
Letters: R rows, C outputs, U = 2·C units, D inputs.
"""

import statistics
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from bcosvit.ops.dispatch import HALF_DTYPES

SMALLEST = 2**36
"""R·U·D from which on a product takes longer than cuSPARSELt's preparations on the CPU."""

WIDE = 768
"""The smallest D for which a compressed gradient was measured to pay."""

_PAIRS = 64
# Ways to multiply that cuSPARSELt is asked to try.
_WAYS = 8


def suits(grad: Tensor, weight: Tensor) -> bool:
    """Whether a product of the gradient [R, C] of MaxOut 2 and ŵ [U, D] is worth compressing it."""
    rows, (units, inputs) = grad.shape[0], weight.shape
    return (
        grad.is_cuda
        and grad.dtype in HALF_DTYPES
        and weight.dtype == grad.dtype
        and units == 2 * grad.shape[1]
        and rows % 64 == 0
        and units % 64 == 0
        and inputs % 16 == 0
        and rows * units * inputs >= SMALLEST
        and inputs >= WIDE
    )


def room(rows: int, outputs: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for a compressed matrix: as a whole, and its numbers [R, C] and its bits as bytes."""
    numbers = rows * outputs
    whole = like.new_empty(numbers + numbers // 8)
    return whole, whole[:numbers].view(rows, outputs), whole[numbers:].view(torch.uint8)


def write_places(winner: Tensor, places: Tensor) -> None:
    """Writes the bits for winners [R, C]; again for each of several gradients of the same rows."""
    rows, outputs = winner.shape
    _places_kernel[(rows // 64 * triton.cdiv(outputs // 2, _PAIRS),)](
        winner.view(torch.int16), places.view(torch.int32), rows // 64, outputs,
        4 * places.numel() // winner.numel(), PAIRS=_PAIRS,
    )  # fmt: skip


def multiply(whole: Tensor, weight: Tensor) -> Tensor:
    """d_units [R, U] @ ŵ [U, D] for a compressed d_units."""
    way = fastest_way(whole.numel(), weight.shape, weight.dtype, weight.device)
    return _multiply(whole, weight, way)


def _multiply(whole: Tensor, weight: Tensor, way: int) -> Tensor:
    rows = whole.numel() * 8 // 9 // (weight.shape[0] // 2)
    compressed = whole.view(rows, -1)
    product: Tensor = torch._cslt_sparse_mm(compressed, weight.contiguous(), alg_id=way)
    return product


_ways: dict[tuple[int, torch.Size, torch.dtype, torch.device], int] = {}


def fastest_way(numbers: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> int:
    """cuSPARSELt's fastest way to multiply matrices of a shape, tried once in a process."""
    key = numbers, shape, dtype, device
    if key not in _ways:
        if torch.cuda.is_current_stream_capturing():
            return 0
        whole = torch.randn(numbers, device=device).to(dtype)
        # Of every two units the first one has won.
        whole[numbers // 9 * 8 :].view(torch.uint8).fill_(0x88)
        weight = torch.randn(shape, device=device).to(dtype)
        times = {}
        for way in range(_WAYS):
            try:
                times[way] = _milliseconds(whole, weight, way)
            except RuntimeError:
                # There are fewer ways.
                break
        _ways[key] = min(times, key=lambda way: times[way], default=0)
    return _ways[key]


def _milliseconds(whole: Tensor, weight: Tensor, way: int) -> float:
    """The time on the GPU, which is kept busy while the CPU prepares the calls."""
    other = torch.zeros(4096, 4096, dtype=weight.dtype, device=weight.device)
    _multiply(whole, weight, way)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for _ in range(40):
        other @ other
    for mark in marks:
        _multiply(whole, weight, way)
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in pairwise(marks))


def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuSPARSELt stores what this file stores, found out once in a process."""
    if torch.cuda.is_current_stream_capturing() and (device, dtype) not in _found:
        return False
    if (device, dtype) not in _found:
        _found[device, dtype] = _is_usable(device, dtype)
    return _found[device, dtype]


_found: dict[tuple[torch.device, torch.dtype], bool] = {}


def _is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    if not torch.backends.cusparselt.is_available():
        return False
    rows, outputs = 192, 96
    generator = torch.Generator().manual_seed(0)
    winner = torch.randint(2, (rows, outputs), generator=generator, dtype=torch.uint8)
    # No number is zero, which could be stored in several places.
    values = torch.arange(1, rows * outputs + 1).remainder(64).add(1).view(rows, outputs)
    expanded = torch.zeros(rows, outputs, 2, dtype=dtype)
    expanded.scatter_(2, winner.long()[..., None], values.to(dtype)[..., None])
    try:
        theirs = torch._cslt_compress(expanded.flatten(1).to(device))
    except RuntimeError:
        return False
    whole, numbers, places = room(rows, outputs, theirs)
    numbers.copy_(values)
    write_places(winner.to(device), places)
    return torch.equal(whole.view(torch.uint8), theirs.view(torch.uint8).flatten())


@triton.jit
def _places_kernel(winner, places, row_tiles, outputs, copies, PAIRS: tl.constexpr):
    """``winner`` [R, C] is read two outputs at a time, the four units of a group; ``places`` is
    written four bytes at a time."""
    tile = tl.program_id(0) % row_tiles
    across = outputs // 2
    column = tl.program_id(0) // row_tiles * PAIRS + tl.arange(0, PAIRS)
    row = tile * 64 + tl.arange(0, 64)
    at = row.to(tl.int64)[:, None] * across + column[None, :]
    known = column < across
    pair = tl.load(winner + at, mask=known[None, :], other=0).to(tl.int32)
    bits = 8 + pair % 256 + 4 * (pair // 256)
    # Rows r and r + 8 of sixteen share a byte.
    halves = tl.permute(tl.reshape(bits, (4, 2, 8, PAIRS)), (0, 2, 3, 1))
    upper, lower = tl.split(halves)
    both = tl.reshape(upper + 16 * lower, (32, PAIRS))
    # The eight groups of a tile are two words: those with g % 4 of 0 and 1, and of 2 and 3.
    group = column % 8
    apart = tl.reshape(both << (16 * (group % 2) + 8 * (group // 4)), (32, PAIRS // 8, 2, 2, 2))
    words = tl.sum(tl.sum(apart, 4), 2)
    words = tl.reshape(tl.permute(words, (1, 0, 2)), (PAIRS // 8, 64))
    tiles = tl.program_id(0) // row_tiles * (PAIRS // 8) + tl.arange(0, PAIRS // 8)
    at = tile.to(tl.int64) * 8 * across + 64 * tiles[:, None] + tl.arange(0, 64)[None, :]
    for copy in range(copies):
        start = (tl.full((), 0, tl.int64) + copy) * row_tiles * 8 * across
        tl.store(places + start + at, words, mask=(8 * tiles < across)[:, None])

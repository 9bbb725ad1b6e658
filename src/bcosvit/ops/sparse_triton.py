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

WIDE = 1536
"""D from which on a compressed gradient pays where the expanded one is needed as well."""

_BYTES = 1024
# Ways to multiply that cuSPARSELt is asked to try.
_WAYS = 8


def suits(grad: Tensor, weight: Tensor, *, expanded: bool) -> bool:
    """Whether a product with the gradient [R, C] of MaxOut 2 is worth a compressed matrix.

    Args:
        grad: [R, C].
        weight: [U, D].
        expanded: Whether the expanded gradient [R, U] is computed in any case.
    """
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
        and (inputs >= WIDE or not expanded)
    )


def room(rows: int, outputs: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for a compressed matrix: as a whole, and its numbers [R, C] and its bits as bytes."""
    numbers = rows * outputs
    whole = like.new_empty(numbers + numbers // 8)
    return whole, whole[:numbers].view(rows, outputs), whole[numbers:].view(torch.uint8)


def write_places(winner: Tensor, places: Tensor) -> None:
    """Writes the bits for winners [R, C]; again for each of several gradients of the same rows."""
    rows, outputs = winner.shape
    _places_kernel[(triton.cdiv(places.numel(), _BYTES),)](
        winner.view(torch.int16), places, places.numel(), rows // 64, outputs, BYTES=_BYTES
    )


def multiply(whole: Tensor, weight: Tensor) -> Tensor:
    """d_units [R, U] @ ŵ [U, D] for a compressed d_units."""
    way = fastest_way(whole.numel(), weight.shape, weight.dtype, weight.device)
    return _multiply(whole, weight, way)


def _multiply(whole: Tensor, weight: Tensor, way: int) -> Tensor:
    product: Tensor = torch._cslt_sparse_mm(whole, weight.contiguous(), alg_id=way)
    return product


_ways: dict[tuple[int, torch.Size, torch.dtype, torch.device], int] = {}


def fastest_way(numbers: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> int:
    """cuSPARSELt's fastest way to multiply matrices of a shape, tried once in a process."""
    key = numbers, shape, dtype, device
    if key not in _ways:
        if torch.cuda.is_current_stream_capturing():
            return 0
        # Any bits are places: the numbers are zeros.
        whole = torch.zeros(numbers, dtype=dtype, device=device)
        whole[numbers // 9 * 8 :].view(torch.uint8).fill_(0x88)
        weight = torch.zeros(shape, dtype=dtype, device=device)
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
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
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
def _places_kernel(winner, places, count, row_tiles, outputs, BYTES: tl.constexpr):
    """``winner`` [R, C] is read two outputs at a time, the four units of a group."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    across = outputs // 16
    tile = byte // 256
    within = (byte % 256).to(tl.int32)
    group = within % 8 // 2 + 4 * (within % 2)
    row = tile // across % row_tiles * 64 + within // 64 * 16 + within % 64 // 8
    at = row * (outputs // 2) + tile % across * 8 + group
    mask = byte < count
    upper = tl.load(winner + at, mask=mask, other=0).to(tl.int32)
    lower = tl.load(winner + at + 8 * (outputs // 2), mask=mask, other=0).to(tl.int32)
    upper = 8 + upper % 256 + 4 * (upper // 256)
    lower = 8 + lower % 256 + 4 * (lower // 256)
    tl.store(places + byte, (upper + 16 * lower).to(tl.uint8), mask=mask)

"""Kernels for CPUs in C, which are compiled on demand and are faster than PyTorch's ops.

- ``depthwise.c``: the B-cos transform of a depthwise convolution. It needs so few multiplications
  that its time is that of reading the image once; PyTorch's ops read and write the result nine more
  times.
- ``winners.c``: the adjoint of MaxOut 2. Half of the gradients of the units are zeros, which a
  product of matrices would multiply too.
- ``scaling.c``: MaxOut and scaling, in one pass over memory instead of one per step.
- ``share.c``: divides the rows of a result among PyTorch's threads.

The files are compiled together, for the processor of this machine, when a process first needs one
of them, and the result is cached. If they cannot be compiled, or if ``BCOSVIT_CPU_KERNEL=0`` is
set, PyTorch's ops compute the same.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.files import atomic, cache_folder
from bcosvit.ops.dispatch import is_plain

SWITCH = "BCOSVIT_CPU_KERNEL"
"""The environment variable that, if it is 0, switches the kernels off."""

HERE = Path(__file__).parent
SOURCES = [HERE / f"{name}.c" for name in ("depthwise", "winners", "scaling", "share")]
HEADERS = [HERE / "lanes.h", HERE / "share.h"]
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
TIMEOUT, RETRY_AFTER = 60, 24 * 3600
"""Seconds that a compiler may take, and after which one that took longer is tried again."""
LEAST_CHANNELS = 32
"""Two vectors, as many as the kernel of depthwise convolutions computes at once."""

MOST_VECTORS, LEAST_LANES = 8, 8
"""The most vectors of a chunk in ``winners.c``, and the fewest numbers of a vector for which the
kernel is faster than PyTorch."""

LEAST_UNITS = 2**14
"""The fewest numbers for which the kernel of scaling is faster than PyTorch."""

SMALLEST_SHARE = 2**18
"""Results of a depthwise convolution for which a thread of its own pays."""


@dataclass(frozen=True)
class Kernels:
    """What was compiled, or why nothing was."""

    about: str
    """By which compiler, or what is missing."""
    depthwise: Any = None
    """The function of ``depthwise.c``; None where there is none."""
    winners: Any = None
    """That of ``winners.c``, likewise."""
    lanes: int = 0
    """Numbers of a vector in ``winners.c``."""
    scale: Any = None
    """The function of ``scaling.c``."""
    has_threads: bool = False
    """Whether several threads can share the rows of a result."""


_found: list[Kernels] = []
_lock = Lock()


def kernels() -> Kernels:
    """Compiles and loads the kernels unless this process has done so already.

    Returns:
        The kernels; `Kernels.about` says why where there are none.
    """
    if not _found:
        with _lock:
            if not _found:
                _found.append(_load())
    return _found[0]


def depthwise(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    scale: float,
    eps: float,
) -> Tensor | None:
    """The B-cos transform with B = 2 of each channel of an image by itself.

    Args:
        x: [n, c, h, w], its channels last in memory.
        weight: [c, 1, kernel height, kernel width], of norm one per channel.
        stride: Vertical and horizontal, as are ``padding`` and ``dilation``.
        padding: Zeros around the image.
        dilation: Distance between the pixels of a patch.
        scale: The factor γ.
        eps: Added to the squared norm of a patch.

    Returns:
        [n, c, output height, output width], laid out like ``x``; None where PyTorch has to compute
        it: there is no kernel, a gradient is wanted, or tensors are of another kind.
    """
    (n, channels, *size), taps = x.shape, weight.shape[2:]
    window = list(zip(size, taps, stride, padding, dilation, strict=True))
    out_size = [(s + 2 * p - d * (k - 1) - 1) // step + 1 for s, k, step, p, d in window]
    if not _suits(x, weight, out_size) or (run := kernels().depthwise) is None:
        return None
    out = x.new_empty(n, *out_size, channels)
    # By tap, as the kernel reads it. No gradient is wanted, see `_suits`.
    with torch.no_grad():
        by_tap = weight.flatten(1).t().contiguous()
    numbers = [*size, channels, *out_size, *taps, *stride, *padding, *dilation]
    about = (ctypes.c_long * len(numbers))(*numbers)
    rows = n * out_size[0]
    pointers = (t.data_ptr() for t in (x, by_tap, out))
    run(*pointers, about, scale, eps, rows, _threads(rows, out.numel()))
    return out.permute(0, 3, 1, 2)


def winners_adjoint(
    grad: Tensor,
    factor: Tensor,
    weight: Tensor,
    *,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The adjoint of a convolution, of MaxOut 2 and of factors, for which there is a kernel.

    Args:
        grad: [i·n, output height, output width, c] in float32, i gradients of the same result.
        factor: [n, output height, output width, c], negative where the second unit was larger.
        weight: [2·c, d, kernel height, kernel width], the first units of all outputs first.
        size: Height and width of the input.
        stride: Vertical and horizontal, as is ``padding``.
        padding: Zeros around the input.

    Returns:
        [i·n, height, width, d].
    """
    run, lanes, gradients = kernels().winners, kernels().lanes, len(grad) // len(factor)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    factor = factor.contiguous()
    (n, *out_size, outputs), (channels, *taps) = grad.shape, weight.shape[1:]
    # What a row of taps reaches lies together, and is cut into chunks of about the same length.
    reached = taps[1] * channels
    vectors = -(-reached // lanes)
    # Two gradients need twice the registers, of which there are 16 of eight numbers.
    chunks = -(-vectors // (MOST_VECTORS if gradients == 1 or lanes > 8 else 6))
    vectors = -(-vectors // chunks)
    chunk = vectors * lanes
    by_tap = weight.permute(2, 0, 3, 1).reshape(taps[0], 2, outputs, reached)
    by_tap = F.pad(by_tap, (0, chunks * chunk - reached)).unflatten(3, (chunks, chunk))
    by_tap = by_tap.permute(0, 3, 2, 1, 4).contiguous()
    out = grad.new_empty(n, *size, channels)
    width = max(
        (out_size[1] - 1) * stride[1] * channels + chunks * chunk,
        (padding[1] + size[1]) * channels,
    )
    numbers = [*size, channels, *out_size, outputs, *taps, *stride, *padding, chunks, vectors]
    numbers += [*grad.stride()[:3], len(factor), gradients, width]
    about = (ctypes.c_long * len(numbers))(*numbers)
    rows = -(-gradients // 2) * len(factor) * size[0]
    threads = _threads(rows, grad.numel() * reached * taps[0] // 16)
    # A line of the cache lies between the rooms of two threads.
    room = 2 * width + 3 * taps[0] * out_size[1] * outputs + 16
    scratch = grad.new_empty(threads * room)
    pointers = (t.data_ptr() for t in (grad, factor, by_tap, out, scratch))
    run(*pointers, about, room, rows, threads)
    return out


def scaled(
    units: Tensor, norm: Tensor, *, maxout: int, scale: float, with_factor: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """MaxOut and the cosine scaling with B = 2, of units that nothing else reads.

    Args:
        units: [..., m·c], the first units of all outputs first; it may be overwritten.
        norm: [..., 1].
        maxout: m, 1 or 2.
        scale: The factor γ.
        with_factor: Whether γ·|cos| is returned, too, negative where the second unit was larger.

    Returns:
        [..., c] twice; None where PyTorch has to compute it.
    """
    suits = (
        units.dtype == norm.dtype == torch.float32
        and units.numel() >= LEAST_UNITS
        and units.is_contiguous()
        and is_plain(units)
        and is_plain(norm)
    )
    if not suits or (run := kernels().scale) is None:
        return None
    shape = (*units.shape[:-1], units.shape[-1] // maxout)
    out = units if maxout == 1 else units.new_empty(shape)
    factor = units.new_empty(shape) if with_factor else None
    norm = norm.contiguous()
    pointers = (None if t is None else t.data_ptr() for t in (units, norm, out, factor))
    rows = norm.numel()
    run(*pointers, shape[-1], maxout, scale, rows, _threads(rows, units.numel() // 8))
    return out, factor


def _threads(rows: int, numbers: int) -> int:
    """How many threads pay.

    Args:
        rows: How many they could share.
        numbers: The work, as that of so many results of a depthwise convolution.
    """
    if not kernels().has_threads:
        return 1
    return min(torch.get_num_threads(), rows, max(1, numbers // SMALLEST_SHARE))


def _suits(x: Tensor, weight: Tensor, out_size: list[int]) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.shape[1] == weight.shape[0] >= LEAST_CHANNELS
        and weight.shape[1] == 1
        and min(out_size) > 0
        and is_plain(x)
        and is_plain(weight)
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _load() -> Kernels:
    if os.environ.get(SWITCH) == "0":
        return Kernels(f"{SWITCH} is 0")
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if os.name != "posix" or compiler is None:
        return Kernels("there is no C compiler (cc, gcc or clang)")
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
        depthwise, winners = library.bcosvit_depthwise, library.bcosvit_winners
        scale, lanes = library.bcosvit_scale, ctypes.c_long.in_dll(library, "bcosvit_lanes").value
        has_threads = _take_threads(library)
    except (OSError, RuntimeError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        return Kernels(f"{compiler} failed: {' '.join(str(error).split())[:200]}")
    pointer, number, whole = ctypes.c_void_p, ctypes.c_float, ctypes.c_long
    depthwise.argtypes = [*[pointer] * 4, number, number, whole, whole]
    winners.argtypes = [*[pointer] * 6, whole, whole, whole]
    scale.argtypes = [*[pointer] * 4, whole, whole, number, whole, whole]
    depthwise.restype = winners.restype = scale.restype = None
    pays = lanes >= LEAST_LANES
    about = f"compiled by {compiler}" + ("" if has_threads else ", for one thread")
    return Kernels(about, depthwise, winners if pays else None, lanes, scale, has_threads)


def _take_threads(library: ctypes.CDLL) -> bool:
    """Hands PyTorch's own OpenMP to the kernels, if it has one."""
    names = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
    try:
        # What a library depends on is looked up, too.
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [ctypes.cast(getattr(torch_library, name), ctypes.c_void_p) for name in names]
    except (OSError, AttributeError):
        return False
    library.bcosvit_threads(*found)
    return True


def _compiled(compiler: str) -> Path:
    """The compiled file in the cache, whose name stands for all that it is made from, and for its
    content: loading a file that was cut off would end the process."""
    found = os.stat(compiler)
    sources = [source.read_text() for source in (*SOURCES, *HEADERS)]
    about = [compiler, found.st_size, found.st_mtime_ns, *_processor()]
    # A folder may be shared, and only a file of one's own is loaded.
    key = _digest("\0".join(map(str, [*sources, *FLAGS, *about, os.getuid()])).encode())
    folder = cache_folder("kernels")
    path = next(filter(_is_whole, folder.glob(f"kernels-{key}-*.so")), None)
    path = path or _make(compiler, folder, key)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to another user")
    return path


def _is_whole(path: Path) -> bool:
    return path.stem.endswith(_digest(path.read_bytes()))


def _make(compiler: str, folder: Path, key: str) -> Path:
    hung = folder / f"kernels-{key}.timeout"
    if hung.is_file() and time.time() - hung.stat().st_mtime < RETRY_AFTER:
        raise RuntimeError(f"it took more than {TIMEOUT} s; to try again, remove {hung}")
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "kernels.so"
        try:
            _run([compiler, *FLAGS, "-x", "c", *map(str, SOURCES), "-o", str(made), "-lm"])
        except subprocess.TimeoutExpired as error:
            with atomic(hung) as marker:
                marker.touch()
            raise RuntimeError(f"it took more than {TIMEOUT} s and was ended") from error
        content = made.read_bytes()
    path = folder / f"kernels-{key}-{_digest(content)}.so"
    with atomic(path) as unfinished:
        unfinished.write_bytes(content)
    return path


def _run(command: list[str]) -> None:
    """Runs a compiler, and ends it with all processes that it has started if it takes too long."""
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, **options) as process:
        try:
            _, errors = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(errors or f"exit status {process.returncode}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> list[str]:
    """What tells processors apart that have other instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = ("model name", "flags", "Features", "isa")
    named = [line for line in lines if line.startswith(known)]
    return [platform.machine(), platform.processor(), *dict.fromkeys(named)]

"""``depthwise.c``, compiled on demand: depthwise B-cos convolutions on a CPU in one pass.

A depthwise convolution makes so few multiplications that it takes about as long as reading its
image, and PyTorch's ops read and write the result nine times more. The file is compiled at the
first such convolution of a process, for the processor at hand, and stays in the cache's folder.
Where it cannot be compiled, or ``BCOSVIT_CPU_KERNEL=0`` is set, PyTorch's ops compute the same.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from bcosvit.files import atomic, cache_folder
from bcosvit.ops.dispatch import is_plain

SWITCH = "BCOSVIT_CPU_KERNEL"
"""The environment variable that forbids to compile and to use the kernel where it is 0."""

SOURCE = Path(__file__).with_name("depthwise.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
LEAST_CHANNELS = 32
"""Two vectors, as many as the kernel computes at once."""

SMALLEST_SHARE = 2**18
"""Numbers for which a thread of its own pays."""


@dataclass(frozen=True)
class Kernel:
    """What was compiled, or why nothing was."""

    run: Any
    """The function of ``depthwise.c``; None where there is none."""
    about: str
    """By which compiler, or what is missing."""


_found: list[Kernel] = []
_lock = Lock()


def kernel() -> Kernel:
    """Compiles and loads the kernel unless this process has done so already.

    Returns:
        The kernel; `Kernel.about` says why where there is none.
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
    if not _suits(x, weight, out_size) or (run := kernel().run) is None:
        return None
    out = x.new_empty(n, *out_size, channels)
    # By tap, as the kernel reads it. No gradient is wanted, see `_suits`.
    with torch.no_grad():
        by_tap = weight.flatten(1).t().contiguous()
    numbers = [*size, channels, *out_size, *taps, *stride, *padding, *dilation]
    about = (ctypes.c_long * len(numbers))(*numbers)
    rows, row = n * out_size[0], out_size[1] * channels * out.element_size()

    def compute(begin: int, end: int) -> None:
        start = out.data_ptr() + begin * row
        run(x.data_ptr(), by_tap.data_ptr(), start, about, scale, eps, begin, end)

    threads = min(torch.get_num_threads(), rows, max(1, out.numel() // SMALLEST_SHARE))
    if threads == 1:
        compute(0, rows)
    else:
        ends = [rows * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(compute, ends[:-1], ends[1:]))
    return out.permute(0, 3, 1, 2)


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


def _load() -> Kernel:
    if os.environ.get(SWITCH) == "0":
        return Kernel(None, f"{SWITCH} is 0")
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if os.name != "posix" or compiler is None:
        return Kernel(None, "there is no C compiler (cc, gcc or clang)")
    try:
        path = _compiled(compiler)
        run = ctypes.CDLL(str(path)).bcosvit_depthwise
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return Kernel(None, f"{compiler} failed: {' '.join(str(error).split())[:200]}")
    pointers, numbers = [ctypes.c_void_p] * 4, [ctypes.c_float] * 2 + [ctypes.c_long] * 2
    run.argtypes, run.restype = [*pointers, *numbers], None
    return Kernel(run, f"compiled by {compiler}")


def _compiled(compiler: str) -> Path:
    """The compiled file in the cache, whose name stands for the source, compiler and processor."""
    found = os.stat(compiler)
    parts = [SOURCE.read_text(), *FLAGS, compiler, found.st_size, found.st_mtime_ns, *_processor()]
    name = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
    path = cache_folder("kernels") / f"depthwise-{name}.so"
    if not path.is_file():
        with atomic(path) as temporary:
            command = [compiler, *FLAGS, "-x", "c", str(SOURCE), "-o", str(temporary), "-lm"]
            made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if made.returncode:
                raise RuntimeError(made.stderr or f"exit status {made.returncode}")
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to another user")
    return path


def _processor() -> list[str]:
    """What tells processors apart that have other instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = ("model name", "flags", "Features", "isa")
    named = [line for line in lines if line.startswith(known)]
    return [platform.machine(), platform.processor(), *dict.fromkeys(named)]

"""What this machine has free: memory and processor cores, also where a container limits them."""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path("/")
"""Where the system describes itself, in ``proc`` and ``sys``."""

LARGE_GPU = 24 * 10**9
"""Bytes of memory from which on a GPU gets large batches."""


def free_memory(device: torch.device) -> int:
    """Returns the bytes that are free on a device, within the limits of a container.

    Args:
        device: A GPU, or the CPU. What the system would give back from its caches counts as free.

    Examples:
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        # What earlier runs of this process left behind counts as free.
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_left_in_groups()])


def used_memory() -> int:
    """Returns the bytes of main memory that this process occupies, or its peak where only that is
    known.

    Examples:
        >>> used_memory() > 2**20
        True
    """
    pages = (_read(ROOT / "proc/self/statm") or "").split()
    if len(pages) > 1:
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
    # In kilobytes, and in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_cores() -> int:
    """Returns the number of processor cores that this process may use.

    Examples:
        >>> cpu_cores() >= 1
        True
    """
    # Not on all systems.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for folder in _groups():
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def choose_batch_size(device: torch.device, image_size: tuple[int, int]) -> int:
    """Returns how many pictures pass through a model at once where no number is asked for.

    A GPU needs many to be busy. A CPU is faster with few: larger tensors leave its caches, and
    the system clears their memory for every layer.

    Args:
        device: Where the model computes.
        image_size: Height and width of a picture.

    Examples:
        >>> choose_batch_size(torch.device("cpu"), (224, 224))
        4
        >>> choose_batch_size(torch.device("cpu"), (48, 48))
        64
    """
    many = 4
    if device.type == "cuda":
        large = torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU
        many = 128 if large else 32
    height, width = image_size
    return max(1, min(max(many, 64), many * 224**2 // (height * width)))


def stored_bytes(run: Callable[[], object]) -> int:
    """Measures what a forward pass stores for its gradient: the bytes of all tensors, each storage
    once.

    Examples:
        >>> x = torch.ones(10, requires_grad=True)
        >>> stored_bytes(lambda: x.exp())
        40
    """
    stored: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        # Keeps the storage, so that no address comes twice, without a cycle through the graph.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(store, lambda x: x):
        # Named, so that it lives until the end.
        _result = run()
    return sum(stored.values())


def keep_freed_memory() -> bool:
    """Makes the rest of this process keep memory that it has freed, for what it allocates next.

    Otherwise glibc returns tensors of more than 32 MB to the system at once, which has to clear
    their memory before the next one. So the process occupies its peak to the end.

    Returns:
        Whether the C library has this setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    no_maps, trim_threshold = -4, -1
    return bool(mallopt(no_maps, 0) and mallopt(trim_threshold, 2**31 - 1))


def _left_in_groups() -> Iterator[int]:
    """Bytes left in each control group of this process that has a limit."""
    names = (
        # Version 2, and version 1 of control groups.
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _groups():
        for limit_name, used_name, cached_name in names:
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if not (limit and used and limit.isdigit() and used.isdigit()):
                continue
            lines = (_read(folder / "memory.stat") or "").splitlines()
            stat = dict(line.split() for line in lines if len(line.split()) == 2)
            yield max(0, int(limit) - int(used) + int(stat.get(cached_name, 0)))


def _groups() -> Iterator[Path]:
    """The folders of this process's control groups, and of the groups around them."""
    for line in (_read(ROOT / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        root = ROOT / "sys/fs/cgroup"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            root = root / "memory"
        own = root / path.strip("/")
        # In a container the path may be that of the machine around it.
        yield from (each for each in (own, *own.parents) if each.is_relative_to(root))


def _meminfo(name: str) -> int | None:
    lines = (_read(ROOT / "proc/meminfo") or "").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

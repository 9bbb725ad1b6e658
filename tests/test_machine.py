"""What is free, read from files as Linux writes them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bcosvit import machine

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with 8 GB of memory available, and nothing else known."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    write(tmp_path / "proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("device", "gigabytes", "side", "expected"),
    [
        ("cpu", None, 224, 4),
        ("cpu", None, 448, 1),
        ("cpu", None, 2000, 1),
        ("cpu", None, 16, 64),
        ("cuda", 8, 224, 32),
        ("cuda", 80, 224, 128),
        ("cuda", 80, 64, 128),
    ],
)
def test_how_many_pictures_at_once(monkeypatch, device, gigabytes, side, expected):
    if gigabytes is not None:
        properties = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert machine.choose_batch_size(torch.device(device), (side, side)) == expected


def test_what_the_system_has_available(root):
    assert machine.free_memory(CPU) == 8_000_000 * 1024


def test_all_memory_where_the_system_does_not_say(root):
    (root / "proc/meminfo").unlink()
    assert machine.free_memory(CPU) > 2**28


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/own", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/job/own",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_container(root, line, folder, names):
    write(root / "proc/self/cgroup", f"1:cpu:/\n{line}\n")
    groups, (most, used, cached) = root / "sys/fs/cgroup" / folder, names
    # The group itself has no limit, the one around it has.
    write(groups / "job/own" / most, "max\n")
    write(groups / "job/own" / used, "5000\n")
    write(groups / "job" / most, "3000000\n")
    write(groups / "job" / used, "1200000\n")
    assert machine.free_memory(CPU) == 1_800_000
    # What the kernel would drop is free.
    write(groups / "job" / "memory.stat", f"anon 1\n{cached} 200000\n")
    assert machine.free_memory(CPU) == 2_000_000


def test_cores(root):
    before = machine.cpu_cores()
    assert before >= 1
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert machine.cpu_cores() == before
    write(root / "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert machine.cpu_cores() == 1


def test_stored_bytes_count_each_storage_once():
    x = torch.ones(100, requires_grad=True)
    assert machine.stored_bytes(lambda: x.exp()) == 400
    # Both factors are stored, and one of them twice.
    assert machine.stored_bytes(lambda: (x * x) * x) == 800


FAULTS = """
import resource
import torch
from bcosvit.machine import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

new = pages()
if keep_freed_memory():
    # The first tensors still come from the system.
    for _ in range(6):
        pages()
    assert pages() < new / 2
"""


def test_freed_memory_is_kept_where_the_c_library_can():
    # The setting holds for the rest of a process.
    subprocess.run([sys.executable, "-c", FAULTS], check=True)

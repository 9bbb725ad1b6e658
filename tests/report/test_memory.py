"""Memory of `explain`, in a process that does nothing else: it must not grow with the pictures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bcosvit.predictor import Predictor
from bcosvit.report.explain import explain_pictures
from tests.report.support import write_pictures, write_weights

ROOT = Path(__file__).parents[2]


def resident() -> int:
    """Anonymous memory of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


def measure(weights: str, folder: str, out: str, methods: str) -> None:
    """Prints, before each picture, the memory taken and the bytes of the report on disk."""
    taken: list[tuple[int, int]] = []
    call = Predictor.explain

    def watched(self, *arguments, **options):
        written = sum(path.stat().st_size for path in Path(out).glob(".r.html.*"))
        taken.append((resident(), written))
        return call(self, *arguments, **options)

    Predictor.explain = watched
    explain_pictures(
        [folder], weights, methods=methods, out=f"{out}/r.html", npz=f"{out}/n", json=f"{out}/j"
    )
    print(json.dumps(taken))


def assert_flat(tmp_path: Path, count: int, methods: str, gain: int) -> None:
    """Less than ``gain`` bytes more in the last quarter than in the second.

    A report in memory would be 2,690,000 bytes more: half of 192 pictures with 28,000 bytes each.
    What the allocator and PyTorch keep grows for the first fifty pictures.
    """
    weights = write_weights(tmp_path / "model.safetensors", image_size=48)
    pictures = write_pictures(tmp_path / "pictures", 10, size=48)
    files = sorted(pictures.iterdir())
    for number in range(10, count):
        (pictures / f"{number:04}.png").hardlink_to(files[number % 10])
    names = [str(path) for path in (weights, pictures, tmp_path)]
    code = f"from tests.report.test_memory import measure; measure(*{[*names, methods]!r})"
    command = [sys.executable, "-c", code]
    # What measures coverage takes memory in the process, too.
    own = {name: text for name, text in os.environ.items() if not name.startswith("COVERAGE_")}
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=own)
    taken = json.loads(output.stdout)
    assert len(taken) == count
    memory, written = zip(*taken, strict=True)
    quarter = count // 4
    # The highest of a stretch: single readings depend on when freed memory is given back.
    assert max(memory[-quarter:]) - max(memory[quarter : 2 * quarter]) < gain
    size = (tmp_path / "r.html").stat().st_size
    assert size > 25_000 * count
    assert written[count // 2] > 0.4 * size


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)


@pytest.mark.slow
@needs_proc
def test_memory_is_flat(tmp_path):
    assert_flat(tmp_path, 192, "inherent,ixg,rollout", gain=1_000_000)

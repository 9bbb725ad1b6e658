"""How long bcosvit takes to start and to give a first result, and its memory, beside other imports.

    python benchmarks/startup.py [--repeats 3]

Each line is a process of its own: the median of its wall-clock seconds, and the largest memory. The
first process of a kind is left out, since it reads files that the others find in memory.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHOTO = Path(__file__).parents[1] / "src" / "bcosvit" / "photos" / "chelsea.jpg"
CASES = {
    "import torch": ["-c", "import torch"],
    "import timm": ["-c", "import timm"],
    "import gradio": ["-c", "import gradio"],
    "import bcosvit": ["-c", "import bcosvit"],
    "bcosvit.load()": ["-c", "import bcosvit; bcosvit.load()"],
    "bcosvit.explain(bcosvit.load(), photo)": [
        "-c",
        f"import bcosvit; bcosvit.explain(bcosvit.load(), {str(PHOTO)!r})",
    ],
    "bcosvit --version": ["-m", "bcosvit", "--version"],
    "bcosvit --help": ["-m", "bcosvit", "--help"],
    "bcosvit explain --help": ["-m", "bcosvit", "explain", "--help"],
    "bcosvit train --help": ["-m", "bcosvit", "train", "--help"],
    "bcosvit explain photo.jpg": [
        "-m",
        "bcosvit",
        "explain",
        str(PHOTO),
        "--out",
        str(Path(tempfile.gettempdir(), "startup.html")),
    ],
}


def measure(arguments: list[str]) -> tuple[float, float] | None:
    """Seconds and MiB of one process; None where it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return None
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"{'':42} {'seconds':>8} {'MiB':>6}")
    for name, arguments in CASES.items():
        found = [measure(arguments) for _ in range(repeats + 1)][1:]
        good = [each for each in found if each is not None]
        if not good:
            print(f"{name:42} {'fails':>8}")
            continue
        seconds = statistics.median(each[0] for each in good)
        print(f"{name:42} {seconds:8.2f} {max(each[1] for each in good):6.0f}", flush=True)


if __name__ == "__main__":
    main()

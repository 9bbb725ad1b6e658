"""How long bcosvit takes to start and to give a first result, and its memory, beside others.

    python benchmarks/startup.py [--repeats 3]

Each line is a process of its own: the median of its wall-clock seconds, the same as a multiple of
``import torch``, its processor seconds, which other work on the machine changes less, and the
largest memory. The first process of a kind is left out, since it reads files that the others find
in memory. timm's and Gradio's own first results stand beside ours.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHOTO = Path(__file__).parents[1] / "src" / "bcosvit" / "photos" / "chelsea.jpg"
PASS, TORCH = "python -c pass", "import torch"
COMMAND = shutil.which("bcosvit", path=str(Path(sys.executable).parent)) or "bcosvit"

# Before timm, which fails where torchvision was built for another torch.
IMPORT_TIMM = "from bcosvit import _torchvision; import timm"
TIMM = f"""
{IMPORT_TIMM}; import torch
model = timm.create_model("vit_tiny_patch16_224").eval()
with torch.no_grad():
    model(torch.rand(1, 3, 224, 224))
"""
GRADIO = """
import os, gradio, httpx
page = gradio.Interface(lambda image: image, "image", "image", analytics_enabled=False)
_, address, _ = page.launch(quiet=True, prevent_thread_lock=True)
assert httpx.get(address).status_code == 200
os._exit(0)
"""
SERVE = """
import os, httpx
from bcosvit.predictor import Predictor
from bcosvit.web.app import serving
from bcosvit.web.service import ExplanationService
with serving(ExplanationService(predictor=Predictor.load()), port=7893) as address:
    assert httpx.get(address).status_code == 200
    os._exit(0)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


CASES = {
    PASS: python("pass"),
    TORCH: python("import torch"),
    "import timm": python(IMPORT_TIMM),
    "import gradio": python("import gradio"),
    "import bcosvit": python("import bcosvit"),
    "timm: a random ViT-Ti predicts": python(TIMM),
    "bcosvit.load()": python("import bcosvit; bcosvit.load()"),
    "bcosvit.explain(bcosvit.load(), photo)": python(
        f"import bcosvit; bcosvit.explain(bcosvit.load(), {str(PHOTO)!r})"
    ),
    "gradio: an empty page is served": python(GRADIO),
    "bcosvit: the page is served": python(SERVE),
    "bcosvit --version": [COMMAND, "--version"],
    "bcosvit --help": [COMMAND, "--help"],
    "bcosvit explain --help": [COMMAND, "explain", "--help"],
    "bcosvit train --help": [COMMAND, "train", "--help"],
    "bcosvit train --recipe <Tab>": [COMMAND],
    "bcosvit explain photo.jpg": [
        *(COMMAND, "explain", str(PHOTO)),
        *("--out", str(Path(tempfile.gettempdir(), "startup.html"))),
    ],
}
COMPLETION = {
    "_BCOSVIT_COMPLETE": "complete_bash",
    "COMP_WORDS": "bcosvit train photos --recipe ",
    "COMP_CWORD": "4",
}


def measure(command: list[str], environment: dict[str, str]) -> tuple[float, float, float] | None:
    """Seconds, processor seconds and MiB of one process; None where it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return None
    taken = time.perf_counter() - start
    return taken, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    print(f"{'':40} {'seconds':>8} {'× torch':>8} {'CPU s':>8} {'MiB':>6}")
    medians: dict[str, float] = {}
    for name, command in CASES.items():
        extra = COMPLETION if name.endswith("<Tab>") else {}
        found = [measure(command, extra) for _ in range(repeats + 1)][1:]
        good = [each for each in found if each is not None]
        if not good:
            print(f"{name:40} {'fails':>8}")
            continue
        medians[name] = statistics.median(each[0] for each in good)
        ratio = medians[name] / medians[TORCH] if TORCH in medians else float("nan")
        cpu, largest = statistics.median(each[1] for each in good), max(each[2] for each in good)
        print(f"{name:40} {medians[name]:8.2f} {ratio:8.2f} {cpu:8.2f} {largest:6.0f}", flush=True)


if __name__ == "__main__":
    main()

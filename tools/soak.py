"""Whether memory and open files stay flat: serve, explain and train in a loop.

    python tools/soak.py [--minutes 30]

A server (`bcosvit serve`) with a small model answers requests for explanations of new uploads; this
process explains pictures by every method that applies and trains a small model again and again,
each time in a new folder. Resident memory and open file descriptors of both processes are sampled
all the while. The first third is a warm-up; the run fails if in the last third the median memory is
more than 5 % and 15 MB above that of the second third, or if more files are open.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import torch

import bcosvit
from bcosvit.data.scenes import Scenes
from bcosvit.predictor import Predictor
from bcosvit.train import train

SECONDS = 5.0
"""Between two samples."""


def megabytes(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def open_files(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def small_config() -> bcosvit.ModelConfig:
    stem = bcosvit.StemConfig(widths=(8, 12))
    sizes = {"width": 12, "num_heads": 3, "depth": 2, "mlp_ratio": 2, "image_size": 32}
    return bcosvit.ModelConfig(**sizes, num_classes=8, backbone=stem)  # type: ignore[arg-type]


def ask(address: str, picture: bytes, label: int) -> None:
    """Uploads a picture and asks for an explanation of it.

    Every request has a connection of its own: on one that is kept, a request may cross the
    server's closing of it for being idle, which HTTP leaves to the client to repeat.
    """
    start = time.monotonic()
    step = "upload"
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        with httpx.Client(base_url=address, timeout=120, limits=limits) as client:
            sent = client.post("/gradio_api/upload", files={"files": ("photo.png", picture)})
            photo = {"path": sent.json()[0], "meta": {"_type": "gradio.FileData"}}
            data = [photo, str(label), "", 0.75, False]
            step = "call"
            event = client.post("/gradio_api/call/explain", json={"data": data}).json()["event_id"]
            step = "result"
            answer = client.get(f"/gradio_api/call/explain/{event}").text
            if "event: complete" not in answer:
                raise RuntimeError(answer[:300])
    except Exception as error:
        seconds = time.monotonic() - start
        raise RuntimeError(f"{step} after {seconds:.1f} s: {error!r}") from error


class Work:
    """Three loops, each in a thread of its own, until the time is over."""

    def __init__(self, folder: Path, address: str, end: float) -> None:
        self.folder, self.address, self.end = folder, address, end
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        scenes = Scenes("val", size=48, length=16)
        for number in range(16):
            scenes[number].image.save(folder / f"{number}.png")
        self.pictures = [folder / f"{number}.png" for number in range(16)]

    def loop(self, name: str, step) -> None:  # type: ignore[no-untyped-def]
        while time.monotonic() < self.end:
            try:
                step(self.done[name])
            except Exception as error:  # counted and shown
                self.errors.append(f"{name}: {error!r}"[:300])
                time.sleep(1)
            self.done[name] += 1

    def serve(self, number: int) -> None:
        ask(self.address, self.pictures[number % 16].read_bytes(), number % 8)

    def explain(self, number: int) -> None:
        image = self.predictor.read(self.pictures[number % 16])
        names = self.predictor.methods("all")
        bcosvit.explain(self.predictor.model, image[None], number % 8, names[number % len(names)])

    def train(self, number: int) -> None:
        out = self.folder / f"run-{number}"
        small = {
            "epochs": 1,
            "warmup_epochs": 0,
            "batch_size": 16,
            "num_workers": 0,
            "seed": number,
        }
        data = "scenes?size=32&train=64&val=16"
        train(
            data, out=out, model=small_config(), recipe="quick", settings=small, accelerator="cpu"
        )
        shutil.rmtree(out)

    def run(self) -> dict[str, list[float]]:
        """Works, and samples both processes all the while."""
        self.predictor = Predictor.load(self.folder / "model.safetensors", "cpu")
        steps = {"serve": self.serve, "explain": self.explain}
        threads = [threading.Thread(target=self.loop, args=item) for item in steps.items()]
        samples: dict[str, list[float]] = {}
        watch = threading.Thread(target=self.sample, args=(samples,))
        for thread in (*threads, watch):
            thread.start()
        # Signals are handled in the main thread alone, as a run expects it.
        self.loop("train", self.train)
        for thread in (*threads, watch):
            thread.join()
        return samples

    def sample(self, samples: dict[str, list[float]]) -> None:
        processes = {"server": self.server, "explain and train": os.getpid()}
        while time.monotonic() < self.end:
            for name, process in processes.items():
                samples.setdefault(f"{name}, MB", []).append(megabytes(process))
                samples.setdefault(f"{name}, open files", []).append(open_files(process))
            time.sleep(SECONDS)

    server = 0


def grows(name: str, values: list[float]) -> bool:
    """Whether the last third is above the second; prints both."""
    third = len(values) // 3
    start, middle, last = values[0], values[third : 2 * third], values[2 * third :]
    before, after = statistics.median(middle), statistics.median(last)
    limit = max(1.05 * before, before + 15) if name.endswith("MB") else before
    print(
        f"{name}: {start:.0f} at the start, median {before:.0f} in the second third, {after:.0f} "
        f"in the last, at most {max(values):.0f}"
    )
    return after > limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--json", type=Path, help="a file for all samples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        notes = {"bcosvit.classes": json.dumps(Scenes.classes)}
        weights = folder / "model.safetensors"
        bcosvit.save(bcosvit.create_model(small_config()), weights, metadata=notes)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bcosvit", "serve", "--weights", str(weights)]
        command += ["--port", str(port), "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            work = Work(folder, address, time.monotonic() + 60 * options.minutes)
            work.server = server.pid
            try:
                samples = work.run()
            finally:
                server.terminate()
    counts = ", ".join(f"{count} × {what}" for what, count in sorted(work.done.items()))
    print(f"{options.minutes:g} minutes: {counts}; {len(work.errors)} errors")
    print(*work.errors[:5], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(samples))
    wrong = [name for name, values in samples.items() if grows(name, values)]
    raise SystemExit(bool(wrong or work.errors))


if __name__ == "__main__":
    main()

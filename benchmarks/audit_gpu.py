"""Measures `bcosvit audit` on a GPU: speed beside plain prediction, sums, and 50,000 pictures.

    PYTHONPATH=src python benchmarks/audit_gpu.py --out results [--device cuda] [--pictures 50000]
    PYTHONPATH=src python benchmarks/audit_gpu.py --out results --skip speed sums --num-workers 8

Pictures are drawn scenes of 224 pixels, moved and tinted so that no two are the same; they are made
by the same reader for prediction and evidence. Labels are what the model
predicts, and the second class for every fourth picture, so that a quarter needs a second adjoint
pass. Evidence is collected in full float32; plain prediction is measured so, too, and as PyTorch
predicts by default (convolutions in TF32). Every step writes its numbers to ``audit_gpu.json``, so
that a run that is cut off leaves those it has.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bcosvit
from bcosvit.auditing.clusters import class_evidence
from bcosvit.auditing.evidence import Adjoint, Evidence, collect_evidence
from bcosvit.auditing.mistakes import find_mistakes
from bcosvit.auditing.report import REPORT, Audit, write_audit
from bcosvit.auditing.suspicions import find_suspicions
from bcosvit.data.scenes import Scenes
from bcosvit.metrics.loader import Reader
from bcosvit.models.hub import DEFAULT
from bcosvit.nn.views import view
from bcosvit.predictor import Predictor

TESTS = 2000
"""Candidates that an audit tests at most."""


class Drawn:
    """As many pictures as one likes, made of a few drawn scenes."""

    def __init__(self, size: int, count: int, drawn: int = 256) -> None:
        scenes = Scenes("val", "plain", size, drawn, 0)
        pixels = np.stack([np.asarray(scenes[number].image) for number in range(drawn)])
        self.images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255
        self.count = count
        self.labels: list[int] = [0] * count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        again, at = divmod(index, len(self.images))
        size = self.images.shape[-1]
        image = self.images[at].roll((37 * again % size, 59 * again % size), (1, 2))
        tint = 1 - 0.05 * torch.tensor([again % 3, again % 5, again % 7]).view(3, 1, 1)
        return image * tint, self.labels[index], f"picture {index}"

    def first(self, count: int) -> "Drawn":
        few = object.__new__(Drawn)
        few.images, few.count, few.labels = self.images, min(count, self.count), self.labels
        return few


@contextmanager
def full_float32(full: bool):
    """Convolutions outside of explanations in all of float32, not TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = not full
    yield
    torch.backends.cudnn.allow_tf32 = before


@torch.no_grad()
def predict(
    predictor: Predictor, data: Drawn, batch_size: int, num_workers: int = 0
) -> tuple[float, list[list[int]]]:
    """Seconds, and the two likeliest classes of every picture."""
    start, found = time.perf_counter(), []
    reader = Reader(data=data, num_workers=num_workers)
    for batch in reader.read(range(len(data)), batch_size):
        logits = predictor.model(batch.images.to(predictor.device))
        found += logits.topk(2).indices.tolist()
    return time.perf_counter() - start, found


def relabel(data: Drawn, found: list[list[int]]) -> None:
    data.labels[: len(found)] = [pair[n % 4 == 3] for n, pair in enumerate(found)]


class Log:
    """Numbers by step, in a file that is whole after each."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.begun = path, {}, time.perf_counter()
        self.ended: dict[str, float] = {}
        """When each step had its last progress."""

    def progress(self) -> Callable[[int, int, str], None]:
        """Prints how far a step is, every ten seconds."""
        last: dict[str, float] = {}

        def show(done: int, total: int, name: str) -> None:
            now = time.perf_counter() - self.begun
            if done == total or now - last.get(name, -10) >= 10:
                last[name] = now
                print(f"{now:.0f} s: {done} of {total} {name}", flush=True)
            self.ended[name] = now

        return show

    def add(self, name: str, values: dict[str, Any]) -> None:
        values["since_start"] = round(time.perf_counter() - self.begun, 1)
        values["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            values["peak_gpu_gb"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        self.rows[name] = values
        self.path.write_text(json.dumps(self.rows, indent=1))
        print(name, json.dumps(values), flush=True)


def speeds(log: Log, weights: str, device: str, data: Drawn, batch_size: int) -> None:
    """Evidence and prediction of the same pictures by the same reader."""
    predictor = Predictor.load(weights, device)
    seconds = {}
    with full_float32(True):
        predict(predictor, data.first(2 * batch_size), batch_size)
        seconds["prediction"], found = predict(predictor, data, batch_size)
    with full_float32(False):
        predict(predictor, data.first(2 * batch_size), batch_size)
        seconds["prediction_tf32"], _ = predict(predictor, data, batch_size)
    relabel(data, found)
    for name, some in (("warm-up", data.first(256)), ("evidence", data)):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            collect_evidence(predictor, some, folder, batch_size=batch_size)
            seconds[name] = time.perf_counter() - start
    log.add(
        f"speed {weights} batch {batch_size}",
        {
            "pictures_per_second": {k: len(data) / v for k, v in seconds.items() if k != "warm-up"},
            "evidence_by_prediction": seconds["prediction"] / seconds["evidence"],
            "evidence_by_prediction_tf32": seconds["prediction_tf32"] / seconds["evidence"],
            **passes(predictor, data, batch_size),
        },
    )


def passes(predictor: Predictor, data: Drawn, batch_size: int) -> dict[str, float]:
    """Milliseconds of one batch on the device, without reading: the forward pass, and both."""
    batch = next(Reader(data=data).read(range(batch_size), batch_size))
    images = batch.images.to(predictor.device)
    labels = batch.labels.to(predictor.device)
    adjoint = Adjoint(predictor.model)

    def forward() -> None:
        with torch.no_grad(), full_float32(True):
            predictor.model(images)

    found = {}
    for name, run in (("ms_forward", forward), ("ms_adjoint", lambda: adjoint(images, labels))):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            run()
            if images.is_cuda:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
        found[name] = sorted(times[1:])[2]
    return found


def sums(log: Log, weights: str, device: str, data: Drawn, backend: str, batch_size: int) -> None:
    """How far clusters, other cells, residual and bias miss mean logits."""
    predictor = Predictor.load(weights, device)
    predictor = replace(predictor, model=view(predictor.model, mark=lambda _: {"backend": backend}))
    relabel(data, predict(predictor, data, batch_size)[1])
    with tempfile.TemporaryDirectory() as folder:
        collect_evidence(predictor, data, folder, batch_size=batch_size)
        evidence = Evidence(folder)
    missed = evidence.cells.astype(np.float64).sum((2, 3)) + evidence.residual
    missed += evidence.settings.bias - evidence.logit
    by_class = [missed[evidence.label == each, 0].mean() for each in np.unique(evidence.label)]
    log.add(
        f"sums {weights} {backend}",
        {
            "misses_mean_logits_by": float(np.abs(by_class).max()),
            "misses_logits_by": float(np.abs(missed).max()),
            "mean_of_all": float(missed.mean()),
            "classes": len(by_class),
            "largest_logit": float(np.abs(evidence.logit).max()),
        },
    )


def whole(log: Log, given: argparse.Namespace, data: Drawn, out: Path) -> None:
    """All of an audit, step by step."""
    predictor = Predictor.load(given.whole_weights, given.device)
    batch_size, workers = given.batch_sizes[0], given.num_workers
    few, speeds = data.first(given.few), {}
    for name, full in (("float32", True), ("tf32", False)):
        with full_float32(full):
            predict(predictor, data.first(2 * batch_size), batch_size)
            seconds, found = predict(predictor, few if full else data, batch_size, workers)
        speeds[name] = len(few if full else data) / seconds
    relabel(data, found)
    log.add("prediction", {"pictures_per_second": speeds, "classes": len(set(data.labels))})
    folder = out / "audit"
    start = time.perf_counter()
    collect_evidence(
        predictor,
        data,
        folder,
        batch_size=batch_size,
        num_workers=workers,
        progress=log.progress(),
    )
    taken = time.perf_counter() - start
    stored = sum(path.stat().st_size for path in folder.iterdir())
    log.add(
        "evidence",
        {
            "seconds": taken,
            "evidence_by_prediction": {k: len(data) / taken / v for k, v in speeds.items()},
            "bytes_per_picture": stored / len(data),
        },
    )
    start = time.perf_counter()
    evidence = Evidence(folder)
    evidence.descriptors  # noqa: B018, read here
    log.add("read", {"seconds": time.perf_counter() - start, "accuracy": evidence.correct.mean()})
    start = time.perf_counter()
    classes = class_evidence(evidence, processes=max(1, workers))
    log.add(
        "clusters",
        {
            "seconds": time.perf_counter() - start,
            "misses_mean_logits_by": max(each.error for each in classes),
            "misses_logits_by": evidence.completeness(),
        },
    )
    start = time.perf_counter()
    mistakes = find_mistakes(evidence, classes)
    log.add("mistakes", {"seconds": time.perf_counter() - start, "count": len(mistakes)})
    start = time.perf_counter()
    suspicions = find_suspicions(
        predictor,
        data,
        evidence,
        classes,
        tests=given.tests,
        num_workers=workers,
        progress=log.progress(),
    )
    taken = time.perf_counter() - start
    copies = log.ended["copies"] + log.begun - start
    log.add(
        "suspicions",
        {
            "seconds": taken,
            "seconds_copies": copies,
            "tested": len(suspicions),
            "each": (taken - copies) / max(1, len(suspicions)),
            "first": [[found.cue.name, found.verdict] for found in suspicions[:3]],
        },
    )
    start = time.perf_counter()
    audit = Audit(
        evidence=evidence, classes=classes, suspicions=suspicions, mistakes=mistakes, folder=folder
    )
    write_audit(audit, predictor, data, facts={"Data": "drawn"}, command="audit_gpu.py")
    size = (folder / REPORT).stat().st_size
    log.add("report", {"seconds": time.perf_counter() - start, "report_bytes": size})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", nargs="+", default=[DEFAULT, "bcos_densenet121_imagenette"])
    parser.add_argument("--few", type=int, default=2048, help="pictures for speeds and sums")
    parser.add_argument("--pictures", type=int, default=50_000, help="of the whole audit")
    parser.add_argument("--whole-weights", default=DEFAULT, help="of the whole audit")
    parser.add_argument("--num-workers", type=int, default=0, help="of the whole audit")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--tests", type=int, default=200, help=f"an audit makes up to {TESTS}")
    parser.add_argument("--skip", nargs="*", default=(), choices=("speed", "sums", "whole"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    log = Log(given.out / "audit_gpu.json")
    name = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    log.add("machine", {"device": name, "torch": torch.__version__, "bcosvit": bcosvit.__version__})
    size = Predictor.load(DEFAULT, "cpu").transform.image_size
    data = Drawn(size, max(given.few, given.pictures))
    largest = given.batch_sizes[0]
    for weights in given.weights if "speed" not in given.skip else ():
        for batch_size in given.batch_sizes:
            speeds(log, weights, given.device, data.first(given.few), batch_size)
    for weights in given.weights if "sums" not in given.skip else ():
        for backend in ("auto", "reference"):
            sums(log, weights, given.device, data.first(given.few), backend, largest)
    if "whole" not in given.skip:
        few = data.first(given.pictures)
        with tempfile.TemporaryDirectory() as folder:
            whole(log, given, few, Path(folder))
        log.rows["whole"] = {
            "seconds_of_all_tests": TESTS * log.rows["suspicions"]["each"],
            "seconds": sum(each.get("seconds", 0) for each in log.rows.values()),
        }
        log.add("end", {})


if __name__ == "__main__":
    main()

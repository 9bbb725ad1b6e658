"""An exported file beside the model that it was made from: the same numbers, and at what cost."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bcosvit.attribution import explain
from bcosvit.data.scenes import Scenes
from bcosvit.export.graph import IMAGE, TARGET, outputs
from bcosvit.models.base import AnyModel
from bcosvit.predictor import Predictor

Run = Callable[[Tensor], Sequence[Tensor]]
"""Pictures to logits, and contributions to the predicted class and residual where there are any."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is printed after an export; times are medians for one picture on this machine's CPU."""

    bytes_weights: int
    bytes_exported: int
    seconds_eager: float
    seconds_exported: float
    errors: dict[str, tuple[float, float]]
    """By output, of eager and exported: the largest difference from the model in float64 on drawn
    scenes, relative to the largest value. In float32 two units of a MaxOut may be too close to
    call, so that not even the model agrees with itself to all digits."""

    def table(self) -> Table:
        table = Table(title="exported against eager", title_justify="left", title_style="bold")
        for column in ("", "eager", "exported", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        size = (self.bytes_weights, self.bytes_exported)
        table.add_row("size", *(f"{count / 2**20:.1f} MiB" for count in size), _ratio(*size))
        times = (self.seconds_eager, self.seconds_exported)
        table.add_row("latency", *(f"{1e3 * each:.1f} ms" for each in times), _ratio(*times))
        for name, pair in self.errors.items():
            table.add_row(f"error in {name}", *(f"{error:.1e}" for error in pair), "")
        return table


def compare(
    predictor: Predictor,
    weights: Path,
    out: Path,
    *,
    explanation: bool,
    repeats: int,
) -> Comparison:
    """Runs both on drawn scenes: the file that was written is read again, as its users will."""
    pictures = drawn(predictor, 4)
    before = _eager(predictor.model, explanation=explanation)
    # An explanation holds a prediction: timing ``before`` would count two.
    timed: Run = (lambda x: (explain(predictor.model, x).map,)) if explanation else before
    after = _runtime(out)
    truth = _eager(copy.deepcopy(predictor.model).double(), explanation=explanation)
    expected = truth(pictures.double())
    found = [
        [difference(*pair) for pair in zip(run(pictures), expected, strict=True)]
        for run in (before, after)
    ]
    return Comparison(
        bytes_weights=weights.stat().st_size,
        bytes_exported=out.stat().st_size,
        seconds_eager=_seconds(timed, pictures[:1], repeats),
        seconds_exported=_seconds(after, pictures[:1], repeats),
        errors=dict(zip(outputs(explanation), zip(*found, strict=True), strict=True)),
    )


def drawn(predictor: Predictor, count: int) -> Tensor:
    """Scenes as the model's input."""
    scenes = Scenes("val", size=max(32, predictor.transform.image_size), length=count)
    return torch.stack([predictor.transform(scenes[index].image) for index in range(count)])


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest value expected; exact zeros must be met exactly."""
    largest = (found - expected).abs().max().item()
    return largest and largest / max(expected.abs().max().item(), 1e-30)


def _eager(model: AnyModel, *, explanation: bool) -> Run:
    def run(images: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            logits = model(images)
        if not explanation:
            return (logits,)
        found = explain(model, images)
        assert found.residual is not None
        return (logits, found.map, found.residual)

    return run


def runtime(
    path: Path, keys: Sequence[str] = ()
) -> tuple[Callable[..., Sequence[Tensor]], dict[str, str]]:
    """An exported file as a function of images and classes, and its notes under ``keys``."""
    return (_onnx if path.suffix == ".onnx" else _torch)(path, keys)


def _runtime(path: Path) -> Run:
    run, _ = runtime(path)
    return lambda images: run(images, torch.full((len(images),), -1))


def _onnx(
    path: Path, keys: Sequence[str]
) -> tuple[Callable[..., Sequence[Tensor]], dict[str, str]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    notes = session.get_modelmeta().custom_metadata_map
    takes = {each.name for each in session.get_inputs()}

    def run(images: Tensor, target: Tensor) -> Sequence[Tensor]:
        given = {IMAGE: images.numpy(), TARGET: target.numpy()}
        found = session.run(None, {name: given[name] for name in given if name in takes})
        return [torch.from_numpy(each) for each in found]

    return run, {key: notes[key] for key in keys if key in notes}


def _torch(
    path: Path, keys: Sequence[str]
) -> tuple[Callable[..., Sequence[Tensor]], dict[str, str]]:
    notes: dict[str, Any] = dict.fromkeys(keys, "")
    program = torch.export.load(path, extra_files=notes)
    module, count = program.module(), len(program.graph_signature.user_inputs)

    def run(images: Tensor, target: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            found: Sequence[Tensor] = module(*(images, target)[:count])
        return found

    return run, {key: value for key, value in notes.items() if value}


def _seconds(run: Run, images: Tensor, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(images)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}×"

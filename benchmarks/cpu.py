"""Measures the cost of exact explanations on a CPU, compared with timm's ViT and PyPI ``bcos``.

    python benchmarks/cpu.py [--threads 2] [--rounds 5] [--json cpu.json] [--cpu-time] [--only …]

The data are random images of 224² pixels in float32. All candidates of a comparison run in
alternating rounds, so that other load on the machine slows all of them; the results are ratios of
medians. ``--cpu-time`` counts the time of the process alone, which other processes hardly change;
with one thread it is the time on an idle core. "Products alone" are the matrix products and
convolutions of the same shapes, called one after the other, which is the limit that oneDNN sets.
Whatever of ours is timed is compared with the reference ops first; a difference of more than a
thousandth ends the run.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcosvit import create_model, explain
from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)
from bcosvit.models import VisionTransformer
from bcosvit.nn import BcosConv2d, prepared_view
from bcosvit.ops.products import linear

Runners = dict[str, Callable[[], object]]
CLOCK: list[Callable[[], float]] = [time.perf_counter]


def race(rounds: int, runners: Runners) -> dict[str, float]:
    """Returns the median seconds of each; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            start = CLOCK[0]()
            run()
            if turn:
                times[name].append(CLOCK[0]() - start)
    return {name: median(each) for name, each in times.items()}


def reference(model: nn.Module) -> nn.Module:
    """A copy of a model that computes by the plain equations."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    return plain


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Ends the run where what is timed is wrong."""
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{name}: differs from the reference by {error:.1e} of the largest value")
    if not error < 1e-3:
        raise SystemExit(f"{name} is wrong, so its time says nothing.")


class Products(TorchDispatchMode):
    """Records every matrix product and convolution, in order to call them on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.name() == "aten::mm":
            # As the library computes it where nothing records it.
            self.calls.append(partial(linear, args[0], args[1].T, frozen=False))
        elif func.name() == "aten::addmm":
            self.calls.append(partial(linear, args[1], args[2].T, args[0], frozen=False))
        elif func.name() in ("aten::bmm", "aten::convolution"):
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, run: Callable[[], object]) -> Callable[[], None]:
        with torch.no_grad(), cls() as noted:
            run()

        @torch.no_grad()
        def alone() -> None:
            for call in noted.calls:
                call()

        return alone


def transformer(rounds: int, batch: int) -> dict[str, float]:
    """Compares the transformer of ViT-Ti (on features) with timm's ViT-Ti (on images)."""
    import timm

    peer = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
    pictures = torch.rand(batch, 3, 224, 224)
    features = torch.rand(batch, 1024, 14, 14)
    runners: Runners = {"timm": torch.no_grad()(lambda: peer(pictures))}
    for maxout in (1, 2):
        model = create_model("bcos_vit_ti_87", num_classes=10, maxout=maxout).eval()
        assert isinstance(model, VisionTransformer)
        ready = prepared_view(model)
        name = f"MaxOut {maxout}"
        with torch.no_grad():
            plain = reference(model).from_features(features)
            check(f"ViT-Ti {name}", ready.from_features(features), plain)
        runners[name] = torch.no_grad()(lambda ready=ready: ready.from_features(features))
        runners[f"{name}, products alone"] = Products.of(runners[name])
    return race(rounds, runners)


UNBIASED: dict[str, Any] = {"num_classes": 10, "logit_bias": 0.0}
"""Beside a bias, the logits of random weights are all the same."""


def check_explanations(name: str, model: Any, images: torch.Tensor) -> None:
    """Checks the logits and W(x) of two pictures, of one class and of two at once."""
    images, plain, classes = images[:2], reference(model), torch.tensor([[3, 7], [3, 7]])
    with torch.no_grad():
        check(f"{name}, logits", model(images), plain(images))
    one, several = explain(model, images, 3), explain(model, images, classes)
    weights = explain(plain, images, classes).weights
    check(f"{name}, W(x) of one class", one.weights, weights[:, 0])
    check(f"{name}, W(x) of several classes", several.weights, weights)


def whole(rounds: int, batch: int) -> dict[str, float]:
    """Measures bcos_vit_ti_38: predicting, and explaining one class and ten classes."""
    model = prepared_view(create_model("bcos_vit_ti_38", maxout=1, **UNBIASED))
    images = torch.rand(batch, 3, 224, 224)
    check_explanations("ViT-Ti-38", model, images)
    return race(
        rounds,
        {
            "predict": torch.no_grad()(lambda: model(images)),
            "explain one class": lambda: explain(model, images, 3),
            "explain ten classes": lambda: explain(model, images, "all"),
        },
    )


def separable(rounds: int, batch: int) -> dict[str, float]:
    """Compares depthwise 3×3 and pointwise convolutions of a MobileNet's sizes with torch's."""
    runners: Runners = {}
    both: dict[str, list[tuple[nn.Module, torch.Tensor]]] = {}
    for inputs, outputs, size in ((96, 24, 56), (144, 32, 28), (384, 64, 14), (576, 96, 14)):
        images = torch.rand(batch, inputs, size, size).to(memory_format=torch.channels_last)
        for name, kernel, groups, width in (
            ("depthwise", 3, inputs, inputs),
            ("pointwise", 1, 1, outputs),
        ):
            window = {"padding": kernel // 2, "groups": groups}
            ours = prepared_view(BcosConv2d(inputs, width, kernel, **window))
            with torch.no_grad():
                check(f"{name}, {inputs} × {size}²", ours(images), reference(ours)(images))
            theirs = nn.Conv2d(inputs, width, kernel, **window, bias=False)
            both.setdefault(f"{name} B-cos", []).append((ours, images))
            both.setdefault(f"{name} torch", []).append((theirs, images))
    for name, layers in both.items():
        runners[name] = torch.no_grad()(lambda layers=layers: [run(x) for run, x in layers])
    # They take milliseconds.
    return race(5 * rounds, runners)


def densenet(rounds: int, batch: int) -> dict[str, float]:
    """Compares DenseNet-121 v2 with that of PyPI ``bcos``, with the same weights."""
    from bcos.models.densenet import densenet121
    from bcos.modules import norms

    peer = densenet121(norm_layer=norms.NoBias(norms.BatchNormUncentered2d), num_classes=10).eval()
    model = create_model("bcos_densenet121", flavor="v2", **UNBIASED).eval()
    model = prepared_view(model)
    images = torch.rand(batch, 3, 224, 224)
    encoded = torch.cat([images, 1 - images], 1)
    check_explanations("DenseNet-121 v2", model, images)

    def theirs() -> None:
        for picture in encoded:
            peer.explain(picture[None].clone().requires_grad_(), idx=3)

    return race(
        rounds,
        {
            "ours, predict": torch.no_grad()(lambda: model(images)),
            "bcos, predict": torch.no_grad()(lambda: peer(encoded)),
            "ours, explain": lambda: explain(model, images, 3),
            "bcos, explain": theirs,
        },
    )


Rows = dict[str, tuple[list[str], list[str]]]
COMPARISONS: dict[str, tuple[Callable[[int, int], dict[str, float]], Rows]] = {
    "transformer": (
        transformer,
        {
            "ViT-Ti MaxOut 1, inference ÷ timm": (["MaxOut 1"], ["timm"]),
            "ViT-Ti MaxOut 2, inference ÷ timm": (["MaxOut 2"], ["timm"]),
            "ViT-Ti MaxOut 1 ÷ its products alone": (["MaxOut 1"], ["MaxOut 1, products alone"]),
            "ViT-Ti MaxOut 2 ÷ its products alone": (["MaxOut 2"], ["MaxOut 2, products alone"]),
        },
    ),
    "separable": (
        separable,
        {
            "depthwise B-cos ÷ torch": (["depthwise B-cos"], ["depthwise torch"]),
            "pointwise B-cos ÷ torch": (["pointwise B-cos"], ["pointwise torch"]),
            "depthwise and pointwise B-cos ÷ torch": (
                ["depthwise B-cos", "pointwise B-cos"],
                ["depthwise torch", "pointwise torch"],
            ),
        },
    ),
    "whole": (
        whole,
        {
            "ViT-Ti-38, one class explained ÷ predicting": (["explain one class"], ["predict"]),
            "ViT-Ti-38, ten classes ÷ one": (["explain ten classes"], ["explain one class"]),
        },
    ),
    "densenet": (
        densenet,
        {
            "DenseNet-121 v2, predicting ÷ PyPI bcos": (["ours, predict"], ["bcos, predict"]),
            "DenseNet-121 v2, explaining ÷ PyPI bcos": (["ours, explain"], ["bcos, explain"]),
        },
    ),
}
"""What is measured, with the rows that follow from it: sums of seconds ÷ sums of seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(COMPARISONS), help="separated by commas")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine with other load")
    args = parser.parse_args()
    only = args.only.split(",")
    if not set(only) <= set(COMPARISONS):
        parser.error(f"--only takes {', '.join(COMPARISONS)}, separated by commas")
    if args.cpu_time:
        CLOCK[0] = time.process_time
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} threads, batch {args.batch}")
    ratios: dict[str, float] = {}
    seconds: dict[str, dict[str, float]] = {}
    for name in only:
        measure, rows = COMPARISONS[name]
        found = seconds[name] = measure(args.rounds, args.batch)
        for row, (ours, theirs) in rows.items():
            ratios[row] = sum(found[each] for each in ours) / sum(found[each] for each in theirs)
            print(f"{ratios[row]:6.2f}  {row}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"ratios": ratios, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()

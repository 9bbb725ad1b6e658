"""Compares the speed of inherent explanations with captum and PyPI ``bcos``.

    python benchmarks/explain.py [--model bcos_vit_ti_38] [--rounds 3]

There are two comparisons, each on one model with the same weights and images, in alternating
rounds, so that other load on the machine slows both. The results are medians.

1. Inherent explanations against captum's IntegratedGradients with 32 steps, on a B-cos ViT, for the
   same batch, classes and encoded input. Captum uses an internal batch size of 8, the fastest of 1
   to 32 on the machine where this was written, and neither computes gradients of weights. The goal
   is to be 10 times as fast.
2. A batch of 16 against 16 calls of ``explain()`` of PyPI ``bcos``, which takes one image at a
   time, on its DenseNet-121. Both return W(x), contributions and color images. The goal is to be
   twice as fast.

Run nothing else on the machine at the same time: threads that wait for each other on busy cores
take more time than the work itself.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from bcosvit import create_model, explain
from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)
from bcosvit.attribution.color import color_image

from bcos.models.densenet import densenet121  # isort: skip
from bcos.modules import norms  # isort: skip

CLASSES = 1000


def race(rounds: int, **runners: Callable[[], Tensor]) -> dict[str, float]:
    """Returns the median seconds of each; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds + 1):
        for name, run in runners.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: median(each[1:]) for name, each in times.items()}


def report(title: str, seconds: dict[str, float], ours: str, goal: float) -> None:
    print(title, flush=True)
    for name, each in seconds.items():
        print(f"  {name:26} {each:8.3f} s")
    (other,) = (name for name in seconds if name != ours)
    ratio = seconds[other] / seconds[ours]
    print(f"  {ours} is {ratio:.1f} times as fast (goal: {goal:g})", flush=True)


def against_captum(name: str, rounds: int, batch: int) -> None:
    model = create_model(name, num_classes=CLASSES).eval().requires_grad_(False)
    images = torch.rand(batch, 3, 224, 224)
    target = torch.randint(CLASSES, (batch,))
    encoded = model.encoding(images)
    captum = IntegratedGradients(model.from_encoded)

    def theirs() -> Tensor:
        return captum.attribute(encoded, target=target, n_steps=32, internal_batch_size=8).sum(1)

    seconds = race(rounds, inherent=lambda: explain(model, images, target).map, captum=theirs)
    report(f"{name}, {batch} image(s): W(x)·x against IntGrad, 32 steps", seconds, "inherent", 10)


def peer_densenet() -> nn.Module:
    """Returns PyPI's network with batch statistics, without which the signal vanishes."""
    peer = densenet121(norm_layer=norms.NoBias(norms.BatchNormUncentered2d), num_classes=CLASSES)
    with torch.no_grad():
        for module in peer.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        x = torch.rand(2, 3, 64, 64)
        peer.train()(torch.cat([x, 1 - x], 1))
    return peer.eval()


def against_peer(rounds: int, batch: int) -> None:
    peer = peer_densenet()
    model = create_model("bcos_densenet121", flavor="v2", num_classes=CLASSES).eval()
    model.load_state_dict(peer.state_dict())
    images = torch.rand(batch, 3, 224, 224)
    encoded = torch.cat([images, 1 - images], 1)
    target = torch.randint(CLASSES, (batch,))

    def ours() -> Tensor:
        found = explain(model, images, target)
        assert found.weights is not None
        color_image(found.weights, found.map)
        return found.map

    def theirs() -> Tensor:
        maps = []
        for picture, label in zip(encoded, target.tolist(), strict=True):
            result = peer.explain(picture[None].clone().requires_grad_(), idx=label)
            maps.append(result["contribution_map"].detach())
        return torch.cat(maps)

    difference = (ours() - theirs()).norm() / theirs().norm()
    seconds = race(rounds, bcosvit=ours, bcos=theirs)
    report(
        f"DenseNet-121, {batch} images: one batch against {batch} calls of bcos "
        f"(contributions agree to {difference:.0e})",
        seconds,
        "bcosvit",
        2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bcos_vit_ti_38")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), CPU", flush=True)
    against_captum(given.model, given.rounds, batch=1)
    against_peer(given.rounds, batch=16)


if __name__ == "__main__":
    main()

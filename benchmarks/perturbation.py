"""Compares our pixel perturbation with Quantus' PixelFlipping on the same model, images and maps.

Run ``python benchmarks/perturbation.py`` (a small model from scratch, one or two minutes), or pass
the name of a model, such as ``bcos_vit_ti_38 --images 2 --rounds 1`` (minutes). It needs
``pip install quantus``.

Both set pixels of the model's encoding to zero, most and least important first, and record the
confidence in the true class until 1/4 of the pixels are removed. The script prints the largest
difference between their results at common points. The maps are computed beforehand and are not part
of the comparison. All run batches of the same size in alternating rounds; the results are medians.

PixelFlipping always continues to the last pixel, and its steps must divide the pixels of a channel,
where every channel of a pixel is a separate feature. Therefore it is run twice. ``channels`` is its
intended use: the encoding as it is, and the smallest number of steps that are no coarser than ours
and include 1/4. ``tall`` is in its favor: the encoding as one tall channel, which allows exactly
our steps. The ratio of times is split into the ratio of images that pass through the model, and the
rest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import bcosvit
from bcosvit._torchvision import torchvision
from bcosvit.metrics import PixelPerturbation, confidence
from bcosvit.models import Classifier

METRIC = PixelPerturbation()

Curves = dict[float, Tensor]
"""Confidences [B, 2] by the share of removed pixels."""
Result = tuple[Curves, int]
"""Confidences, and how many images passed through the model for them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="the name; by default a small model of 64 pixels")
    parser.add_argument("--images", type=int, default=32, help="how many images to perturb")
    parser.add_argument("--batch", type=int, default=16, help="images per forward pass")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, after a warm-up")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    options = parser.parse_args()
    # Quantus imports torchvision, which is imported in one place only.
    assert torchvision
    try:
        import quantus
    except ImportError as error:
        sys.exit(f"This comparison needs quantus ({error}): see the head of this file.")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = create(options.model)
    height, width = model.config.image_size
    images = torch.rand(options.images, 3, height, width)
    with torch.no_grad():
        labels = model(images).argmax(1)
    maps = torch.randn(options.images, height, width)
    given = (model, images, labels, maps, options.batch)
    runs = {
        "bcosvit": ours(*given),
        "quantus, channels": theirs(*given, tall=False),
        "quantus, tall": theirs(*given, tall=True),
    }
    print(
        f"{options.model or 'small model'}, {height} × {width} pixels, {options.images} images, "
        f"batches of {options.batch}, {options.threads} threads, quantus {quantus.__version__}"
    )
    report(*measure(runs, options.rounds))


def create(name: str | None) -> Classifier:
    if name is not None:
        return bcosvit.create_model(name).eval()
    stem = bcosvit.StemConfig(widths=(16, 32, 64))
    config = bcosvit.ModelConfig(
        width=64, num_heads=4, depth=3, image_size=64, num_classes=10, backbone=stem
    )
    return bcosvit.create_model(config).eval()


def ours(
    model: Classifier, images: Tensor, labels: Tensor, maps: Tensor, batch: int
) -> Callable[[], Result]:
    keys = [str(number) for number in range(len(images))]

    def run() -> Result:
        curves = METRIC.curves(model, images, labels, keys, {"map": maps}, batch)["map"]
        pictures = len(images) * (1 + 2 * (METRIC.points - 1))
        return dict(zip(METRIC.shares, curves.unbind(2), strict=True)), pictures

    return run


class Sure(nn.Module):
    """Computes confidences from an encoding, which may be one tall channel [B, 1, C·H, W]."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model
        self.pictures = 0

    def forward(self, x: Tensor) -> Tensor:
        self.pictures += len(x)
        encoded = x.reshape(len(x), self.model.encoding.channels, *self.model.config.image_size)
        return confidence(self.model, self.model.from_encoded(encoded)).float()


def theirs(
    model: Classifier, images: Tensor, labels: Tensor, maps: Tensor, batch: int, *, tall: bool
) -> Callable[[], Result]:
    from quantus import PixelFlipping

    wrapped = Sure(model).eval()
    encoded, attributions = model.encoding(images), maps.unsqueeze(1)
    channels, pixels = encoded.shape[1], maps[0].numel()
    steps = 4 * (METRIC.points - 1)
    if tall:
        # All channels of a pixel have its attribution.
        attributions = attributions.repeat(1, 1, channels, 1)
        encoded = encoded.flatten(1, 2).unsqueeze(1)
    else:
        # `steps` equal ones of so many features, of which a channel must hold a whole number.
        while channels * pixels % steps or pixels % (channels * pixels // steps):
            steps += 4
    flipping = PixelFlipping(
        features_in_step=pixels * channels // steps,
        perturb_baseline=0.0,
        normalize=False,
        disable_warnings=True,
    )

    def run() -> Result:
        wrapped.pictures = 0
        orders = [
            flipping(
                model=wrapped,
                x_batch=encoded.numpy(),
                y_batch=labels.numpy(),
                a_batch=(sign * attributions).numpy(),
                softmax=False,
                batch_size=batch,
                channel_first=True,
            )
            for sign in (1, -1)
        ]
        points = torch.from_numpy(np.array(orders)).permute(2, 1, 0)
        return {(i + 1) / steps: each for i, each in enumerate(points)}, wrapped.pictures

    return run


def measure(
    runs: dict[str, Callable[[], Result]], rounds: int
) -> tuple[dict[str, float], dict[str, Result]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results = {}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            results[name] = run()
            seconds[name].append(time.perf_counter() - start)
    # The first round is a warm-up.
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}, results


def report(seconds: dict[str, float], results: dict[str, Result]) -> None:
    curves, pictures = results["bcosvit"]
    for name, (other, count) in results.items():
        each = seconds[name] / count
        print(f"{name:18s} {seconds[name]:7.2f} s, {count} images, {1e3 * each:.2f} ms each")
        if name == "bcosvit":
            continue
        shared = curves.keys() & other.keys()
        difference = max(float((curves[share] - other[share]).abs().max()) for share in shared)
        print(
            f"  ratio {seconds[name] / seconds['bcosvit']:.2f} = {count / pictures:.2f} for "
            f"images × {each * pictures / seconds['bcosvit']:.2f} for the rest; at "
            f"{len(shared)} shared points they differ by {difference:.1e} at most"
        )


if __name__ == "__main__":
    main()

"""Compares the speed of training on cached features with training on images.

    python benchmarks/feature_cache.py [--model bcos_vit_ti_38] [--batch 8] [--steps 5]

Both train the same transformer on the same random images, with Adam and binary cross-entropy. One
computes the features of the frozen backbone in every step, the other reads them from disk. Steps of
the two alternate, so that other load on the machine slows both. The images are in memory: reading
and augmenting files, which the cache saves as well, is not part of the comparison.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit import create_model
from bcosvit.models import VisionTransformer
from bcosvit.train.feature_cache import FeatureCache, bytes_needed


class Noise:
    """Random images of ten classes."""

    def __init__(self, images: int, size: tuple[int, int]) -> None:
        self.images, self.size, self.identity = images, size, "noise"

    def __len__(self) -> int:
        return self.images

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(1000 * index + view)
        return torch.rand(3, *self.size, generator=generator), index % 10


def stepper(model: VisionTransformer, forward: Callable[[Tensor], Tensor]) -> Callable[..., float]:
    """Returns a function that trains on the result of ``load`` and returns the seconds."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=2.5e-4)

    def step(load: Callable[[], tuple[Tensor, Tensor]]) -> float:
        start = time.perf_counter()
        inputs, labels = load()
        targets = F.one_hot(labels, 10).float()
        loss = F.binary_cross_entropy_with_logits(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def stack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.tensor([label for _, label in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bcos_vit_ti_38")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = create_model(given.model, num_classes=10).train()
    assert isinstance(model, VisionTransformer)
    source = Noise(given.batch * 2, model.config.image_size)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        needed = bytes_needed(model.config, len(source), 1)
        cache = FeatureCache.build(
            model, source, views=1, folder=folder, max_bytes=needed, batch_size=given.batch
        )
        build = time.perf_counter() - start
        pictures = [source.sample(index, 0) for index in range(len(source))]
        from_images, from_features = stepper(model, model), stepper(model, model.from_features)
        slow, fast = [], []
        # The first step of each is a warm-up.
        for number in range(given.steps + 1):
            first = number % 2 * given.batch
            batch = range(first, first + given.batch)
            slow.append(from_images(lambda batch=batch: stack([pictures[i] for i in batch])))
            fast.append(from_features(lambda batch=batch: stack([cache[i, 0] for i in batch])))
        rates = [given.batch / median(times[1:]) for times in (slow, fast)]
    print(f"{given.model}, batch {given.batch}, {torch.get_num_threads()} thread(s), CPU")
    print(f"building the cache    {len(source) / build:8.1f} images/s, {needed >> 20} MiB on disk")
    print(f"training on images    {rates[0]:8.1f} images/s")
    print(
        f"training on the cache {rates[1]:8.1f} images/s, {rates[1] / rates[0]:.2f} times as many"
    )


if __name__ == "__main__":
    main()

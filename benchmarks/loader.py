"""Compares the speed of our input pipeline with timm's, on the same files.

Run ``python benchmarks/loader.py [FOLDER]`` (about a minute). Without a folder, JPEG files of
500 × 375 pixels, the size of a typical ImageNet photograph, are drawn into a temporary folder.

Both decode, take a random resized crop to 224 pixels (bilinear), flip, apply RandAugment(n=2, m=9)
and batch float32 tensors in [0, 1], in one process and on one thread, in alternating rounds over
all files. The results are medians. timm's settings differ from its defaults in its favor: bilinear
instead of random interpolation, and no normalization. Two differences remain: timm applies each of
its two augmentations with probability 0.5, while we always apply both, and it resamples sheared and
rotated images bilinearly, while we take the nearest pixel, as RandAugment's authors do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from bcosvit._torchvision import torchvision
from bcosvit.data.dataset import Split
from bcosvit.data.folder import FolderReader
from bcosvit.data.images import list_images
from bcosvit.data.transforms import TrainTransform

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="images to read; drawn if not given")
    parser.add_argument("--images", type=int, default=256, help="how many images to use")
    parser.add_argument("--rounds", type=int, default=7, help="passes over all images per pipeline")
    parser.add_argument("--size", type=int, default=224, help="side of the crop")
    options = parser.parse_args()
    try:
        import timm
    except ImportError:
        sys.exit("This comparison needs timm: install it with `pip install timm --no-deps`.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare(root, options.folder, options.images)
        loaders = {
            "bcosvit": ours(root, options.size),
            f"timm {timm.__version__}": theirs(root, options.size),
        }
        kind = options.folder or "drawn, 500 × 375"
        print(f"{len(list_images(root))} images ({kind}), {options.rounds} rounds each")
        rates = measure(loaders, options.rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name:12s} {medians[name]:7.0f} images/s  ({spread})")
    first, second = medians.values()
    print(f"ratio        {first / second:7.2f}")


def prepare(root: Path, given: Path | None, count: int) -> None:
    """Puts the files into class folders, as links or drawn, so that both read the same ones."""
    sources = list_images(given)[:count] if given else [None] * count
    rng = np.random.default_rng(0)
    for number, source in enumerate(sources):
        ending = source.suffix if source else ".jpg"
        path = root / f"class{number % 2}" / f"{number:05d}{ending}"
        path.parent.mkdir(exist_ok=True)
        if source is None:
            draw(rng).save(path, quality=90)
        else:
            path.symlink_to(source.resolve())


def draw(rng: np.random.Generator) -> Image.Image:
    """Draws noise at several scales, as detailed as a photograph: about 100 kB as JPEG."""
    picture = np.zeros((375, 500, 3), np.float32)
    for cells, strength in ((4, 60), (16, 40), (64, 25), (500, 16)):
        noise = rng.normal(0, strength, (cells * 3 // 4, cells, 3)) + 32
        layer = Image.fromarray(np.clip(noise + 96, 0, 255).astype(np.uint8))
        picture += np.asarray(layer.resize((500, 375), Image.Resampling.BICUBIC), np.float32) - 96
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def ours(root: Path, size: int) -> Iterable[Any]:
    paths = [path.relative_to(root).as_posix() for path in list_images(root)]
    labels = [int(path[5]) for path in paths]
    split = Split(FolderReader(root, paths, labels), transform=TrainTransform(size))
    return DataLoader(split, batch_size=min(BATCH, len(split)), shuffle=True, drop_last=True)


def theirs(root: Path, size: int) -> Iterable[Any]:
    from timm.data import ImageDataset, create_loader, create_transform

    dataset = ImageDataset(str(root))
    loader = create_loader(
        dataset,
        input_size=(3, size, size),
        batch_size=min(BATCH, len(dataset)),
        is_training=True,
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
        device=torch.device("cpu"),
    )
    pixels = create_transform(
        size,
        is_training=True,
        auto_augment="rand-m9-n2",
        interpolation="bilinear",
        normalize=False,
    )
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.contiguous().float().div_(255)  # noqa: E731
    dataset.transform = torchvision.transforms.Compose([pixels, scale])
    return loader


def measure(loaders: dict[str, Iterable[Any]], rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds + 1):
        for name, loader in loaders.items():
            start = time.perf_counter()
            count = sum(len(batch[0]) for batch in loader)
            rates[name].append(count / (time.perf_counter() - start))
    # The first round warms up the file cache and the allocators.
    return {name: values[1:] for name, values in rates.items()}


if __name__ == "__main__":
    main()

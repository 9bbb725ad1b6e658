"""Images in device memory: decoded once, then cropped and flipped where the model is.

Worker processes decode an image in every epoch. For a small data set they can be by far the slowest
part of a run, while all images fit, as bytes, into the memory of a GPU. So each process decodes all
images once, and a step only transfers a few indices.

Validation stores what the transform returns: its batches are those of `data.ImageDataset`, bit by
bit. Training stores whole images, at most `CANVAS` times the model's input along either side;
larger images are shrunk to that, each axis on its own. Crops are sampled in the image's own
geometry and keep their aspect ratio. Smaller images lose nothing; in larger images crops of less
than a quarter of the area are magnified, where workers might find finer pixels in the file. Images
are placed in the upper left corner of a common canvas, as large as the largest of them.

All crops of an epoch are sampled at once from (seed, epoch). The crop of an image depends on these
and on its position in the split, so that runs resume, and processes share samples, as with workers.

A crop is resized by torch's antialiased bilinear filter, as workers do it (`data.transforms`): each
output pixel is a weighted mean of the crop's pixels near it, along each axis separately. For a
batch of crops these are two products with matrices made from the edges of the crops, whatever their
sizes. A crop is flipped by swapping its left and right edge.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Split
from bcosvit.data.transforms import SLIMMEST, EvalTransform, TrainTransform
from bcosvit.train.callbacks import progress_bar
from bcosvit.train.data import Batch, SampleRequest, derive_seed
from bcosvit.train.devices import memory_shortage, send
from bcosvit.train.recipe import Recipe

CANVAS = 2
"""Longest side of a stored image, relative to the model's input."""
READ_BATCH = 64
"""Images that are read at a time."""
MEMORY_SHARE = 0.9
"""Largest share of the free memory that images may take."""
TRIES = 10
"""How often a crop is sampled before the central one is taken, as in torchvision."""
ROUNDING = 1e-3
"""Added beyond a half when levels are rounded. Means halfway between two levels are common, and how
they are rounded must not depend on the order of a sum, that is, on the size of the batch."""


def load_device_images(
    splits: tuple[Split, Split], recipe: Recipe, device: torch.device
) -> tuple["DeviceImageDataset", "DeviceImageDataset"]:
    """Loads training and validation images for a process that trains on ``device``."""
    found = []
    for name, split in zip(("train", "val"), splits, strict=True):
        with progress_bar(f"{name} images to {device}") as progress:
            found.append(
                DeviceImageDataset(split, recipe.seed, device, recipe.num_workers or 0, progress)
            )
    return found[0], found[1]


class DeviceImageDataset(Dataset[Batch]):
    """Samples of a split, made from the bytes of its images on a device.

    The split's transform says what is stored and what is done with it. ``num_workers`` processes
    decode the images once.

    Raises:
        ValueError: The images do not fit into the free memory.
    """

    on_device = True

    def __init__(
        self,
        split: Split,
        seed: int,
        device: torch.device | str,
        num_workers: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.seed, self.device = seed, torch.device(device)
        assert isinstance(split.transform, TrainTransform | EvalTransform)
        self.transform = split.transform
        self.sizes = torch.empty(len(split), 2, dtype=torch.float64)
        """Width and height of the images as they were read."""
        labels = torch.empty(len(split), dtype=torch.long)
        self.pixels = torch.empty(len(split), 0, 3, 0, dtype=torch.uint8, device=self.device)
        """[N, height, 3, width]: rows of all channels, as `crop_and_resize` multiplies them."""
        done = 0
        for pixels, sizes, classes in _read(split, self.transform, num_workers):
            start, done = done, done + len(pixels)
            _, height, _, width = pixels.shape
            self._grow(height, width)
            self.pixels[start:done, :height, :, :width] = pixels.to(self.device)
            self.sizes[start:done], labels[start:done] = sizes, classes
            if progress is not None:
                progress(done, len(split))
        self.labels = labels.to(self.device)
        # A tensor, since a GPU multiplies by the inverse of a number, which rounds differently.
        self.white = torch.tensor(255.0, device=self.device)
        self._epoch_crops: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, requests: list[SampleRequest]) -> Batch:
        positions = send(torch.tensor([request.position for request in requests]), self.device)
        images = self.pixels.index_select(0, positions).float()
        if isinstance(self.transform, TrainTransform):
            (epoch,) = {request.epoch for request in requests}
            crops = self._crops(epoch).index_select(0, positions)
            images = crop_and_resize(images, crops, self.transform.image_size)
        return Batch(
            (images / self.white).transpose(1, 2).contiguous(),
            self.labels.index_select(0, positions),
            send(torch.tensor([request.weight for request in requests]), self.device),
        )

    def _crops(self, epoch: int) -> Tensor:
        """Returns the crops of all images in an epoch, in pixels of the canvas."""
        assert isinstance(self.transform, TrainTransform)
        if self._epoch_crops is None or self._epoch_crops[0] != epoch:
            crops = sample_crops(
                self.sizes,
                scale=self.transform.scale,
                flip=self.transform.flip,
                # -1 is neither a position in the split, whose seeds workers use, nor missing, as in
                # the seed of the epoch's order.
                seed=derive_seed(self.seed, epoch, -1),
            )
            stored = self.sizes.clamp(max=CANVAS * self.transform.image_size)
            # In this order of operations the far edge of an image stays exactly its far edge.
            crops = crops * stored.repeat_interleave(2, 1) / self.sizes.repeat_interleave(2, 1)
            self._epoch_crops = epoch, send(crops.float(), self.device)
        return self._epoch_crops[1]

    def _grow(self, height: int, width: int) -> None:
        """Enlarges the canvas to at least this size."""
        images, tall, _, wide = self.pixels.shape
        height, width = max(height, tall), max(width, wide)
        if (height, width) == (tall, wide):
            return
        needed = images * height * 3 * width
        if shortage := memory_shortage("images", needed, MEMORY_SHARE, self.device):
            raise ValueError(
                f"images_on_device = True is not possible on {self.device}: {shortage}; set a "
                f"smaller image_size, or leave it out."
            )
        grown = self.pixels.new_zeros(images, height, 3, width)
        grown[:, :tall, :, :wide] = self.pixels
        self.pixels = grown


def _read(
    split: Split, transform: TrainTransform | EvalTransform, num_workers: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields images on a common canvas [n, H, 3, W], their sizes [n, 2] and labels [n]."""
    stored = (
        _WholeImage(at_least=CANVAS * transform.image_size)
        if isinstance(transform, TrainTransform)
        else _TransformedImage(transform=transform)
    )
    loader: DataLoader[Any] = DataLoader(
        split.with_transform(stored),
        batch_size=READ_BATCH,
        num_workers=num_workers,
        collate_fn=_collate,
        # A loader without a generator draws from torch's global one.
        generator=torch.Generator(),
    )
    yield from loader


@dataclass(frozen=True, kw_only=True)
class _WholeImage:
    """Returns the bytes of an image, no side longer than ``at_least``, and its original size."""

    at_least: int

    # A split returns whatever its transform returns.
    def __call__(self, image: Image.Image) -> Any:
        width, height = image.size
        stored = (min(width, self.at_least), min(height, self.at_least))
        if stored != image.size:
            image = image.resize(stored, Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)), (width, height)


@dataclass(frozen=True, kw_only=True)
class _TransformedImage:
    """Returns the bytes of a transformed image, and their size."""

    transform: EvalTransform

    @property
    def at_least(self) -> int:
        return self.transform.at_least

    def __call__(self, image: Image.Image) -> Any:
        view = self.transform(image)
        return view.mul(255).round().byte().permute(1, 2, 0), tuple(view.shape[:0:-1])


def _collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Stacks images [h, w, 3] of different sizes, in worker processes."""
    images = [image for (image, _), _, _ in samples]
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    pixels = torch.zeros(len(samples), height, 3, width, dtype=torch.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[: image.shape[0], :, : image.shape[1]] = image.transpose(1, 2)
    sizes = [size for (_, size), _, _ in samples]
    return pixels, torch.tensor(sizes), torch.tensor([label for _, label, _ in samples])


def sample_crops(sizes: Tensor, *, scale: tuple[float, float], flip: float, seed: int) -> Tensor:
    """Samples one crop per image, with the distribution of torchvision's ``RandomResizedCrop``.

    An area and an aspect ratio are sampled until they fit; otherwise the crop is the largest one in
    the center that is neither too narrow nor too wide.

    Args:
        sizes: Width and height of the images, [n, 2] in float64.
        scale: Smallest and largest share of the area.
        flip: Probability of a horizontal flip.
        seed: Seed of all crops together.

    Returns:
        Left, right, top and bottom edges, [n, 4]; left and right are swapped in a flipped crop.
    """
    width, height = sizes.T
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(sizes), 2 * TRIES + 3, generator=generator, dtype=torch.float64)
    areas, ratios, (x, y, mirror) = draws[:, :TRIES], draws[:, TRIES:-3], draws[:, -3:].T
    areas = (scale[0] + (scale[1] - scale[0]) * areas) * (width * height)[:, None]
    ratios = torch.exp((1 - 2 * ratios) * math.log(SLIMMEST))
    wide, tall = (areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()
    fits = (wide > 0) & (wide <= width[:, None]) & (tall > 0) & (tall <= height[:, None])
    # argmax returns the first of several.
    first, found = fits.byte().argmax(1, keepdim=True), fits.any(1)
    wide = torch.where(found, wide.gather(1, first)[:, 0], (height / SLIMMEST).round().min(width))
    tall = torch.where(found, tall.gather(1, first)[:, 0], (width / SLIMMEST).round().min(height))
    left = torch.where(found, x * (width - wide + 1), (width - wide) / 2).floor()
    top = torch.where(found, y * (height - tall + 1), (height - tall) / 2).floor()
    right, flipped = left + wide, mirror < flip
    edges = (torch.where(flipped, right, left), torch.where(flipped, left, right))
    return torch.stack((*edges, top, top + tall), 1)


def crop_and_resize(images: Tensor, crops: Tensor, size: int) -> Tensor:
    """Crops and resizes a batch of images.

    Args:
        images: [n, H, 3, W], levels from 0 to 255.
        crops: Left, right, top and bottom edges, [n, 4].
        size: Side of the result.

    Returns:
        [n, size, 3, size], rounded to whole levels.
    """
    left, right, top, bottom = crops.T
    n, height, channels, width = images.shape
    rows = _filter(top, bottom, size, height) @ images.reshape(n, height, channels * width)
    columns = _filter(left, right, size, width).transpose(1, 2)
    resized = rows.view(n, size * channels, width) @ columns
    return resized.add_(0.5 + ROUNDING).floor_().view(n, size, channels, size)


def _filter(begin: Tensor, end: Tensor, size: int, length: int) -> Tensor:
    """Returns the weights of all input pixels in all output pixels, [n, size, length]."""
    step = (end - begin)[:, None] / size
    steps = torch.arange(size, device=begin.device) + 0.5
    pixels = torch.arange(length, device=begin.device)
    distances = (pixels + 0.5 - (begin[:, None] + steps * step)[..., None]).abs_()
    weights = (1 - distances / step.abs().clamp(min=1)[..., None]).clamp_(min=0)
    # Pixels outside of the crop do not count: it is cut before it is resized.
    first, last = begin.minimum(end).floor(), begin.maximum(end).ceil()
    weights *= ((pixels >= first[:, None]) & (pixels < last[:, None]))[:, None]
    return weights / weights.sum(-1, keepdim=True)

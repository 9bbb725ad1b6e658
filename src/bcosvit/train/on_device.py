"""Pictures in the device's own memory: decoded once, cropped and mirrored where the model is.

Workers decode a picture in every epoch. Where a data set is small they can be the slowest part of
a run by far, and all its pictures fit, as bytes, into the memory of a GPU. So each process decodes
all of them once, and nothing but a few indices travels in a step.

Validation keeps what the transform made: batches are those of `data.Pictures`, to the last bit.
Training keeps whole pictures, `CANVAS` times the model's input along either side at most; larger
ones are shrunk to that, each axis on its own. Crops are drawn in the picture's own geometry, and so
keep their aspect ratio. Nothing is lost of smaller pictures; in larger ones crops of less than a
quarter of the area are magnified, where workers may still find finer pixels in the file. Pictures
lie in the upper left corner of a common canvas, as large as the largest of them.

An epoch's crops are drawn at once, from (seed, epoch): which one a picture gets depends on these
and its place in the split, so that runs resume, and processes share, as they do with workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Split
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.train.crops import draw_boxes, resampled
from bcosvit.train.data import Batch, Ticket
from bcosvit.train.progress import counter
from bcosvit.train.recipe import Recipe
from bcosvit.train.resident import SHARE_ON_DEMAND, sent, shortage
from bcosvit.train.seeds import mix

CANVAS = 2
"""Longest side of a picture that is kept, in sides of the model's input."""
TOGETHER = 64
"""Pictures that are read at a time."""


def pictures_on_device(
    splits: tuple[Split, Split], recipe: Recipe, device: torch.device
) -> tuple["PicturesOnDevice", "PicturesOnDevice"]:
    """Training and validation pictures for a process that trains on ``device``."""
    found = []
    for name, split in zip(("train", "val"), splits, strict=True):
        with counter(f"pictures for {name} to {device}") as progress:
            found.append(PicturesOnDevice(split, recipe.seed, device, recipe.workers, progress))
    return found[0], found[1]


class PicturesOnDevice(Dataset[Batch]):
    """Samples of a split, made of its pictures' bytes on a device."""

    on_device = True

    def __init__(
        self,
        split: Split,
        seed: int,
        device: torch.device | str,
        workers: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """The split's transform says what is kept, and what is done with it. ``progress`` is told
        how many pictures have been read, of how many."""
        self.seed, self.device = seed, torch.device(device)
        assert isinstance(split.transform, TrainTransform | EvalTransform)
        self.transform = split.transform
        self.sizes = torch.empty(len(split), 2, dtype=torch.float64)
        """Width and height of what was read."""
        labels = torch.empty(len(split), dtype=torch.long)
        self.pixels = torch.empty(len(split), 0, 3, 0, dtype=torch.uint8, device=self.device)
        """[N, height, 3, width]: rows of all channels, as `resampled` multiplies them."""
        done = 0
        for pixels, sizes, classes in _read(split, self.transform, workers):
            start, done = done, done + len(pixels)
            _, height, _, width = pixels.shape
            self._make_room(height, width)
            self.pixels[start:done, :height, :, :width] = pixels.to(self.device)
            self.sizes[start:done], labels[start:done] = sizes, classes
            if progress is not None:
                progress(done, len(split))
        self.labels = labels.to(self.device)
        # Not a number, by whose inverse a GPU would multiply, which rounds differently.
        self.white = torch.tensor(255.0, device=self.device)
        self._drawn: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, tickets: list[Ticket]) -> Batch:
        records = sent(torch.tensor([ticket.position for ticket in tickets]), self.device)
        pictures = self.pixels.index_select(0, records).float()
        if isinstance(self.transform, TrainTransform):
            (epoch,) = {ticket.epoch for ticket in tickets}
            boxes = self._boxes(epoch).index_select(0, records)
            pictures = resampled(pictures, boxes, self.transform.image_size)
        return Batch(
            (pictures / self.white).transpose(1, 2).contiguous(),
            self.labels.index_select(0, records),
            sent(torch.tensor([ticket.weight for ticket in tickets]), self.device),
        )

    def _boxes(self, epoch: int) -> Tensor:
        """Every picture's crop in an epoch, where it lies on the canvas."""
        assert isinstance(self.transform, TrainTransform)
        if self._drawn is None or self._drawn[0] != epoch:
            boxes = draw_boxes(
                self.sizes,
                scale=self.transform.scale,
                flip=self.transform.flip,
                # No place in the split, whose seeds are workers', nor that of the epoch's order.
                seed=mix(self.seed, epoch, -1),
            )
            kept = self.sizes.clamp(max=CANVAS * self.transform.image_size)
            # In this order the far edge of a picture is that of what is kept of it, exactly.
            boxes = boxes * kept.repeat_interleave(2, 1) / self.sizes.repeat_interleave(2, 1)
            self._drawn = epoch, sent(boxes.float(), self.device)
        return self._drawn[1]

    def _make_room(self, height: int, width: int) -> None:
        """Lets the canvas grow to at least this size."""
        images, tall, _, wide = self.pixels.shape
        height, width = max(height, tall), max(width, wide)
        if (height, width) == (tall, wide):
            return
        needed = images * height * 3 * width
        if short := shortage("pictures", needed, SHARE_ON_DEMAND, self.device):
            raise ValueError(
                f"pictures_on_device = True is not allowed on {self.device}, where {short}; set a "
                f"smaller image_size, or leave it out."
            )
        grown = self.pixels.new_zeros(images, height, 3, width)
        grown[:, :tall, :, :wide] = self.pixels
        self.pixels = grown


def _read(
    split: Split, transform: TrainTransform | EvalTransform, workers: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What is kept of pictures in a common canvas [n, H, 3, W], their sizes [n, 2] and labels."""
    kept = (
        _Whole(at_least=CANVAS * transform.image_size)
        if isinstance(transform, TrainTransform)
        else _Viewed(transform=transform)
    )
    loader: DataLoader[Any] = DataLoader(
        split.with_transform(kept),
        batch_size=TOGETHER,
        num_workers=workers,
        collate_fn=_together,
        # A loader without a generator draws from torch's global one.
        generator=torch.Generator(),
    )
    yield from loader


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """Bytes of a whole picture, no side longer than ``at_least``, and its size as it was read."""

    at_least: int

    # A split hands on whatever its transform makes.
    def __call__(self, image: Image.Image) -> Any:
        width, height = image.size
        kept = (min(width, self.at_least), min(height, self.at_least))
        if kept != image.size:
            image = image.resize(kept, Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)), (width, height)


@dataclass(frozen=True, kw_only=True)
class _Viewed:
    """Bytes of what a transform makes of a picture, and their size."""

    transform: EvalTransform

    @property
    def at_least(self) -> int:
        return self.transform.at_least

    def __call__(self, image: Image.Image) -> Any:
        view = self.transform(image)
        return view.mul(255).round().byte().permute(1, 2, 0), tuple(view.shape[:0:-1])


def _together(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures [h, w, 3] of any size, their sizes and labels, in worker processes."""
    pictures = [picture for (picture, _), _, _ in samples]
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    pixels = torch.zeros(len(samples), height, 3, width, dtype=torch.uint8)
    for row, picture in zip(pixels, pictures, strict=True):
        row[: picture.shape[0], :, : picture.shape[1]] = picture.transpose(1, 2)
    sizes = [size for (_, size), _, _ in samples]
    return pixels, torch.tensor(sizes), torch.tensor([label for _, label, _ in samples])

"""Reads a data set in batches, and shares the work between processes.

Metrics choose images by what the model predicts for all of them, so a data set is read once for
the predictions and a second time for the chosen images. It must give the same picture twice.

With ``torch.distributed`` every process knows the list of all items, takes every n-th one and
exchanges its results, which come back in the order of the list. Nothing is averaged on the way, so
the numbers do not depend on how many processes there are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Masks = Callable[[int], Tensor | None]
"""From a position in the data set to the object's mask [H, W], or None where there is none."""


class Images(Protocol):
    """Any map-style data set of (image [3, H, W], label, key).

    Images are RGB in [0, 1]; a key names its image, for the tables and to break ties.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int, str]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Some samples of a data set."""

    indices: list[int]
    images: Tensor
    """[B, 3, H, W], on the CPU."""
    labels: Tensor
    keys: list[str]
    masks: list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Batches of a data set, in the order of the positions asked for."""

    data: Images
    masks: Masks | None = None
    num_workers: int = 0
    """Processes that read ahead."""

    def read(self, indices: Sequence[int], batch_size: int) -> Iterator[Batch]:
        starts = range(0, len(indices), batch_size)
        return self.read_batches([indices[start : start + batch_size] for start in starts])

    def read_batches(self, batches: Sequence[Sequence[int]]) -> Iterator[Batch]:
        return iter(
            DataLoader(
                _Samples(self.data, self.masks),
                batch_sampler=[list(batch) for batch in batches],
                num_workers=self.num_workers,
                collate_fn=_batch,
                # A loader without a generator draws from torch's global one.
                generator=torch.Generator(),
            )
        )


_Sample = tuple[int, Tensor, int, str, Tensor | None]


class _Samples(Dataset[_Sample]):
    """A data set with its masks, so that workers make those too."""

    def __init__(self, data: Images, masks: Masks | None) -> None:
        self.data, self.masks = data, masks

    def __getitem__(self, index: int) -> _Sample:
        image, label, key = self.data[index]
        if not isinstance(image, Tensor) or image.ndim != 3:
            what = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"Image {key!r} is {what}, expected a tensor [3, H, W]; "
                f"give the data set a transform to tensors."
            )
        mask = None if self.masks is None else self.masks(index)
        if mask is not None and (mask.shape != image.shape[1:] or mask.dtype != torch.bool):
            raise ValueError(
                f"The mask of {key!r} is {mask.dtype} {list(mask.shape)}, expected booleans "
                f"{list(image.shape[1:])}; cut it as the image is cut."
            )
        if mask is not None and not mask.any():
            raise ValueError(
                f"The mask of {key!r} is empty, so no attribution could be right; "
                f"return None for images without an object."
            )
        return index, image, int(label), str(key), mask


def _batch(samples: list[_Sample]) -> Batch:
    indices, images, labels, keys, masks = zip(*samples, strict=True)
    for image, key in zip(images, keys, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"Images {keys[0]!r} and {key!r} have sizes {list(images[0].shape)} and "
                f"{list(image.shape)}; resize and crop them all to the model's size."
            )
    return Batch(
        indices=list(indices),
        images=torch.stack(images),
        labels=torch.tensor(labels),
        keys=list(keys),
        masks=list(masks),
    )


T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among all; a single process is rank 0 of 1."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Ranks":
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns the items that this process works on."""
        return items[self.rank :: self.count]

    def gather(self, results: list[T]) -> list[T]:
        """Gathers the results of all processes, one per item, in the order of the items."""
        if self.count == 1:
            return results
        shares: list[list[T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(shares, results)
        total = sum(len(share) for share in shares)
        return [shares[item % self.count][item // self.count] for item in range(total)]

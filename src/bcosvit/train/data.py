"""Which samples a run sees in which order, on any number of workers and processes.

The order of an epoch is a function of (seed, epoch), the augmentation of a sample is a function of
(seed, epoch, index), and global batches are cut from the order before processes share them. Two
processes with half a batch each therefore see together what one process sees, and a run that
resumes in the middle of an epoch continues with the very next batch: the number of finished batches
is all that a checkpoint has to store.

Global batches rarely divide evenly at the end of an epoch. Every sample therefore carries a weight
such that the *average over processes* of weighted sums is the mean over the global batch. A process
that would receive no sample receives one of weight zero, which keeps it in step with the others.

Lightning's distributed sampler would repeat samples instead, and neither it nor PyTorch's loader
can resume in the middle of an epoch.
"""

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from bcosvit.data.dataset import Reader, Split
from bcosvit.data.images import to_bytes
from bcosvit.machine import cpu_cores

DRAWN_IMAGES_LIMIT = 2**30
"""Bytes of drawn images that are held in memory; larger sets are drawn again in every epoch."""


def derive_seed(*numbers: int) -> int:
    """Returns a seed that depends on all numbers, the same in every process and on every machine.

    Examples:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SampleRequest(NamedTuple):
    """One sample that a sampler asks a dataset for."""

    epoch: int
    position: int
    weight: float


class Batch(NamedTuple):
    """What a training or validation step works on."""

    inputs: Tensor
    """Images [B, 3, H, W] in [0, 1], or features of a backbone [B, c, h, w]."""
    labels: Tensor
    """[B]."""
    weights: Tensor
    """[B], zero for a sample that only keeps a process in step with the others."""
    targets: Tensor | None = None
    """Shares of the classes [B, C] where images were mixed; ``None``: the labels alone."""
    taught: Tensor | None = None
    """Logits of a teacher [B, C], where the loss has one."""

    @classmethod
    def of(cls, inputs: list[Tensor], labels: list[int], requests: list[SampleRequest]) -> "Batch":
        """Stacks samples."""
        weights = torch.tensor([request.weight for request in requests])
        return cls(torch.stack(inputs), torch.tensor(labels), weights)


class BatchDataset(Protocol):
    """A dataset that returns whole batches."""

    on_device: bool
    """Whether batches are made on the training device, so that worker processes are of no use."""

    def __len__(self) -> int: ...

    def __getitem__(self, requests: list[SampleRequest]) -> Batch: ...


class ImageDataset(Dataset[Batch]):
    """Images of a split, each transformed with a random state of its own."""

    on_device = False

    def __init__(self, split: Split, seed: int) -> None:
        self.split, self.seed = split, seed

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, requests: list[SampleRequest]) -> Batch:
        samples = [
            self.split[request.position, derive_seed(self.seed, request.epoch, request.position)]
            for request in requests
        ]
        images = []
        for image, _, _ in samples:
            assert isinstance(image, Tensor), "the split needs a transform"
            images.append(image)
        return Batch.of(images, [label for _, label, _ in samples], requests)


class GlobalBatchSampler(Sampler[list[SampleRequest]]):
    """Yields this process's share of every global batch.

    Args:
        length: Number of samples.
        batch_size: Samples per optimizer step, over all processes and accumulated batches.
        seed: Seed of the order. ``None`` keeps the order and sets all weights to one, as validation
            needs it.
        rank: The number of this process.
        world_size: The number of processes.
        accumulate: Batches per optimizer step in each process.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.epoch = 0
        self.start = 0
        """How many batches the next epoch leaves out at its beginning."""

    def __len__(self) -> int:
        # The last global batch may be smaller.
        return -(-self.length // self.batch_size) * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        order, start = self._order(), self.start
        # Reset here, because an iterator need not be exhausted.
        self.start = 0
        parts = self.world_size * self.accumulate
        for number in range(start, len(self)):
            step, turn = divmod(number, self.accumulate)
            whole = self._global_batch(order, step)
            weight = 1.0 if self.seed is None else parts / len(whole)
            share = whole[turn * self.world_size + self.rank :: parts]
            yield (
                [SampleRequest(self.epoch, index, weight) for index in share]
                # Nothing is left for this process, but it has to take part in the step.
                or [SampleRequest(self.epoch, whole[0], 0.0)]
            )

    def positions(self, step: int) -> list[int]:
        """The samples of a global batch of this epoch, over all processes."""
        return self._global_batch(self._order(), step)

    def _global_batch(self, order: list[int], step: int) -> list[int]:
        return order[step * self.batch_size : (step + 1) * self.batch_size]

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class ResumableDataLoader(DataLoader[Batch]):
    """Loads the batches of a `GlobalBatchSampler`; its state can be saved between any two.

    Args:
        dataset: Answers a list of requests with a batch.
        batches: The sampler.
        num_workers: Processes that load; none are started where batches are made on the device.
        pin_memory: Whether a thread copies batches for a GPU into pinned memory.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        batches: GlobalBatchSampler,
        num_workers: int,
        *,
        pin_memory: bool = True,
    ) -> None:
        num_workers = 0 if dataset.on_device else num_workers
        # Not an event: setting one waits for its waiters, which may be gone.
        told: Any = None
        self._tell: Any = None
        if num_workers:
            told, self._tell = torch.multiprocessing.Pipe(duplex=False)
        super().__init__(
            dataset,  # type: ignore[arg-type]
            # The sampler yields whole batches, and the dataset returns them.
            batch_size=None,
            sampler=batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory and torch.cuda.is_available() and not dataset.on_device,
            worker_init_fn=_Worker(told),
            # A loader without a generator draws from torch's global one.
            generator=torch.Generator(),
        )
        self.batches = batches
        self._done = 0

    def close(self) -> None:
        """Ends the workers now, whatever they do; they only read."""
        if self._tell is not None:
            # Each worker reads one byte.
            os.write(self._tell.fileno(), bytes(self.num_workers))
            self._tell = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator starts when the first batch is requested. Lightning makes the iterator of a
        # resumed epoch before it tells the sampler which epoch that is.
        self._done = self.batches.start
        for batch in super().__iter__():
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.start = state["done"]


class DataModule(LightningDataModule):
    """Training and validation batches for this process, by `GlobalBatchSampler`.

    ``name_of`` returns the name of the training image at a position, for messages.
    """

    def __init__(
        self,
        train: BatchDataset,
        val: BatchDataset,
        *,
        batch_size: int,
        seed: int,
        num_workers: int = 0,
        accumulate: int = 1,
        pin_memory: bool = True,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__()
        self.train_samples, self.val_samples, self.name_of = train, val, name_of
        self._loaders: list[ResumableDataLoader] = []
        self.batch_size, self.seed, self.accumulate = batch_size, seed, accumulate
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def train_dataloader(self) -> ResumableDataLoader:
        return self._loader(self.train_samples, self.batch_size, self.seed, self.accumulate)

    def val_dataloader(self) -> ResumableDataLoader:
        return self._loader(self.val_samples, self.batch_size // self.accumulate, None, 1)

    def _loader(
        self, samples: BatchDataset, batch_size: int, seed: int | None, accumulate: int
    ) -> ResumableDataLoader:
        assert self.trainer is not None
        batches = GlobalBatchSampler(
            len(samples),
            batch_size,
            seed=seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            accumulate=accumulate,
        )
        loader = ResumableDataLoader(samples, batches, self.num_workers, pin_memory=self.pin_memory)
        self._loaders.append(loader)
        return loader

    def close(self) -> None:
        """Ends all worker processes."""
        for loader in self._loaders:
            loader.close()

    def on_exception(self, exception: BaseException) -> None:
        # Before torch waits some seconds for each worker to finish its batch.
        self.close()

    def images_of(self, epoch: int, step: int) -> list[str]:
        """The names of the images in a global batch, all processes together."""
        if self.name_of is None:
            return []
        batches = GlobalBatchSampler(len(self.train_samples), self.batch_size, seed=self.seed)
        batches.set_epoch(epoch)
        return [self.name_of(position) for position in batches.positions(step)]


class _Worker:
    """What a worker does first.

    Ctrl-C and a scheduler's SIGTERM reach every process, but the run finishes its step first, and
    needs its workers for that. So they ignore both, and end when they are ``told`` to: at once,
    also in the middle of a picture. Where the run is killed, torch ends its workers.
    """

    def __init__(self, told: Any) -> None:
        self.told = told

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Torch also sends SIGTERM, to workers that hang.
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        os.read(self.told.fileno(), 1)
        os._exit(0)


class _CachedImages:
    """The images of a reader, in memory."""

    drawn = True

    def __init__(self, reader: Reader, images: NDArray[np.uint8]) -> None:
        self.reader, self.images = reader, images

    def __len__(self) -> int:
        return len(self.reader)

    def key(self, index: int) -> str:
        return self.reader.key(index)

    def label(self, index: int) -> int:
        return self.reader.label(index)

    def image(self, index: int, at_least: int | None) -> Image.Image:
        return Image.fromarray(self.images[index])


def cache_drawn_images(split: Split) -> Split:
    """Returns the same split; images that are drawn, not read, are drawn once and held in memory.

    Drawing an image takes longer than training on it. Splits that are read from files, or that
    exceed `DRAWN_IMAGES_LIMIT`, are returned unchanged.
    """
    if not split.reader.drawn:
        return split
    drawn = Split(split.reader, transform=to_bytes)
    if drawn[0][0].nbytes * len(drawn) > DRAWN_IMAGES_LIMIT:  # type: ignore[union-attr]
        return split
    # Drawing is pure Python: one process per core, where there is enough to do for it.
    num_workers = min(cpu_cores(), len(drawn) // 256)
    loader = DataLoader(drawn, batch_size=None, num_workers=num_workers)
    images = torch.stack([image for image, _, _ in loader]).numpy()
    cached = _CachedImages(split.reader, images)
    return Split(cached, split.indices, transform=split.transform, max_skipped=split.max_skipped)

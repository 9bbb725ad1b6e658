"""What a run sees, in which order: the same on any number of workers and processes.

The order of an epoch is a function of (seed, epoch), a sample's augmentation one of
(seed, epoch, index), and global batches are cut from the order before processes share them out.
So two processes with half a batch each see together what one process sees, and a run that resumes
in the middle of an epoch goes on with the very next batch: all that must be remembered is how many
were done.

Global batches rarely divide evenly at the end of an epoch. Every sample therefore carries a weight
such that the *average over processes* of weighted sums is the mean over the global batch, and a
process that would go empty-handed gets a sample of weight zero, which keeps it in step with the
others and counts for nothing.
"""

import signal
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from bcosvit.data.dataset import Split
from bcosvit.train.cache import FeatureCache, view_of
from bcosvit.train.recipe import Recipe
from bcosvit.train.seeds import mix


class Ticket(NamedTuple):
    """One sample, as asked for."""

    epoch: int
    position: int
    weight: float


class Batch(NamedTuple):
    """What the task works on."""

    inputs: Tensor
    """Images [n, 3, H, W] in [0, 1], or a backbone's features [n, c, h, w]."""
    labels: Tensor
    weights: Tensor
    """Zero where a sample only fills a place."""


class Samples(Protocol):
    """Where batches come from: pictures, or cached features."""

    on_device: bool
    """Whether batches are made where the model is, so that workers would be in the way."""

    def __len__(self) -> int: ...

    def __getitem__(self, tickets: list[Ticket]) -> Batch: ...


class Pictures(Dataset[Batch]):
    """Samples of a split, each transformed by a random state of its own."""

    on_device = False

    def __init__(self, split: Split, seed: int) -> None:
        self.split, self.seed = split, seed

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, tickets: list[Ticket]) -> Batch:
        samples = [
            self.split[ticket.position, mix(self.seed, ticket.epoch, ticket.position)]
            for ticket in tickets
        ]
        images = []
        for image, _, _ in samples:
            assert isinstance(image, Tensor), "the split needs a transform"
            images.append(image)
        return _batch(images, [label for _, label, _ in samples], tickets)


class Features(Dataset[Batch]):
    """Samples of a feature cache, a view of each per epoch."""

    on_device = False

    def __init__(self, cache: FeatureCache, seed: int) -> None:
        self.cache, self.seed = cache, seed

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, tickets: list[Ticket]) -> Batch:
        samples = [self.cache[ticket.position, self._view(ticket)] for ticket in tickets]
        return _batch([sample[0] for sample in samples], [sample[1] for sample in samples], tickets)

    def _view(self, ticket: Ticket) -> int:
        views = self.cache.views
        return view_of(ticket.position, epoch=ticket.epoch, views=views, seed=self.seed)


class GlobalBatches(Sampler[list[Ticket]]):
    """This process's share of every global batch, in order."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int | None,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
    ) -> None:
        """Without a ``seed`` samples keep their order, and weights are one: for validation."""
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.ranks, self.accumulate = rank, ranks, accumulate
        self.epoch = 0
        self.start = 0
        """How many batches to leave out at the beginning of the next epoch."""

    @property
    def steps(self) -> int:
        """Global batches in an epoch; the last one may be smaller."""
        return -(-self.length // self.batch_size)

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Ticket]]:
        order, start = self._order(), self.start
        # Spent here: nobody promises to ask for more batches than there are.
        self.start = 0
        parts = self.ranks * self.accumulate
        for number in range(start, len(self)):
            step, turn = divmod(number, self.accumulate)
            whole = order[step * self.batch_size : (step + 1) * self.batch_size]
            weight = 1.0 if self.seed is None else parts / len(whole)
            mine = whole[turn * self.ranks + self.rank :: parts]
            yield (
                [Ticket(self.epoch, index, weight) for index in mine]
                # Nothing is left for this process: it keeps step with the others.
                or [Ticket(self.epoch, whole[0], 0.0)]
            )

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class Loader(DataLoader[Batch]):
    """Loads the batches of a ``GlobalBatches``, and can be stopped and resumed between any two."""

    def __init__(
        self, samples: Samples, batches: GlobalBatches, workers: int, *, pins: bool = True
    ) -> None:
        """``pins``: a thread of torch's puts batches for a GPU into pinned memory."""
        workers = 0 if samples.on_device else workers
        # A sampler that yields whole batches, and a dataset that answers with one.
        super().__init__(
            samples,  # type: ignore[arg-type]
            batch_size=None,
            sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pins and torch.cuda.is_available() and not samples.on_device,
            worker_init_fn=_outlive_signals,
            # A loader without a generator draws from torch's global one.
            generator=torch.Generator(),
        )
        self.batches = batches
        self._done = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator starts when the first batch is asked for. Lightning makes the iterator of a
        # resumed epoch before it tells the sampler which epoch that is.
        self._done = self.batches.start
        for batch in super().__iter__():
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.start = state["done"]


class Data(LightningDataModule):
    """Training and validation batches for this process."""

    def __init__(self, train: Samples, val: Samples, recipe: Recipe) -> None:
        super().__init__()
        self.train_samples, self.val_samples, self.recipe = train, val, recipe

    def train_dataloader(self) -> Loader:
        return self._loader(self.train_samples, self.recipe.seed)

    def val_dataloader(self) -> Loader:
        return self._loader(self.val_samples, None)

    def _loader(self, samples: Samples, seed: int | None) -> Loader:
        recipe, trainer = self.recipe, self.trainer
        assert trainer is not None
        batches = GlobalBatches(
            len(samples),
            recipe.batch_size if seed is not None else recipe.batch_size // recipe.accumulate,
            seed=seed,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            accumulate=recipe.accumulate if seed is not None else 1,
        )
        # Another thread's allocations would spoil the recording of a step.
        return Loader(samples, batches, recipe.workers, pins=not recipe.graphs)


def _batch(inputs: list[Tensor], labels: list[int], tickets: list[Ticket]) -> Batch:
    weights = torch.tensor([ticket.weight for ticket in tickets])
    return Batch(torch.stack(inputs), torch.tensor(labels), weights)


def _outlive_signals(_: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process, and the run wants to finish its step.

    A worker that is told to terminate lives on for a minute: torch, too, ends stuck ones so.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))

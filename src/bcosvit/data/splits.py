"""One split of a data set: a map-style dataset over any store, and what it does about bad files.

A `Store` knows where pictures lie (a folder, tar shards, a Hugging Face dataset, a drawing
function); a `Split` is a selection of one store's pictures with a transform, and what a loader
iterates over. Every split is random-access, also over shards: the order of a run is then a pure
function of (seed, epoch), and a run that resumes in the middle of an epoch sees exactly the
pictures that it would have seen.

Bad files are met twice. `check` reads everything beforehand, with many threads, and returns a
source without them. During training a picture that has turned bad is replaced by the next readable
one of its split: what stands in depends on the files alone, not on the order of events, the number
of workers or a restart. Bad positions are marked in shared memory, because loaders read in worker
processes while the training process must count, list (`skipped.txt`) and stop above the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bcosvit.data.images import ImageError
from bcosvit.files import atomic

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Sample", "Skipped", "SourceError", "Split", "Store", "unreadable", "write_skipped"]

Sample: TypeAlias = tuple[Image.Image | Tensor, int, str]
Transform: TypeAlias = Callable[[Image.Image], Tensor]

_CHUNK = 1024


class SourceError(ValueError):
    """A data set that cannot be trained on; the message is one sentence that says why."""


class Store(Protocol):
    """Where pictures lie. Reading must be safe from several threads and after a fork."""

    @property
    def drawn(self) -> bool:
        """Whether pictures are made instead of read, so that none can be bad."""

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """A name, unique within the store, by which people find the picture."""

    def label(self, index: int) -> int: ...

    def image(self, index: int, at_least: int | None) -> Image.Image:
        """The picture in RGB, or `ImageError`; see `images.read` for `at_least`."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A picture that was left out, and why."""

    key: str
    reason: str


class Split(Dataset[Sample]):
    """Pictures of one store as (picture, label, key), the picture transformed if one is set.

    A position may be given alone, or as a pair with a seed. Then torch's CPU generator is seeded
    for this one sample and put back afterwards, so that augmentation follows from the pair, however
    many workers there are and wherever a run resumes. A sampler that yields
    ``(position, hash of (run seed, epoch, position))`` therefore makes a whole run reproducible.
    """

    def __init__(
        self,
        store: Store,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        transform: Transform | None = None,
        max_skipped: float = 0.01,
    ) -> None:
        """`indices` select from the store, all by default; `max_skipped` is the share of the split
        that may be unreadable before reading stops with an error."""
        if not 0 <= max_skipped <= 1:
            raise SourceError(f"max_skipped is {max_skipped}: give a share between 0 and 1.")
        self.store = store
        self.indices = np.asarray(range(len(store)) if indices is None else indices, np.int64)
        self.transform = transform
        self.max_skipped = max_skipped
        self._bad = torch.zeros(len(self.indices), dtype=torch.uint8).share_memory_()

    def __repr__(self) -> str:
        return f"Split({len(self)} pictures, transform={self.transform})"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int | tuple[int, int]) -> Sample:
        if isinstance(position, tuple):
            position, seed = position
            with _seeded(seed):
                return self[position]
        found, image = self._readable(range(len(self))[position])
        label, key = self.label(found), self.key(found)
        return (image if self.transform is None else self.transform(image)), label, key

    def key(self, position: int) -> str:
        """The picture's name, without reading it."""
        return self.store.key(int(self.indices[position]))

    def label(self, position: int) -> int:
        """The picture's class, without reading it."""
        return self.store.label(int(self.indices[position]))

    def labels(self) -> list[int]:
        """All classes in order, for weighing and balancing."""
        return [self.label(position) for position in range(len(self))]

    def with_transform(self, transform: Transform | None) -> Split:
        """The same pictures, sharing what is known about bad ones, under another transform."""
        other = Split(self.store, self.indices, transform=transform, max_skipped=self.max_skipped)
        other._bad = self._bad
        return other

    def without(self, positions: Iterable[int]) -> Split:
        """The same split less these positions."""
        kept = np.delete(self.indices, np.fromiter(positions, np.int64))
        return Split(self.store, kept, transform=self.transform, max_skipped=self.max_skipped)

    def skipped(self) -> tuple[Skipped, ...]:
        """The bad pictures met so far by any worker; reasons are found by reading them again."""
        found = []
        for position in self._bad.nonzero().flatten().tolist():
            reason = self.reason(position) or "readable again"
            found.append(Skipped(key=self.key(position), reason=reason))
        return tuple(found)

    def reason(self, position: int) -> str | None:
        """Why this picture cannot be read; None where it can."""
        try:
            # The smallest decoding still runs through all of the file's data.
            self.store.image(int(self.indices[position]), at_least=1)
        except ImageError as error:
            return str(error)
        return None

    def enforce_limit(self, bad: int, example: str) -> None:
        """Raise where more pictures are bad than allowed.

        In a small split a single file is more than any sensible share: one is always allowed,
        unless none are.
        """
        allowed = max(1.0, self.max_skipped * len(self)) if self.max_skipped else 0.0
        if bad > allowed:
            raise SourceError(
                f"{bad} of {len(self)} pictures cannot be read, a share of {self.max_skipped:g} is "
                f"allowed (the last one: {example.rstrip('.')}): repair the data or raise "
                "max_skipped."
            )

    def _readable(self, position: int) -> tuple[int, Image.Image]:
        at_least = getattr(self.transform, "at_least", None)
        for step in range(len(self)):
            found = (position + step) % len(self)
            if self._bad[found]:
                continue
            try:
                return found, self.store.image(int(self.indices[found]), at_least)
            except ImageError as error:
                self._bad[found] = 1
                self.enforce_limit(int(self._bad.sum()), str(error))
        raise SourceError(f"None of {len(self)} pictures can be read: check the data.")


def unreadable(
    split: Split,
    *,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> dict[int, str]:
    """Read every picture and return the bad positions with their reasons.

    `progress` is told, on the calling thread, how many more pictures have been read. Decoding runs
    outside Python's lock, so that threads do.
    """
    if split.store.drawn:
        return {}
    bad: dict[int, str] = {}
    with ThreadPoolExecutor(threads or min(32, (os.cpu_count() or 1) + 4)) as pool:
        # In chunks: a future for every picture of a large data set would fill the memory.
        for start in range(0, len(split), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(split)))
            for position, reason in zip(chunk, pool.map(split.reason, chunk), strict=True):
                if reason is not None:
                    bad[position] = reason
            if progress is not None:
                progress(len(chunk))
    return bad


def write_skipped(path: str | os.PathLike[str], skipped: Iterable[Skipped]) -> None:
    """Write one line a picture, key and reason, replacing the file at once or not at all."""
    lines = (f"{_line(item.key)}\t{_line(item.reason)}\n" for item in skipped)
    with (
        atomic(Path(path)) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines(lines)


def _line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # torch.manual_seed would reseed the accelerators too, under the feet of the training step.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)

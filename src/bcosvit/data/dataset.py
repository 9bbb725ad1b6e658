"""Stored images and data sets over them: readers and splits.

A `Reader` knows where images are stored (a folder, tar shards, a Hugging Face dataset, a drawing
function). A `Split` is a map-style dataset over some of a reader's images.

Every split is random-access, also over shards. The order of a run is then a function of the seed
and the epoch alone, and a run that resumes in the middle of an epoch sees exactly the images that
it would have seen.

During training, an image that has become unreadable is replaced by the next readable one of its
split, which depends on the files alone and not on the number of workers or on a restart. Unreadable
positions are marked in shared memory, because data loaders read in worker processes while the
training process counts them and stops above the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bcosvit.data.images import ImageError
from bcosvit.files import atomic

__all__ = ["MaskReader", "Reader", "Skipped", "SourceError", "Split", "write_skipped"]

Sample: TypeAlias = tuple[Image.Image | Tensor, int, str]

Transform: TypeAlias = Callable[[Image.Image], Tensor]

_CHUNK = 1024


class SourceError(ValueError):
    """A data set cannot be used; the message is one sentence that says why."""


class Reader(Protocol):
    """Random access to stored images. It must work from several threads and after a fork."""

    @property
    def drawn(self) -> bool:
        """Whether images are drawn instead of read, so that none can be unreadable."""

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """Returns a name of the image that is unique within the reader."""

    def label(self, index: int) -> int:
        """Returns the class of the image without reading it."""

    def image(self, index: int, at_least: int | None) -> Image.Image:
        """Returns the image in RGB or raises `ImageError`; see `read_image` for ``at_least``."""


@runtime_checkable
class MaskReader(Protocol):
    """A reader that also knows where the objects are."""

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """Returns the pixels [H, W] of the object in an image, or None if they are unknown."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """An image that was left out, and why."""

    key: str
    reason: str


def check_skipped(share: float) -> None:
    """Raises an error unless ``share`` may be the share of a split that is unreadable."""
    if not 0 <= share <= 1:
        raise SourceError(f"max_skipped is {share}: give a share between 0 and 1.")


class Split(Dataset[Sample]):
    """A map-style dataset of (image, label, key) over some images of a reader.

    An item may be a position, or a pair of a position and a seed. With a seed, torch's CPU
    generator is seeded for this one sample and restored afterwards, so that random augmentation
    depends on the pair alone, however many workers there are and wherever a run resumes.

    Args:
        reader: Where the images are stored.
        indices: The images of the reader that belong to the split; all by default.
        transform: Applied to each image; without one, items hold PIL images.
        max_skipped: The share of the split that may be unreadable before an error is raised.

    Raises:
        SourceError: If ``max_skipped`` is not between 0 and 1.

    Examples:
        >>> split = open_source("scenes?train=8&val=8").train
        >>> image, label, key = split[3]
        >>> key
        'scenes/train/3'
    """

    def __init__(
        self,
        reader: Reader,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        transform: Transform | None = None,
        max_skipped: float = 0.01,
    ) -> None:
        check_skipped(max_skipped)
        self.reader = reader
        self.indices = np.asarray(range(len(reader)) if indices is None else indices, np.int64)
        self.transform = transform
        self.max_skipped = max_skipped
        self._bad = torch.zeros(len(self.indices), dtype=torch.uint8).share_memory_()

    def __repr__(self) -> str:
        return f"Split({len(self)} images, transform={self.transform})"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int | tuple[int, int]) -> Sample:
        if isinstance(position, tuple):
            position, seed = position
            with _seeded(seed):
                return self[position]
        found, image = self.readable(range(len(self))[position])
        label, key = self.label(found), self.key(found)
        return (image if self.transform is None else self.transform(image)), label, key

    def key(self, position: int) -> str:
        """Returns the name of an image without reading it."""
        return self.reader.key(int(self.indices[position]))

    def label(self, position: int) -> int:
        """Returns the class of an image without reading it."""
        return self.reader.label(int(self.indices[position]))

    def labels(self) -> list[int]:
        """Returns the classes of all images in order."""
        return [self.label(position) for position in range(len(self))]

    def select(self, positions: Sequence[int] | np.ndarray) -> Split:
        """Returns a split of the images at these positions."""
        indices = self.indices[np.asarray(positions, np.int64)]
        return Split(self.reader, indices, transform=self.transform, max_skipped=self.max_skipped)

    def with_transform(self, transform: Transform | None) -> Split:
        """Returns the same images with another transform; both know the same unreadable ones."""
        other = Split(self.reader, self.indices, transform=transform, max_skipped=self.max_skipped)
        other._bad = self._bad
        return other

    def skipped(self) -> tuple[Skipped, ...]:
        """Returns the unreadable images found so far by any worker."""
        return tuple(
            Skipped(key=self.key(position), reason=self.reason(position) or "readable again")
            for position in self._bad.nonzero().flatten().tolist()
        )

    def reason(self, position: int) -> str | None:
        """Reads an image and returns why it is unreadable, or None if it can be read."""
        try:
            # The smallest decoding still runs through all of the file's data.
            self.reader.image(int(self.indices[position]), at_least=1)
        except ImageError as error:
            return str(error)
        return None

    def unreadable(
        self, *, progress: Callable[[int], None] | None = None, num_workers: int | None = None
    ) -> dict[int, str]:
        """Reads every image and returns the unreadable positions with their reasons.

        Args:
            progress: Called on this thread with the number of images read since the last call.
            num_workers: Number of threads; decoding runs outside of Python's global lock.
        """
        bad: dict[int, str] = {}
        if self.reader.drawn:
            return bad
        with ThreadPoolExecutor(num_workers or min(32, (os.cpu_count() or 1) + 4)) as pool:
            # In chunks: one future per image of a large data set would fill the memory.
            for start in range(0, len(self), _CHUNK):
                chunk = range(start, min(start + _CHUNK, len(self)))
                reasons = zip(chunk, pool.map(self.reason, chunk), strict=True)
                bad |= {position: reason for position, reason in reasons if reason is not None}
                if progress is not None:
                    progress(len(chunk))
        return bad

    def enforce_limit(self, bad: int, example: str) -> None:
        """Raises `SourceError` if more images are unreadable than ``max_skipped`` allows.

        In a small split, a single file is more than any sensible share: one unreadable image is
        always allowed unless ``max_skipped`` is 0.
        """
        allowed = max(1.0, self.max_skipped * len(self)) if self.max_skipped else 0.0
        if bad > allowed:
            raise SourceError(
                f"{bad} of {len(self)} images cannot be read, a share of {self.max_skipped:g} is "
                f"allowed (the last one: {example.rstrip('.')}): repair the data or raise "
                "max_skipped."
            )

    def readable(self, position: int) -> tuple[int, Image.Image]:
        """Returns the first image from a position on that can be read, and its position.

        Raises:
            SourceError: If more images are unreadable than ``max_skipped`` allows.
        """
        at_least = getattr(self.transform, "at_least", None)
        for step in range(len(self)):
            found = (position + step) % len(self)
            if self._bad[found]:
                continue
            try:
                return found, self.reader.image(int(self.indices[found]), at_least)
            except ImageError as error:
                self._bad[found] = 1
                self.enforce_limit(int(self._bad.sum()), str(error))
        raise SourceError(f"None of {len(self)} images can be read: check the data.")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # torch.manual_seed would also reseed the accelerators, which the training step uses meanwhile.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def write_skipped(path: str | os.PathLike[str], skipped: Iterable[Skipped]) -> None:
    """Writes one line per image, key and reason, and replaces the file only when complete."""

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")

    with (
        atomic(Path(path)) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines(f"{escape(item.key)}\t{escape(item.reason)}\n" for item in skipped)

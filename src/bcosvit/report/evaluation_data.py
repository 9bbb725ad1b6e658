"""The pictures of an evaluation: a source's split, with the labels that the model knows.

Data and model name their classes on their own. Where both have names, labels are matched by name,
so that a model can be evaluated on some of its classes, or on a data set in another order; where
the weights file brings no names, labels are positions and must fit.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bcosvit.data.sources import Source
from bcosvit.data.splits import Skipped, Split
from bcosvit.data.transforms import EvalTransform
from bcosvit.report.subject import Subject

Part = Literal["val", "train", "all"]


@runtime_checkable
class MaskedStore(Protocol):
    """A store of pictures that knows where their objects are."""

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """The object's pixels [H, W] in the picture of that index, if known."""


class Pictures:
    """What `evaluate` reads: (image [3, H, W], label of the model's, key)."""

    def __init__(
        self, splits: Sequence[Split], labels: Sequence[int], transform: EvalTransform
    ) -> None:
        """``labels`` are the model's, by the data's own."""
        self.splits = [split.with_transform(transform) for split in splits]
        self.labels, self.transform = list(labels), transform
        self.places = [(n, at) for n, split in enumerate(splits) for at in range(len(split))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        number, position = self.places[index]
        image, label, key = self.splits[number][position]
        assert isinstance(image, Tensor)
        return image, self.labels[label], key

    def limit(self, count: int, seed: int) -> None:
        """Keeps ``count`` pictures drawn at random: data often lie class by class."""
        if count < 1:
            raise ValueError(f"limit = {count} is not allowed: give an integer >= 1.")
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(self.places), generator=generator)[:count]
        self.places = [self.places[at] for at in sorted(drawn.tolist())]

    def classes(self) -> int:
        """How many different ones there are."""
        return len({self.splits[number].label(at) for number, at in self.places})

    def masks(self) -> Callable[[int], Tensor | None] | None:
        """Where the objects are, cut as the pictures are; None where no store knows."""
        if all(isinstance(split.store, MaskedStore) for split in self.splits):
            return self._mask
        return None

    def skipped(self) -> tuple[Skipped, ...]:
        """The pictures that could not be read so far."""
        return tuple(item for split in self.splits for item in split.skipped())

    def _mask(self, index: int) -> Tensor | None:
        number, position = self.places[index]
        split = self.splits[number]
        assert isinstance(split.store, MaskedStore)
        mask = split.store.mask(int(split.indices[position]))
        if mask is None:
            return None
        shown = self.transform(Image.fromarray(mask.astype(np.uint8) * 255).convert("RGB"))
        inside = shown[0] > 0.5
        # The crop may have cut the object off.
        return inside if inside.any() else None


def open_pictures(source: Source, part: str, subject: Subject) -> Pictures:
    """A part of ``source`` as ``subject`` sees it."""
    if part not in get_args(Part):
        raise ValueError(
            f"split = {part!r} is not allowed: choose from {', '.join(get_args(Part))}."
        )
    splits = [source.train, source.val] if part == "all" else [getattr(source, part)]
    return Pictures(splits, _labels(source, subject), subject.transform)


def _labels(source: Source, subject: Subject) -> list[int]:
    if not subject.named:
        if len(source.classes) > len(subject.names):
            raise ValueError(
                f"{source.name} has {len(source.classes)} classes, but the model knows "
                f"{len(subject.names)}; evaluate it on data with the classes that it was trained "
                f"for."
            )
        return list(range(len(source.classes)))
    unknown = [name for name in source.classes if name not in subject.names]
    if unknown:
        raise ValueError(
            f"{source.name} has a class {unknown[0]!r} that the model does not know (it knows "
            f"{', '.join(subject.names[:10])}{', ...' if len(subject.names) > 10 else ''}); "
            f"evaluate it on data with the classes that it was trained for."
        )
    return [subject.names.index(name) for name in source.classes]

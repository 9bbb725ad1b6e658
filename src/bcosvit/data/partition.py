"""Which classes there are, and which pictures are trained on: the rules that all sources share.

Every kind of source finds its pictures in its own way and then comes here, so that the same data
give the same labels, the same validation split and the same complaints as a folder, as shards or
as a Hugging Face dataset.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bcosvit.data.splits import SourceError, Store

__all__ = ["TRAIN", "VAL", "Draw", "Opened", "Part", "check_classes", "check_coverage", "few"]

TRAIN = ("train", "training")
VAL = ("val", "valid", "validation", "test")
"""Names of splits, in the order in which they are looked for: beside a val, a test is unused."""

Part: TypeAlias = tuple[Store, np.ndarray]
"""A store and the indices of it that make a split."""

Opened: TypeAlias = tuple[tuple[str, ...], Part, Part]
"""Classes, what to train on, what to validate on."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draws a validation split, class by class, where the data have none.

    Pictures are ranked by a hash of the seed and their key. Unlike a shuffle this does not depend
    on any library's random numbers, and a picture more or less hardly moves the others.
    """

    fraction: float
    """Share of each class: at least one picture where there are two, never all."""
    seed: int
    """Another seed draws another split."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise SourceError(f"val_fraction is {self.fraction}: give a share between 0 and 1.")

    def __call__(self, store: Store, indices: np.ndarray) -> tuple[Part, Part]:
        by_label: dict[int, list[int]] = {}
        for index in indices.tolist():
            by_label.setdefault(store.label(index), []).append(index)
        chosen: list[int] = []
        for members in by_label.values():
            count = min(max(1, round(len(members) * self.fraction)), len(members) - 1)
            chosen += sorted(members, key=lambda index: self._rank(store.key(index)))[:count]
        if not chosen:
            raise SourceError(
                "No class has a second picture that could be set aside for validation: "
                "give more pictures or a validation split."
            )
        is_val = np.isin(indices, chosen)
        return (store, indices[~is_val]), (store, indices[is_val])

    def _rank(self, key: str) -> bytes:
        return hashlib.sha256(f"{self.seed}\0{key}".encode("utf-8", "surrogatepass")).digest()


def check_classes(names: Iterable[str], where: object) -> tuple[str, ...]:
    """The names, refused where there are not two or where two are hard to tell apart."""
    classes = tuple(names)
    if not classes:
        raise SourceError(
            f"There are no classes in {where}: give one folder a class, with its pictures inside."
        )
    seen: dict[str, str] = {}
    for name in classes:
        # How disks that ignore case, or normalize as macOS does, would compare the two.
        plain = unicodedata.normalize("NFC", name).casefold().strip()
        if plain in seen:
            raise SourceError(
                f"The classes {seen[plain]!r} and {name!r} in {where} differ only in case, spaces "
                "or Unicode form: merge or rename them."
            )
        seen[plain] = name
    if len(classes) == 1:
        raise SourceError(
            f"There is a single class in {where}, {classes[0]!r}: at least two are needed; where "
            "it is the folder around the classes, give its path."
        )
    return classes


def check_coverage(classes: Sequence[str], part: Part, where: str) -> None:
    """Refuse a split in which a class has no pictures."""
    store, indices = part
    present = {store.label(index) for index in indices.tolist()}
    absent = [name for label, name in enumerate(classes) if label not in present]
    if absent:
        raise SourceError(
            f"There are no pictures of {few(absent)} in {where}: add some or remove the class "
            "everywhere, since training and validation need the same classes."
        )


def few(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message, the first ones spelled out."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more

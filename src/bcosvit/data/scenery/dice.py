"""Chance for drawing: uniform numbers from a key of integers, the same on every machine."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Dice"]

T = TypeVar("T")


class Dice:
    """A stream of chance named by a tuple of integers.

    Everything is derived from `Generator.random`, a plain shift of PCG64's output. numpy promises
    no stable stream for `uniform`, `integers` or `choice`, and compiles some of them to fused
    multiply-adds on some processors.
    """

    def __init__(self, *key: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._generator.random()

    def below(self, count: int) -> int:
        return int(self._generator.random() * count)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, probability: float) -> bool:
        return self._generator.random() < probability

    def table(self, *shape: int) -> NDArray[np.float32]:
        """Uniform numbers in [0, 1)."""
        return self._generator.random(shape).astype(np.float32)

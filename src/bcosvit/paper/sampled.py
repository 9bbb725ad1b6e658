"""Numbers that know how sure they are: a value, and what it would have been with other pictures.

A ratio of averages of averages has no formula for its interval, but can be computed again for every
resampling of the pictures. So a ``Sampled`` carries the value and its resamplings through ordinary
arithmetic. Two that were made of equally many measurements with the same seed are resampled alike,
so that what they have in common cancels; other seeds are independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcosvit.metrics.statistics import AT_ONCE, Bootstrap, Estimate

BOOTSTRAP = Bootstrap()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """A number made of means."""

    value: float
    draws: Tensor
    """[samples], float64."""
    count: int
    """How many measurements the smallest of the means is of."""

    def __add__(self, other: "Sampled") -> "Sampled":
        return self._with(other, self.value + other.value, self.draws + other.draws)

    def __sub__(self, other: "Sampled") -> "Sampled":
        return self._with(other, self.value - other.value, self.draws - other.draws)

    def __mul__(self, other: "Sampled") -> "Sampled":
        return self._with(other, self.value * other.value, self.draws * other.draws)

    def __truediv__(self, other: "Sampled") -> "Sampled":
        value = self.value / other.value if other.value else math.copysign(math.inf, self.value)
        return self._with(other, value, self.draws / other.draws)

    def exp(self) -> "Sampled":
        return Sampled(value=math.exp(self.value), draws=self.draws.exp(), count=self.count)

    def estimate(self) -> Estimate:
        """With the interval; where a resampling divides by zero there is no end to it."""
        tail = (1 - BOOTSTRAP.level) / 2
        ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
        low, high = (
            math.inf if math.isnan(end) else end for end in self.draws.quantile(ends).tolist()
        )
        return Estimate(mean=self.value, low=low, high=high, count=self.count)

    def _with(self, other: "Sampled", value: float, draws: Tensor) -> "Sampled":
        return Sampled(value=value, draws=draws, count=min(self.count, other.count))


def sampled(values: Sequence[float], *, seed: int = 0) -> Sampled:
    """The mean of ``values``, which were measured independently."""
    measured = torch.as_tensor(values, dtype=torch.float64)
    count = len(measured)
    if not count:
        raise ValueError("There is nothing to average: give at least one measurement.")
    generator = torch.Generator().manual_seed(seed)
    step = max(1, AT_ONCE // count)
    means = [
        measured[
            torch.randint(count, (min(step, BOOTSTRAP.samples - first), count), generator=generator)
        ].mean(1)
        for first in range(0, BOOTSTRAP.samples, step)
    ]
    return Sampled(value=float(measured.mean()), draws=torch.cat(means), count=count)


def mean_of(numbers: Sequence[Sampled]) -> Sampled:
    """Their average; each counts alike, whatever it was made of."""
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return Sampled(
        value=total.value / len(numbers), draws=total.draws / len(numbers), count=total.count
    )

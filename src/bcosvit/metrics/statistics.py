"""Statistics that all metrics share: intervals for means, and when two attributions are equal.

Intervals come from resampling what was measured independently (images, or whole grids).

Resampling needs no assumption about the scores, which are bounded and often far from normal, and
also serves numbers that are computed from several means, such as ratios of averages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bcosvit.ops.dispatch import wide

AT_ONCE = 2**22
"""Bounds the memory: numbers drawn in one go."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int
    """How many independent measurements it is the mean of."""

    def __str__(self) -> str:
        # A zero that is negative by rounding has no minus.
        mean, low, high = (f"{round(x, 3) + 0.0:.3f}" for x in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Percentile intervals; equal seeds resample equally many measurements in the same way."""

    samples: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples} is not allowed: give an integer >= 1.")
        if not 0 < self.level < 1:
            raise ValueError(f"level = {self.level} is not allowed: give a share, such as 0.95.")

    def mean(self, values: Tensor | Sequence[float], per: Tensor | None = None) -> Estimate:
        """The mean of ``values`` [n]; with ``per`` [n], divided by the mean of that."""
        return self.means(torch.as_tensor(values, dtype=torch.float64).unsqueeze(1), per)[0]

    def means(self, values: Tensor, per: Tensor | None = None) -> list[Estimate]:
        """The same for every column of ``values`` [n, m], all resampled together."""
        values = values.to("cpu", torch.float64)
        per = torch.ones(len(values)) if per is None else per
        both = torch.cat([values, per.to("cpu", torch.float64).unsqueeze(1)], 1)
        draws = torch.cat([_ratio(each) for each in self._resamplings(both)])
        low, high = _interval(draws, self.level)
        return [
            Estimate(mean=mean, low=a, high=b, count=len(values))
            for mean, a, b in zip(_ratio(both).tolist(), low, high, strict=True)
        ]

    def resample(self, values: Tensor | Sequence[float]) -> "Resampled":
        """Returns the mean of ``values`` [n] as a number that can be computed with.

        Args:
            values: Independent measurements.

        Returns:
            The mean with its resamplings.

        Raises:
            ValueError: If there is no measurement, or one is not finite.

        Example:
            >>> gain = Bootstrap().resample([1.0, 1.0, 0.0]) - Bootstrap().resample([0.0, 1.0, 0.0])
            >>> str(gain.estimate())
            '0.333 [0.000, 1.000]'
        """
        measured = torch.as_tensor(values, dtype=torch.float64)
        draws = torch.cat([each.mean(1) for each in self._resamplings(measured)])
        return Resampled(
            value=float(measured.mean()), draws=draws, count=len(measured), level=self.level
        )

    def _resamplings(self, values: Tensor) -> Iterator[Tensor]:
        """Yields chunks [k, n, ...] of all resamplings of the rows of ``values`` [n, ...]."""
        count = len(values)
        if not count:
            raise ValueError("There is nothing to average: give at least one measurement.")
        if not values.isfinite().all():
            raise ValueError("The measurements contain NaN or infinity; every one must be finite.")
        generator = torch.Generator().manual_seed(self.seed)
        step = max(1, AT_ONCE // values.numel())
        for first in range(0, self.samples, step):
            shape = (min(step, self.samples - first), count)
            yield values[torch.randint(count, shape, generator=generator)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampled:
    """A number that is computed from means, with what it would be for other images.

    A ratio of averages of averages has no formula for its interval, but it can be computed again
    for every resampling of the images: arithmetic applies to the value and all its resamplings. Two
    numbers from equally many measurements and the same seed are resampled alike, so that what they
    have in common cancels out; other seeds are independent. `Bootstrap.resample` makes one.
    """

    value: float
    draws: Tensor
    """[samples], float64."""
    count: int
    """How many measurements the smallest of the means has."""
    level: float = 0.95

    @classmethod
    def mean_of(cls, numbers: "Sequence[Resampled]") -> "Resampled":
        """Returns the average of numbers; each has the same weight."""
        total = numbers[0]
        for number in numbers[1:]:
            total = total + number
        return replace(total, value=total.value / len(numbers), draws=total.draws / len(numbers))

    def __add__(self, other: "Resampled") -> "Resampled":
        return self._with(other, self.value + other.value, self.draws + other.draws)

    def __sub__(self, other: "Resampled") -> "Resampled":
        return self._with(other, self.value - other.value, self.draws - other.draws)

    def __mul__(self, other: "Resampled") -> "Resampled":
        return self._with(other, self.value * other.value, self.draws * other.draws)

    def __truediv__(self, other: "Resampled") -> "Resampled":
        value = self.value / other.value if other.value else math.copysign(math.inf, self.value)
        return self._with(other, value, self.draws / other.draws)

    def exp(self) -> "Resampled":
        """Returns e to the power of the number."""
        return replace(self, value=math.exp(self.value), draws=self.draws.exp())

    def estimate(self) -> Estimate:
        """Returns the number with its interval, which is unbounded where one divides by zero."""
        low, high = _interval(self.draws, self.level)
        return Estimate(
            mean=self.value,
            low=-math.inf if math.isnan(low) else low,
            high=math.inf if math.isnan(high) else high,
            count=self.count,
        )

    def _with(self, other: "Resampled", value: float, draws: Tensor) -> "Resampled":
        return replace(self, value=value, draws=draws, count=min(self.count, other.count))


def _interval(draws: Tensor, level: float) -> Any:
    """Both ends of the percentile interval over the first axis of ``draws``."""
    tail = (1 - level) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    return draws.quantile(ends, dim=0).tolist()


def _ratio(both: Tensor) -> Tensor:
    """Column means [..., m] over the last column's, from [..., n, m + 1]."""
    means = both.mean(-2)
    return means[..., :-1] / means[..., -1:]


SIGNIFICANT_BITS = 16
"""Of each attribution that count: five digits, where float32 has seven."""


def significant(maps: Tensor) -> Tensor:
    """Rounds every attribution to ``SIGNIFICANT_BITS`` significant bits.

    Maps of tokens are interpolated, so they have whole regions of one value, whose last bits depend
    on how the model's batch was rounded. Comparing fewer digits makes them ties, to be broken on
    purpose, instead of an order that changes with the batch size. A value can still lie so close to
    where rounding turns that its last bits decide, which is rare and concerns neighbors only.
    """
    mantissa, exponent = torch.frexp(wide(maps))
    scale = 2.0**SIGNIFICANT_BITS
    return torch.ldexp((mantissa * scale).round() / scale, exponent)

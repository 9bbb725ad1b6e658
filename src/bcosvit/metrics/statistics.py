"""Statistics that all metrics share: intervals for means, and when two attributions are equal.

Intervals come from resampling what was measured independently (images, or whole grids).

Resampling needs no assumption about the scores, which are bounded and often far from normal. The
same function serves ratios of two means, which is what a normalized curve and its area are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


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
        count = len(values)
        if not count:
            raise ValueError("There is nothing to average: give at least one measurement.")
        values = values.to("cpu", torch.float64)
        per = torch.ones(count) if per is None else per
        both = torch.cat([values, per.to("cpu", torch.float64).unsqueeze(1)], 1)
        if not both.isfinite().all():
            raise ValueError("The measurements contain NaN or infinity; every one must be finite.")
        generator = torch.Generator().manual_seed(self.seed)
        step = max(1, AT_ONCE // (count * both.shape[1]))
        means = []
        for first in range(0, self.samples, step):
            shape = (min(step, self.samples - first), count)
            means.append(_ratio(both[torch.randint(count, shape, generator=generator)]))
        tail = (1 - self.level) / 2
        ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
        low, high = torch.cat(means).quantile(ends, dim=0).tolist()
        return [
            Estimate(mean=mean, low=a, high=b, count=count)
            for mean, a, b in zip(_ratio(both).tolist(), low, high, strict=True)
        ]


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

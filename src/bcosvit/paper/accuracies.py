"""What the figures about accuracy share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bcosvit.metrics import Estimate
from bcosvit.paper.charts import Chart, grouped_bars
from bcosvit.paper.figure import Row, columns
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled, sampled
from bcosvit.paper.spec import RunSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Top1:
    """The accuracy of one configuration, over its seeds."""

    spec: RunSpec
    mean: Sampled
    """Resampled over pictures; the same pictures for every configuration."""
    by_seed: Mapping[int, float]

    @property
    def spread(self) -> float | None:
        """Standard deviation between seeds; None with one."""
        values = torch.tensor(list(self.by_seed.values()), dtype=torch.float64)
        return float(values.std()) if len(values) > 1 else None


def top1(lab: Lab, spec: RunSpec) -> Top1 | None:
    """Over the seeds that there are; None where there is none."""
    by_seed = {}
    for seeded in spec.seeded(lab.study.seeds):
        if (found := lab.measure(seeded, "accuracy")) is not None:
            by_seed[seeded.seed] = torch.tensor([int(digit) for digit in found["correct"]])
    if not by_seed:
        return None
    each = torch.stack(list(by_seed.values())).double()
    return Top1(
        spec=spec,
        mean=sampled(each.mean(0).tolist()),
        by_seed={seed: float(one.double().mean()) for seed, one in by_seed.items()},
    )


def accuracy_row(found: Top1, **labels: object) -> Row:
    """For the table."""
    return {
        "model": found.spec.model,
        **labels,
        **columns(found.mean, "top-1"),
        "pictures": found.mean.count,
        "seeds": len(found.by_seed),
        "seed deviation": found.spread,
    }


def accuracy_chart(
    name: str, caption: str, groups: Mapping[str, Mapping[str, Top1]]
) -> Sequence[Chart]:
    """Top-1 in per cent by group and series; none where nothing was measured."""
    shown = {
        group: {key: _percent(found.mean.estimate()) for key, found in bars.items()}
        for group, bars in groups.items()
        if bars
    }
    return [grouped_bars(name, caption, "top-1 accuracy, %", shown)] if shown else []


def _percent(share: Estimate) -> Estimate:
    return Estimate(
        mean=100 * share.mean, low=100 * share.low, high=100 * share.high, count=share.count
    )

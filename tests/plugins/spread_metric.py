"""A metric of another package: the share of pixels that carry half of a map."""

from dataclasses import asdict, dataclass

import torch

from bcosvit.metrics import BarChart, Metric, MetricResult, register_metric


@register_metric("spread")
@dataclass(frozen=True, kw_only=True)
class Spread(Metric):
    """How many pixels it takes to collect half of the absolute attribution."""

    title = "Spread of the map"
    images: int = 5

    def select(self, predictions):
        return [(prediction,) for prediction in predictions[: self.images]]

    def score(self, batch):
        return {method: half_share(each) for method, each in batch.maps.items()}

    def result(self, items, scores, bootstrap, left_out=0):
        means = {method: bootstrap.mean(each) for method, each in scores.items()}
        return SpreadResult(items=items, scores=scores, means=means)


def half_share(maps):
    ordered = maps.abs().flatten(1).sort(1, descending=True).values.double()
    whole = ordered.sum(1, keepdim=True).clamp(min=1e-30)
    return (ordered.cumsum(1) < 0.5 * whole).double().mean(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpreadResult(MetricResult):
    items: list
    scores: dict
    means: dict

    def about(self):
        return f"The share of pixels that carry half of the map, on {len(self.items)} images."

    def rows(self):
        for method, each in self.scores.items():
            for (image,), value in zip(self.items, each.tolist(), strict=True):
                yield {"key": image.key, "method": method, "spread": value}

    def summary(self):
        return {"spread": {method: asdict(mean) for method, mean in self.means.items()}}

    def columns(self):
        return {"Pixels for half": self.means}

    def charts(self):
        return [BarChart(name="spread", axis="share of pixels", values=self.means)]


assert torch.is_tensor(half_share(torch.rand(1, 2, 2)))

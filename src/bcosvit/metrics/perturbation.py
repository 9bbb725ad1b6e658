"""Pixel perturbation: does the model miss what an attribution calls important?

Pixels are zeroed in the model's own encoding (a zero vector is not a color, so nothing is painted
in their place), most important first and least important first, and the confidence in the true
class is followed. The area between the two curves (ABC) says how much the order knows.

Pixels are ranked once an image and method. A perturbed picture is then one comparison of ranks
with two bounds, so that all versions of many images are made as they are needed, in batches that
are always full, and the unperturbed start is shared by all methods and both orders.

Letters: M methods, B images, n pixels, P points of a curve.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bcosvit.metrics.accuracy import most_confident
from bcosvit.metrics.base import (
    BarChart,
    Chart,
    CurveChart,
    ExplainedBatch,
    FromEncoded,
    Item,
    Metric,
    MetricResult,
    Prediction,
    register_metric,
)
from bcosvit.metrics.statistics import Bootstrap, Estimate, significant
from bcosvit.models.base import AnyModel
from bcosvit.predictor import confidence

ORDERS = ("most", "least")
"""Which pixels go first; the axis of that length in curves."""


def removal_places(maps: Tensor, shuffles: Tensor) -> Tensor:
    """Returns each pixel's place [..., n] in the order of falling attribution.

    Args:
        maps: Attributions [..., n].
        shuffles: Permutations [..., n], the order of pixels that are equal (see `significant`).
    """
    order = significant(maps).gather(-1, shuffles).argsort(stable=True, descending=True)
    order = shuffles.gather(-1, order)
    place = torch.arange(maps.shape[-1], device=maps.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def area_between(curves: Tensor, share: float) -> Tensor:
    """From curves [..., 2, P] over [0, ``share``] to the area [...] of least over most."""
    gap = curves[..., 1, :] - curves[..., 0, :]
    return torch.trapezoid(gap, dx=share / (curves.shape[-1] - 1))


@torch.no_grad()
def confidence_curves(
    model: AnyModel,
    images: Tensor,
    labels: Tensor,
    places: Tensor,
    removed: Sequence[int],
    batch_size: int,
    from_encoded: FromEncoded | None = None,
) -> Tensor:
    """Confidences [M, B, 2, P] in ``labels`` [B] with so many pixels ``removed`` (P, from 0 up).

    ``places`` [M, B, n] are the methods' ``removal_places``.
    """
    encoded = model.encoding(images)
    methods, samples, pixels = places.shape
    counts = torch.tensor(removed[1:], device=places.device)
    # A version keeps the places from `first` up to `end`.
    first = torch.cat([counts, torch.zeros_like(counts)]).unsqueeze(1)
    end = torch.cat([torch.full_like(counts, pixels), pixels - counts]).unsqueeze(1)

    def sure(inputs: Tensor, sample: Tensor) -> Tensor:
        all_ = confidence(model, (from_encoded or model.from_encoded)(inputs))
        return all_.gather(1, labels[sample].unsqueeze(1)).squeeze(1)

    every = torch.arange(samples, device=places.device)
    start = torch.cat([sure(encoded[some], some) for some in every.split(batch_size)])
    shape = (methods, samples, len(first))
    below = []
    jobs = torch.arange(methods * samples * len(first), device=places.device)
    for some in jobs.split(batch_size):
        method, sample, version = torch.unravel_index(some, shape)
        place = places[method, sample]
        kept = (place >= first[version]) & (place < end[version])
        inputs = encoded[sample].mul_(kept.view(-1, 1, *encoded.shape[-2:]))
        below.append(sure(inputs, sample))
    curves = torch.cat(below).view(methods, samples, 2, -1)
    return torch.cat([start.view(1, -1, 1, 1).expand(methods, -1, 2, 1), curves], 3)


@register_metric("perturbation")
@dataclass(frozen=True, kw_only=True)
class PixelPerturbation(Metric):
    """The area between the curves of confidence as pixels are removed (Sec. 4 of the paper)."""

    title = "Pixel perturbation"

    images: int = 250
    """How many of the most confident correct images; fewer where there are fewer."""
    share: float = 0.25
    """Of the pixels, zeroed at the end of a curve."""
    points: int = 9
    """Of a curve, equidistant, both ends included."""
    seed: int = 0
    """Ties are broken by a shuffle that follows from this and the image's key alone."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images = {self.images} is not allowed: give an integer >= 1.")
        if self.points < 2:
            raise ValueError(f"points = {self.points} is not allowed: give an integer >= 2.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} is not allowed: give a share above 0, up to 1.")

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the pixels removed, at each point."""
        return tuple(self.share * point / (self.points - 1) for point in range(self.points))

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes the most confident correctly classified images."""
        return [(prediction,) for prediction in most_confident(predictions)[: self.images]]

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns the confidences [N, 2, P] by method."""
        pixels = batch.images.shape[-2] * batch.images.shape[-1]
        shuffles = torch.stack([self._shuffle(key, pixels) for key in batch.keys])
        shuffles = shuffles.to(batch.images.device)
        places = torch.stack(
            [removal_places(each.flatten(1), shuffles) for each in batch.maps.values()]
        )
        curves = confidence_curves(
            batch.model,
            batch.images,
            batch.labels,
            places,
            [round(share * pixels) for share in self.shares],
            batch.batch_size,
            batch.from_encoded,
        )
        return dict(zip(batch.maps, curves, strict=True))

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "PerturbationResult":
        curves, abc = {}, {}
        for method, each in scores.items():
            # Both curves are linear in the images' confidences, but for the one division.
            start = each[:, 0, 0]
            curves[method] = {
                order: bootstrap.means(each[:, i], start) for i, order in enumerate(ORDERS)
            }
            abc[method] = bootstrap.mean(area_between(each, self.share), start)
        return PerturbationResult(
            metric=self,
            images=tuple(image for (image,) in items),
            confidences=dict(scores),
            curves=curves,
            abc=abc,
        )

    def _shuffle(self, key: str, pixels: int) -> Tensor:
        text = f"{self.seed} {key}".encode("utf-8", "surrogatepass")
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randperm(pixels, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbationResult(MetricResult):
    """The result of a pixel perturbation."""

    metric: PixelPerturbation
    images: tuple[Prediction, ...]
    """Those that were perturbed."""
    confidences: dict[str, Tensor]
    """By method [B, 2, P], not normalized; the middle axis is ``ORDERS``."""
    curves: dict[str, dict[str, list[Estimate]]]
    """By method and order: the mean confidence at each point, divided by the mean start."""
    abc: dict[str, Estimate]
    """By method: the area between those two curves, images resampled."""

    def about(self) -> str:
        return (
            f"Up to {self.metric.share:.0%} of the pixels are zeroed in the model's own encoding, "
            f"in the order of their attribution, in the {len(self.images)} most confident correct "
            f"images of {self.metric.images} asked for. Confidence in the true class, relative to "
            f"its start, should fall when the most important pixels are removed first, and stay "
            f"when the least important ones are: the area between the two curves (ABC) measures "
            f"both."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        for method, each in self.confidences.items():
            area = area_between(each, self.metric.share) / each[:, 0, 0]
            for number, image in enumerate(self.images):
                row: dict[str, Any] = {
                    "index": image.index,
                    "key": image.key,
                    "label": image.label,
                    "method": method,
                    "abc": float(area[number]),
                }
                for i, order in enumerate(ORDERS):
                    for share, value in zip(
                        self.metric.shares, each[number, i].tolist(), strict=True
                    ):
                        row[f"{order} {share:.5g}"] = value
                yield row

    def summary(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "asked": self.metric.images,
            "shares": list(self.metric.shares),
            "abc": {method: asdict(area) for method, area in self.abc.items()},
            "curves": {
                method: {
                    order: [asdict(point) for point in points] for order, points in both.items()
                }
                for method, both in self.curves.items()
            },
        }

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        return {"Perturbation (ABC)": self.abc}

    def samples(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        return {
            method: (area_between(each, self.metric.share), each[:, 0, 0])
            for method, each in self.confidences.items()
        }

    def charts(self) -> list[Chart]:
        if not self.images:
            return []
        titles = {
            "most": "The most important pixels are removed first",
            "least": "The least important pixels are removed first",
        }
        curves = [
            CurveChart(
                name=f"curves-{order}",
                title=titles[order],
                x_axis="pixels removed, %",
                y_axis="relative confidence",
                positions=[100 * share for share in self.metric.shares],
                curves={method: both[order] for method, both in self.curves.items()},
            )
            for order in ORDERS
        ]
        return [*curves, BarChart(name="abc", axis="area between the curves", values=self.abc)]

"""Pixel perturbation: does the model miss what an attribution calls important?

By default, pixels are zeroed in the model's own encoding (a zero vector is not a color, so nothing
is painted in their place), most important first and least important first, and the confidence in
the true class is followed. The area between the two curves (ABC) says how much the order knows.

Pixels are ranked once per image and method. A perturbed picture is then one comparison of ranks
with two bounds, so that all versions of many images are made as they are needed, in batches that
are always full, and the unperturbed start is shared by all methods and both orders.

Letters: M methods, B images, n pixels, P points of a curve.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bcosvit.messages import unknown
from bcosvit.metrics.base import (
    BarChart,
    Chart,
    CurveChart,
    ExplainedBatch,
    FromEncoded,
    Item,
    Metric,
    MetricResult,
    NotDefinedError,
    Prediction,
    image_rows,
    register_metric,
)
from bcosvit.metrics.removal import (
    check_min_confidence,
    check_removal,
    check_smooth,
    most_confident_items,
    region_pixels,
    region_sums,
    replacement,
    smoothed,
)
from bcosvit.metrics.statistics import Bootstrap, Estimate, significant
from bcosvit.models.base import AnyModel
from bcosvit.predictor import confidence

ORDERS = ("most", "least")
"""Which pixels go first; the axis of that length in curves."""
OUTPUTS = ("probability", "logit")
"""What is followed, of the true class: its probability or its logit."""


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
    *,
    removal: str = "zero",
    region: int = 1,
) -> Tensor:
    """Computes the curves of several methods.

    Args:
        model: The model.
        images: RGB in [0, 1], [B, 3, H, W].
        labels: The classes that are followed [B].
        places: The methods' ``removal_places`` [M, B, n].
        removed: How many regions are removed at each point (P, from 0 up).
        batch_size: How many images pass through the model at once.
        from_encoded: A faster way to do what the model's ``from_encoded`` does.
        removal: What takes the place of removed pixels, one of ``REMOVALS``.
        region: The side of the squares that are removed, in pixels.

    Returns:
        [M, B, 2, P, 2]; the axes of length 2 are ``ORDERS`` and ``OUTPUTS``.
    """
    encoded = model.encoding(images)
    instead = replacement(model, images, removal)
    height, width = encoded.shape[-2:]
    methods, samples, pixels = places.shape
    counts = torch.tensor(removed[1:], device=places.device)
    # A version keeps the places from `first` up to `end`.
    first = torch.cat([counts, torch.zeros_like(counts)]).unsqueeze(1)
    end = torch.cat([torch.full_like(counts, pixels), pixels - counts]).unsqueeze(1)

    def sure(inputs: Tensor, sample: Tensor) -> Tensor:
        logits = (from_encoded or model.from_encoded)(inputs)
        both = torch.stack([confidence(model, logits).double(), logits.double()], 2)
        return both[torch.arange(len(sample), device=both.device), labels[sample]]

    every = torch.arange(samples, device=places.device)
    start = torch.cat([sure(encoded[some], some) for some in every.split(batch_size)])
    shape = (methods, samples, len(first))
    below = []
    jobs = torch.arange(methods * samples * len(first), device=places.device)
    for some in jobs.split(batch_size):
        method, sample, version = torch.unravel_index(some, shape)
        place = places[method, sample]
        kept = (place >= first[version]) & (place < end[version])
        rows = kept.view(len(some), -(-height // region), -1)
        mask = region_pixels(rows, region, height, width).unsqueeze(1)
        if instead is None:
            inputs = encoded[sample].mul_(mask)
        else:
            inputs = torch.where(mask, encoded[sample], instead[sample])
        below.append(sure(inputs, sample))
    curves = torch.cat(below).view(methods, samples, 2, -1, len(OUTPUTS))
    first_point = start.view(1, samples, 1, 1, -1).expand(methods, -1, 2, -1, -1)
    return torch.cat([first_point, curves], 3)


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
    smooth: int = 1
    """Maps are averaged over squares of so many pixels before pixels are ranked; 1 does nothing."""
    min_confidence: float = 0.0
    """Images in whose class the model is less confident are left out."""
    removal: str = "zero"
    """What takes the place of removed pixels: "zero", "black", "mean" or "blur" (``REMOVALS``)."""
    output: str = "probability"
    """What is followed: "probability" or "logit" of the true class."""
    region: int = 1
    """The side of the squares that are removed at once, in pixels."""

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images = {self.images} is not allowed: give an integer >= 1.")
        if self.points < 2:
            raise ValueError(f"points = {self.points} is not allowed: give an integer >= 2.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} is not allowed: give a share above 0, up to 1.")
        if self.region < 1:
            raise ValueError(f"region = {self.region} is not allowed: give an integer >= 1.")
        if self.output not in OUTPUTS:
            raise ValueError(unknown("output", self.output, OUTPUTS))
        check_smooth(self.smooth)
        check_min_confidence(self.min_confidence)
        check_removal(self.removal)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the pixels removed, at each point."""
        return tuple(self.share * point / (self.points - 1) for point in range(self.points))

    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Takes the most confident correctly classified images."""
        return most_confident_items(predictions, self.images, self.min_confidence)

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Returns the confidences (or logits) [N, 2, P] by method."""
        # Both outputs come from one pass, and which images are chosen does not change it.
        alike = dataclasses.replace(self, output=OUTPUTS[0], min_confidence=0.0, images=1)
        key = (type(self), alike, tuple(batch.keys))
        if key not in batch.shared:
            batch.shared[key] = self._curves(batch)
        curves = batch.shared[key][..., OUTPUTS.index(self.output)]
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
            if start.mean() <= 0:
                raise NotDefinedError(
                    f"The mean {self.output} of the images is {start.mean():.3g} before anything "
                    f"is removed, so that nothing can be relative to it; set min_confidence=0.5."
                )
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

    def _curves(self, batch: ExplainedBatch) -> Tensor:
        """The curves of all methods and outputs [M, N, 2, P, 2]."""
        maps = [
            region_sums(smoothed(each, self.smooth), self.region).flatten(1)
            for each in batch.maps.values()
        ]
        regions = maps[0].shape[1]
        shuffles = torch.stack([self._shuffle(key, regions) for key in batch.keys])
        shuffles = shuffles.to(batch.images.device)
        places = torch.stack([removal_places(each, shuffles) for each in maps])
        return confidence_curves(
            batch.model,
            batch.images,
            batch.labels,
            places,
            [round(share * regions) for share in self.shares],
            batch.batch_size,
            batch.from_encoded,
            removal=self.removal,
            region=self.region,
        )

    def _shuffle(self, key: str, pixels: int) -> Tensor:
        text = f"{self.seed} {key}".encode("utf-8", "surrogatepass")
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randperm(pixels, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbationResult(MetricResult):
    """The result of a pixel perturbation."""

    chart_prefix: ClassVar[str] = ""
    """Of the names of charts, which are unique in a report."""

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
        metric = self.metric
        what = "pixels" if metric.region == 1 else f"squares of {metric.region}×{metric.region} px"
        how = {
            "zero": "zeroed in the model's own encoding",
            "black": "made black",
            "mean": "replaced by the mean color of their image",
            "blur": "replaced by a blurred copy of their image",
        }
        followed = "Confidence in" if metric.output == "probability" else "The logit of"
        order = f", averaged over {metric.smooth}×{metric.smooth} px" if metric.smooth > 1 else ""
        least = f" of at least {metric.min_confidence:.0%} confidence" * (metric.min_confidence > 0)
        return (
            f"Up to {metric.share:.0%} of the {what} are {how[metric.removal]}, in the order of "
            f"their attribution{order}, in the {len(self.images)} most confident correct images"
            f"{least} of {metric.images} asked for. {followed} the true class, relative to its "
            f"start, should fall when the most important {what} are removed first, and stay when "
            f"the least important ones are: the area between the two curves (ABC) measures both."
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        points = [f"{order} {share:.5g}" for order in ORDERS for share in self.metric.shares]
        values = {}
        for method, each in self.confidences.items():
            area = area_between(each, self.metric.share) / each[:, 0, 0]
            values[method] = torch.cat([area.unsqueeze(1), each.flatten(1)], 1)
        return image_rows(self.images, ["abc", *points], values)

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
        what = "pixels" if self.metric.region == 1 else "regions"
        titles = {order: f"The {order} important {what} are removed first" for order in ORDERS}
        followed = "confidence" if self.metric.output == "probability" else "logit"
        curves = [
            CurveChart(
                name=f"{self.chart_prefix}curves-{order}",
                title=titles[order],
                x_axis=f"{what} removed, %",
                y_axis=f"relative {followed}",
                positions=[100 * share for share in self.metric.shares],
                curves={method: both[order] for method, both in self.curves.items()},
            )
            for order in ORDERS
        ]
        return [
            *curves,
            BarChart(
                name=f"{self.chart_prefix}abc", axis="area between the curves", values=self.abc
            ),
        ]


@register_metric("deletion_insertion")
@dataclass(frozen=True, kw_only=True)
class DeletionInsertion(PixelPerturbation):
    """Deletion and insertion: the areas under the curves of confidence over all pixels.

    Deletion removes all pixels, the most important first; its area should be small. Insertion
    starts without any pixel and puts the most important back first; its area should be large. That
    is the removal of the least important first, read backwards (Petsiuk et al., BMVC 2018).
    """

    title = "Deletion and insertion"
    default = False

    share: float = 1.0
    points: int = 17
    removal: str = "blur"

    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> "DeletionInsertionResult":
        found = super().result(items, scores, bootstrap, left_out)
        areas = {
            method: dict(
                zip(
                    ("deletion", "insertion"),
                    bootstrap.means(torch.trapezoid(each, dx=self.share / (self.points - 1))),
                    strict=True,
                )
            )
            for method, each in scores.items()
        }
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return DeletionInsertionResult(**fields, areas=areas)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeletionInsertionResult(PerturbationResult):
    """The result of deletion and insertion."""

    chart_prefix = "deletion-insertion-"

    areas: dict[str, dict[str, Estimate]]
    """By method: the areas of ``deletion`` and ``insertion``, not relative to the start."""

    def about(self) -> str:
        return super().about() + (
            " Insertion is the area under the curve of the least important first, from right to "
            "left; deletion is the area under that of the most important first."
        )

    def summary(self) -> dict[str, Any]:
        found = super().summary()
        for name in ("deletion", "insertion"):
            found[name] = {method: asdict(both[name]) for method, both in self.areas.items()}
        return found

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        return {
            "Insertion": {method: both["insertion"] for method, both in self.areas.items()},
            "Insertion − deletion": self.abc,
        }

"""Pixel perturbation (SPEC 5.2): does the model miss what an attribution calls important?

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

from bcosvit.metrics.accuracy import FromEncoded, Prediction, most_confident
from bcosvit.metrics.bootstrap import Bootstrap, Estimate
from bcosvit.metrics.ties import significant
from bcosvit.models.base import AnyModel
from bcosvit.predictor import confidence

ORDERS = ("most", "least")
"""Which pixels go first; the axis of that length in curves."""


def removal_places(maps: Tensor, shuffles: Tensor) -> Tensor:
    """Each pixel's place [..., n] in the order of falling attribution, from maps [..., n].

    Pixels that are equal to five digits (see ``ties``) are taken in the order in which ``shuffles``
    [..., n], permutations, name them.
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


@dataclass(frozen=True, kw_only=True)
class PixelPerturbation:
    """Which images are perturbed, how far, and in what order pixels of equal attribution go."""

    images: int = 250
    """The surest correct ones; fewer where there are fewer."""
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

    def select(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The most confident correctly classified images."""
        return most_confident(predictions)[: self.images]

    def curves(
        self,
        model: AnyModel,
        images: Tensor,
        labels: Tensor,
        keys: Sequence[str],
        maps: Mapping[str, Tensor],
        batch_size: int,
        from_encoded: FromEncoded | None = None,
    ) -> dict[str, Tensor]:
        """Every method's confidences [B, 2, P] on images [B, 3, H, W] from its maps [B, H, W];
        ``from_encoded`` may be a faster way to do what the model's does."""
        pixels = images.shape[-2] * images.shape[-1]
        shuffles = torch.stack([self._shuffle(key, pixels) for key in keys]).to(images.device)
        places = torch.stack([removal_places(each.flatten(1), shuffles) for each in maps.values()])
        removed = [round(share * pixels) for share in self.shares]
        curves = confidence_curves(model, images, labels, places, removed, batch_size, from_encoded)
        return dict(zip(maps, curves, strict=True))

    def _shuffle(self, key: str, pixels: int) -> Tensor:
        text = f"{self.seed} {key}".encode("utf-8", "surrogatepass")
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.randperm(pixels, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True, eq=False)
class Perturbation:
    """The outcome of a pixel perturbation."""

    metric: PixelPerturbation
    images: tuple[Prediction, ...]
    """Those actually perturbed."""
    confidences: dict[str, Tensor]
    """By method [B, 2, P], not normalized; the middle axis is ``ORDERS``."""
    curves: dict[str, dict[str, list[Estimate]]]
    """By method and order: the mean confidence at each point, divided by the mean start."""
    abc: dict[str, Estimate]
    """By method: the area between those two curves, images resampled."""

    @classmethod
    def of(
        cls,
        metric: PixelPerturbation,
        images: Sequence[Prediction],
        confidences: dict[str, Tensor],
        bootstrap: Bootstrap,
    ) -> "Perturbation":
        curves, abc = {}, {}
        for method, each in confidences.items():
            # Both curves are linear in the images' confidences, but for the one division.
            start = each[:, 0, 0]
            curves[method] = {
                order: bootstrap.means(each[:, i], start) for i, order in enumerate(ORDERS)
            }
            abc[method] = bootstrap.mean(area_between(each, metric.share), start)
        return cls(
            metric=metric, images=tuple(images), confidences=confidences, curves=curves, abc=abc
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """One an image and method: its own curves, and its own area divided by its own start."""
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

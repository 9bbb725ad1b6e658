"""Suspicions: cues on which a class depends, ranked by what was measured when they were moved.

A cue is a cluster of cells, the edge of the pictures, or their cast of color. It is tested by two
interventions, each beside its control:

* **Transfer**: the cue is copied from a picture of the class onto pictures of other classes. If the
  model then predicts the class, the cue alone is enough. A cluster transfers only a few cells (5 %
  of the picture, drawn at random where it has more), and the control copies as many of the
  picture's other cells, the strongest ones: parts of an object are about as good as each other, a
  cue is better than all of them. For edge and color, the control is the same transfer from pictures
  of other classes.
* **Removal**: the cue's cells are set to zero in the encoded picture, which is nothing to a B-cos
  model; the edge too; a cast of color is replaced by the mean colors of the data. If the model does
  not predict the class any more, it needed the cue. The control removes as many other cells, or
  edge and cast of pictures of other classes.

The p-value is that of an exact permutation test of the transfer (the signs of the differences from
the control are flipped), corrected for all candidates by Holm's method. A suspicion is called
significant if the corrected p-value is below 0.05 and the effect is large, too: the transfer turns
at least 40 % more of the pictures than the control does, with the lower end of the 95 % interval
above 25 %. Small effects are everywhere and would be false alarms.
Of casts of color 60 % and 40 % are asked, since colors say something about many objects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcosvit.auditing.clusters import ClassEvidence, Cluster
from bcosvit.auditing.evidence import Array, Evidence, Progress
from bcosvit.metrics.loader import Images
from bcosvit.models.base import AnyModel
from bcosvit.predictor import Predictor

AREA = 0.05
"""The share of a picture's cells that is transferred or removed at most."""
EDGE = 1 / 16
"""The width of the edge, as a share of the side."""
LEAST = {"cells": (0.40, 0.25), "edge": (0.40, 0.25), "color": (0.60, 0.40)}
"""The smallest effect that is called significant, and the smallest lower end of its interval."""
ALPHA = 0.05
DRAWS = 2000
"""Of intervals."""
FEW = 12
"""Transfers after which a candidate without any effect is given up."""
PER_CLASS = 5
"""Clusters of a class that are tested, those with the largest shares."""
SMALLEST_SHARE = 0.02
SMALLEST_COUNT = 5
"""Clusters with less evidence or in fewer correct pictures are not tested."""

KINDS = {"cells": "Cells that look alike", "edge": "Edge of the picture", "color": "Cast of color"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A cue that may be suspicious."""

    label: int
    kind: str
    """A key of ``KINDS``."""
    cluster: Cluster | None = None

    @property
    def name(self) -> str:
        return self.cluster.name if self.cluster is not None else f"{self.label}.{self.kind}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Suspicion:
    """A cue and what was measured about it."""

    candidate: Candidate
    class_name: str
    pictures: int
    """Pictures of the class with the cue."""
    class_pictures: int
    """Pictures of the class."""
    share: float | None
    """Of the class's positive evidence; None for a cast of color, which is no place."""
    transfers: int
    turned: float
    """The share of other classes' pictures that become the class when the cue is copied there."""
    turned_control: float
    low: float
    """The ends of the 95 % interval of ``turned − turned_control``."""
    high: float
    removals: int
    lost: float
    """The share of pictures that are not classified as the class once the cue is removed."""
    lost_control: float
    becomes: tuple[tuple[str, float], ...]
    """What the pictures are then, most often first."""
    accuracy_with: float
    """Of the class's pictures that have the cue."""
    accuracy_without: float | None
    """Of the class's pictures that do not have it; None where there are none."""
    p: float
    """Of the permutation test, before correction."""
    p_corrected: float = 1.0
    complete: bool = True
    """Whether all transfers were made; a candidate without effect is given up after a few."""
    affected: tuple[tuple[int, float], ...] = ()
    """Pictures and by how much the logit of the class falls without the cue, the most first."""

    @property
    def effect(self) -> float:
        return self.turned - self.turned_control

    @property
    def score(self) -> float:
        """What suspicions are ranked by: the effect of the transfer, relative to the smallest that
        is called significant, and half of that of the removal."""
        transferred = self.effect / LEAST[self.candidate.kind][0]
        return transferred + max(0.0, self.lost - self.lost_control) / 2

    @property
    def significant(self) -> bool:
        effect, low = LEAST[self.candidate.kind]
        return self.p_corrected < ALPHA and self.effect >= effect and self.low >= low

    @property
    def reasons(self) -> list[str]:
        """What speaks for the cue being a shortcut, in words."""
        cluster, found = self.candidate.cluster, []
        if self.share is not None and self.share >= 0.25:
            found.append(f"carries {_percent(self.share)} of the class's positive evidence")
        if self.pictures <= 0.25 * self.class_pictures:
            among = _percent(self.pictures / self.class_pictures)
            found.append(f"is in few of the class's pictures ({among})")
        if cluster is not None and cluster.dense and cluster.spread < 0.6:
            found.append("looks nearly the same in all of its pictures")
        if cluster is not None and cluster.off_object is not None and cluster.off_object > 0.5:
            found.append(f"lies beside the object ({_percent(cluster.off_object)} of its area)")
        if cluster is not None and cluster.elsewhere > 0.5:
            found.append("looks like cells of other classes")
        without = self.accuracy_without
        if without is not None and self.accuracy_with - without >= 0.1:
            found.append(
                f"where it is absent the class is recognized less often ({_percent(without)} "
                f"instead of {_percent(self.accuracy_with)})"
            )
        if self.effect >= LEAST[self.candidate.kind][0]:
            found.append("is enough by itself: other pictures become the class with it")
        if self.lost - self.lost_control >= 0.1:
            found.append(
                f"is needed: {_percent(self.lost)} of its pictures are not recognized without it, "
                f"and {_percent(self.lost_control)} in the control"
            )
        return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Bench:
    """What interventions need."""

    model: AnyModel
    pictures: Images
    evidence: Evidence
    batch_size: int
    known_colors: dict[int, Array]
    """Mean and standard deviation of pictures' colors [6], so that each is read once."""
    mean: Tensor
    """Mean and standard deviation of the data's colors [2, 3]."""

    def colors(self, numbers: Array) -> Array:
        """Mean and standard deviation of pictures' colors [n, 6]."""
        for number in numbers.tolist():
            if number not in self.known_colors:
                colors = _colors(self.images(np.array([number])))[0]
                self.known_colors[number] = colors.cpu().double().numpy().ravel()
        return np.stack([self.known_colors[number] for number in numbers.tolist()])

    def images(self, numbers: Array) -> Tensor:
        reference = next(self.model.parameters())
        return torch.stack(
            [self.pictures[int(self.evidence.index[number])][0] for number in numbers]
        ).to(reference)

    @torch.no_grad()
    def logits(self, images: Tensor, gone: Tensor | None = None) -> Tensor:
        """Logits on the CPU; ``gone`` [B, H, W] are pixels that become zero when encoded."""
        found = []
        for start in range(0, len(images), self.batch_size):
            part = slice(start, start + self.batch_size)
            encoded = self.model.encoding(images[part])
            if gone is not None:
                encoded = encoded * (~gone[part])[:, None]
            found.append(self.model.from_encoded(encoded).float().cpu())
        return torch.cat(found)


def find_suspicions(
    predictor: Predictor,
    pictures: Images,
    evidence: Evidence,
    classes: Sequence[ClassEvidence],
    *,
    pairs: int = 48,
    tests: int = 2000,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Suspicion]:
    """Tests what classes depend on.

    Args:
        predictor: The model.
        pictures: The data of the evidence.
        evidence: The store.
        classes: What its classes are made of.
        pairs: Transfers per candidate.
        tests: How many candidates are tested at most. Each class has up to seven; where they are
            too many, the first ones of all classes come before the second ones of any.
        batch_size: How many pictures pass through the model at once.
        seed: Of the choice of pictures and of the intervals.
        progress: A function that is called after each candidate.

    Returns:
        All candidates that were tested, the most suspicious first.
    """
    bench = _Bench(
        model=predictor.model,
        pictures=pictures,
        evidence=evidence,
        batch_size=batch_size,
        known_colors={},
        mean=_mean_colors(pictures, evidence, seed).to(next(predictor.model.parameters())),
    )
    candidates = _candidates(evidence, classes)
    by_class = {each.label: each for each in classes}
    found = []
    for number, (place, candidate) in enumerate(candidates[:tests]):
        # A seed for each, so that one test does not depend on the others.
        random = np.random.default_rng([seed, candidate.label, place])
        measured = _measure(bench, candidate, by_class[candidate.label], pairs, random)
        if measured is not None:
            found.append(measured)
        if progress is not None:
            progress(number + 1, len(candidates[:tests]), "suspicions")
    found = _corrected(found)
    found.sort(key=lambda each: (not each.significant, -each.score, each.candidate.name))
    return [
        replace(each, affected=_affected(bench, each)) if rank < 3 or each.significant else each
        for rank, each in enumerate(found)
    ]


def _candidates(
    evidence: Evidence, classes: Sequence[ClassEvidence]
) -> list[tuple[int, Candidate]]:
    """Candidates with their places within their classes, the first ones of all classes first."""
    found: list[tuple[int, float, Candidate]] = []
    for each in classes:
        able = [
            cluster
            for cluster in each.clusters
            if cluster.share >= SMALLEST_SHARE
            and evidence.correct[cluster.pictures].sum() >= SMALLEST_COUNT
        ]
        # Rare clusters carry little in sum, so evidence per picture counts.
        able.sort(key=lambda c: (-c.mean * each.pictures / len(c.pictures), c.number))
        mine = [
            Candidate(label=each.label, kind="cells", cluster=cluster)
            for cluster in able[:PER_CLASS]
        ]
        mine[1:1] = [Candidate(label=each.label, kind=kind) for kind in ("edge", "color")]
        for place, candidate in enumerate(mine):
            share = 1.0 if candidate.cluster is None else candidate.cluster.share
            found.append((place, -share, candidate))
    found.sort(key=lambda item: item[:2])
    return [(place, candidate) for place, _, candidate in found]


def _measure(
    bench: _Bench, candidate: Candidate, own: ClassEvidence, pairs: int, random: Any
) -> Suspicion | None:
    evidence, label = bench.evidence, candidate.label
    members = np.flatnonzero(evidence.label == label)
    has = members if candidate.cluster is None else candidate.cluster.pictures
    sources = has[evidence.correct[has]]
    others = np.flatnonzero((evidence.label != label) & (evidence.predicted != label))
    others = others[evidence.correct[others]]
    if len(sources) < SMALLEST_COUNT or not len(others):
        return None
    if candidate.kind != "cells":
        # An edge or a cast need not be in all pictures: those in which it is strongest.
        strength = _strength(bench, candidate.kind, sources, others)
        most = max(SMALLEST_COUNT, len(sources) // 10)
        sources = sources[np.argsort(-strength, kind="stable")[:most]]
    sources = random.permutation(sources)[:pairs]
    from_ = sources[np.arange(pairs) % len(sources)]
    onto = random.choice(others, pairs)
    compare = random.choice(others, pairs)
    few = min(FEW, pairs)
    first = _transfer(bench, candidate, from_[:few], onto[:few], compare[:few])
    complete = pairs == few or bool((first[0] - first[1]).mean() > 0.1)
    if complete and pairs > few:
        more = _transfer(bench, candidate, from_[few:], onto[few:], compare[few:])
        turned, control = (np.concatenate(both) for both in zip(first, more, strict=True))
    else:
        turned, control = first
    used = from_[: len(turned)]
    removed = np.unique(used)
    difference = np.array([(turned - control)[used == each].mean() for each in removed])
    lost, lost_control, classes = _removal(bench, candidate, removed, compare[: len(removed)])
    names, counts = np.unique(classes[classes != label], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:3]
    # Pictures that the cue comes from are resampled.
    low, high = _interval(difference, random)
    absent = np.setdiff1d(members, has)
    return Suspicion(
        candidate=candidate,
        class_name=own.name,
        pictures=len(has),
        class_pictures=len(members),
        share=_share(bench, candidate, members),
        transfers=len(turned),
        turned=float(turned.mean()),
        turned_control=float(control.mean()),
        low=low,
        high=high,
        removals=len(removed),
        lost=float(lost.mean()),
        lost_control=float(lost_control.mean()),
        becomes=tuple(
            (evidence.settings.classes[int(names[at])], float(counts[at] / len(classes)))
            for at in order
        ),
        accuracy_with=float(evidence.correct[has].mean()),
        accuracy_without=float(evidence.correct[absent].mean()) if len(absent) else None,
        p=_permutation(turned - control) if complete else 1.0,
        complete=complete,
    )


def _strength(bench: _Bench, kind: str, sources: Array, others: Array, most: int = 200) -> Array:
    """How much of the cue there seems to be in pictures, by which those to copy are chosen."""
    if kind == "edge":
        cells = bench.evidence.cells[sources, 0].astype(np.float64)
        return cells.sum((1, 2)) - cells[:, 1:-1, 1:-1].sum((1, 2))
    # Along the line from the mean colors of other classes to those of the class.
    own, other = bench.colors(sources), bench.colors(others[:: max(1, len(others) // most)])
    scale = other.std(0) + 1e-6
    away = (own - other.mean(0)) / scale
    return away @ away.mean(0)


def _transfer(
    bench: _Bench, candidate: Candidate, from_: Array, onto: Array, compare: Array
) -> tuple[Array, Array]:
    """Whether pictures become the class when the cue is copied there, and in the control."""
    source, target = bench.images(from_), bench.images(onto)
    if candidate.kind == "cells":
        cue, control = (_pixels(each, source) for each in _chosen(bench, candidate, from_))
        images = torch.where(cue[:, None], source, target)
        controls = torch.where(control[:, None], source, target)
    else:
        move = _copy_edge if candidate.kind == "edge" else _copy_color
        images, controls = move(source, target), move(bench.images(compare), target)
    return tuple(  # type: ignore[return-value]
        (bench.logits(each).argmax(1) == candidate.label).double().numpy()
        for each in (images, controls)
    )


def _removal(
    bench: _Bench, candidate: Candidate, numbers: Array, compare: Array
) -> tuple[Array, Array, Array]:
    """Whether pictures lose the class without the cue, and in the control; and what they become."""
    images = bench.images(numbers)
    classes = _without(bench, candidate, images, numbers).argmax(1).numpy()
    lost = (classes != candidate.label).astype(float)
    if candidate.kind == "cells":
        control = _pixels(_chosen(bench, candidate, numbers)[1], images)
        others = bench.logits(images, control).argmax(1).numpy()
        return lost, (others != candidate.label).astype(float), classes
    others = _without(bench, candidate, bench.images(compare), compare).argmax(1).numpy()
    return lost, (others != bench.evidence.label[compare]).astype(float), classes


def _without(bench: _Bench, candidate: Candidate, images: Tensor, numbers: Array) -> Tensor:
    """Logits without the cue."""
    if candidate.kind == "cells":
        return bench.logits(images, _pixels(_chosen(bench, candidate, numbers)[0], images))
    if candidate.kind == "edge":
        return bench.logits(images, _edge(images).expand(len(images), -1, -1))
    return bench.logits(_recolored(images, bench.mean.expand(len(images), -1, -1)))


def _chosen(bench: _Bench, candidate: Candidate, numbers: Array) -> tuple[Tensor, Tensor]:
    """Some of the cue's cells in pictures, and as many other strong ones [B, G, G]."""
    assert candidate.cluster is not None
    evidence, grid = bench.evidence, bench.evidence.settings.grid
    most = max(2, round(AREA * grid**2))
    cue = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
    control = torch.zeros_like(cue)
    for row, number in enumerate(numbers):
        cells = candidate.cluster.cells_of(evidence, number)
        # Not the strongest: those of any object would be better than the others.
        cells = np.random.default_rng([candidate.label, number]).permutation(cells)[:most]
        cue[row, torch.from_numpy(cells)] = True
        strength = evidence.cells[number, 0].ravel().astype(np.float64)
        strength[cells] = -np.inf
        order = np.argsort(-strength, kind="stable")[: len(cells)]
        control[row, torch.from_numpy(order)] = True
    return cue.unflatten(1, (grid, grid)), control.unflatten(1, (grid, grid))


def _pixels(cells: Tensor, images: Tensor) -> Tensor:
    """The pixels [B, H, W] of cells [B, G, G]."""
    grid = cells.shape[-1]
    rows, columns = (torch.arange(side) * grid // side for side in images.shape[-2:])
    return cells[:, rows][:, :, columns].to(images.device)


def _edge(images: Tensor) -> Tensor:
    """The pixels of the edge [1, H, W]."""
    height, width = images.shape[-2:]
    wide = max(1, round(EDGE * min(height, width)))
    mask = torch.ones(1, height, width, dtype=torch.bool, device=images.device)
    mask[:, wide:-wide, wide:-wide] = False
    return mask


def _copy_edge(source: Tensor, target: Tensor) -> Tensor:
    return torch.where(_edge(target)[:, None], source, target)


def _copy_color(source: Tensor, target: Tensor) -> Tensor:
    return _recolored(target, _colors(source))


def _colors(images: Tensor) -> Tensor:
    """Mean and standard deviation by channel [B, 2, 3]."""
    return torch.stack([images.mean((2, 3)), images.std((2, 3))], 1)


def _recolored(images: Tensor, colors: Tensor) -> Tensor:
    """Images with other means and standard deviations of their channels [B, 2, 3]."""
    own = _colors(images)[..., None, None]
    mean, std = colors[:, 0, :, None, None], colors[:, 1, :, None, None]
    return ((images - own[:, 0]) / own[:, 1].clamp_min(1e-4) * std + mean).clamp(0, 1)


def _mean_colors(pictures: Images, evidence: Evidence, seed: int, most: int = 200) -> Tensor:
    """Mean and standard deviation of the colors of some pictures, on average [2, 3]."""
    chosen = np.random.default_rng(seed).permutation(len(evidence))[:most]
    each = [_colors(pictures[int(evidence.index[n])][0][None])[0] for n in np.sort(chosen)]
    return torch.stack(each).mean(0)


def _share(bench: _Bench, candidate: Candidate, members: Array) -> float | None:
    if candidate.cluster is not None:
        return candidate.cluster.share
    if candidate.kind == "color":
        return None
    cells = np.clip(bench.evidence.cells[members, 0].astype(np.float64), 0, None)
    total, inner = cells.sum(), cells[:, 1:-1, 1:-1].sum()
    return float((total - inner) / total) if total else 0.0


def _affected(bench: _Bench, found: Suspicion, most: int = 400) -> tuple[tuple[int, float], ...]:
    """By how much the class's logit falls without the cue, for the pictures that have it."""
    candidate, evidence = found.candidate, bench.evidence
    label = candidate.label
    has = (
        np.flatnonzero(evidence.label == label)
        if candidate.cluster is None
        else candidate.cluster.pictures
    )[:most]
    falls: list[tuple[int, float]] = []
    for start in range(0, len(has), bench.batch_size):
        numbers = has[start : start + bench.batch_size]
        images = bench.images(numbers)
        before = bench.logits(images)[:, label]
        after = _without(bench, candidate, images, numbers)[:, label]
        falls += zip(numbers.tolist(), (before - after).tolist(), strict=True)
    return tuple(sorted(falls, key=lambda item: (-item[1], item[0])))


def _permutation(difference: Array) -> float:
    """The p-value of a mean above zero: the share of all flips of signs with at least this mean.

    Differences are −1, 0 or 1, so that flips are counted by the number of positive ones.
    """
    positive, nonzero = int((difference > 0).sum()), int((difference != 0).sum())
    larger = sum(math.comb(nonzero, count) for count in range(positive, nonzero + 1))
    return larger / 2**nonzero


def _interval(values: Array, random: Any) -> tuple[float, float]:
    """The 95 % interval of a mean, by resampling."""
    draws = values[random.integers(len(values), size=(DRAWS, len(values)))].mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def _corrected(found: Sequence[Suspicion]) -> list[Suspicion]:
    """Holm's correction for all candidates that were tested."""
    order = sorted(range(len(found)), key=lambda at: found[at].p)
    corrected, largest = [1.0] * len(found), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(found) - rank) * found[at].p))
        corrected[at] = largest
    return [replace(each, p_corrected=p) for each, p in zip(found, corrected, strict=True)]

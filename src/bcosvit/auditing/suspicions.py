"""Suspicions: cues on which a class depends, ranked by what was measured when they were moved.

A cue is a cluster of cells, the edge of the pictures, or their cast of color. It is tested by two
interventions, each beside its control:

* **Transfer**: the cue is copied from a picture of the class onto a picture of the class's rival,
  the class that comes next once the cue is removed. If the model then predicts the class, the cue
  alone is enough. A cluster transfers only a few cells (5 % of the picture, at least three, beside
  each other where it has more), and the control copies as many of the picture's other cells, the
  strongest ones outside the cluster (and not beside it, where it repeats: then they may be parts of
  the same thing): parts of an object are about as good as each other, a cue is better than all of
  them. For edge and color, the sources are the pictures of the class that need
  them most, and the control is the same transfer from other pictures of the class that is copied
  onto. Colors are copied onto pictures of all other classes, since two classes often differ by
  them.
* **Removal**: the cue's cells are set to zero in the encoded picture, which is nothing to a B-cos
  model; the edge too; a cast of color is replaced by the data's mean black and white points. If
  the model does not predict the class any more, it needed the cue. The control removes as many
  other cells, or edge and cast of pictures of other classes.

The effect of a transfer is measured on margins (the logit of the class less the largest other one):
how far it moves pictures toward those that the cue comes from, less the control, so that 0 is
nothing and 1 the whole way. The p-value is that of an exact permutation test of these differences
(their signs are flipped; transfers from the same picture count once), corrected for all candidates
by Holm's method. A suspicion is called significant if the corrected p-value is below 0.05, the
effect is large, and the cue repeats like something that was added. Large means that the transfer
turns at least 40 % more of the pictures than the control does, and that the lower end of the
effect's 95 % interval is above 30 % (for casts of color 75 % and 40 %, since many classes depend on
their colors); small effects are everywhere. Repeats means what
`bcosvit.auditing.repeats` measures: a tag is a copy in all of its pictures, while parts of objects,
which may turn other pictures as well, vary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.auditing.clusters import ClassEvidence, Cluster
from bcosvit.auditing.evidence import Array, Evidence, Progress
from bcosvit.auditing.repeats import EDGE, REST, cast_elsewhere, colors, edges_alike, found_again
from bcosvit.metrics.loader import Images
from bcosvit.models.base import AnyModel
from bcosvit.predictor import Predictor

AREA = 0.05
"""The share of a picture's cells that is transferred or removed at most."""
LEAST = {"cells": (0.40, 0.30), "edge": (0.40, 0.30), "color": (0.75, 0.40)}
"""What is called large at least: the share of pictures that the transfer turns, less the control,
and the lower end of the interval of its effect. Of casts more is asked: the photographs of a class
that need their colors most may have nearly the same ones."""
REPEATS = {"cells": 0.2, "edge": 0.9, "color": 0.9}
"""How much a cue must repeat at least. Parts of objects stay below 0.1 as cells, and copies are
above 0.4; clusters may hold both."""
VARYING = 1 / 3
"""What the effect of a cue that does not repeat counts for in the ranking."""
ALPHA = 0.05
DRAWS = 2000
"""Of intervals."""
CONSIDERED = 100
"""Pictures of a class among which those that need their edge or colors most are looked for."""
GIVEN_UP = 0.05
"""The effect below which a candidate is given up after a few transfers."""
LEAST_CELLS = 3
"""Cells that are transferred even if they are more than ``AREA``."""
COMPARED = 96
"""Pictures of other classes that edges and colors are compared with."""
PAIRED = 24
"""Pictures of a cluster of which each pair is compared."""
NEED = 0.5
"""How much an edge or color must be needed by a picture to be copied from there, relative to those
that need it most: not all pictures of the class may have it."""
FEW = 12
"""Transfers after which a candidate without any effect is given up."""
DETAILED = 8
"""Suspicions of which each picture is tested."""
PER_CLASS = 5
"""Clusters of a class that are tested, those with the most evidence per picture."""
SMALLEST_SHARE = 0.005
SMALLEST_COUNT = 5
"""Clusters with less evidence or in fewer correct pictures are not tested."""

KINDS = {"cells": "Cells that look alike", "edge": "Edge of the picture", "color": "Cast of color"}
REPEATING = {
    "cells": "is found again in other pictures nearly to the pixel",
    "edge": "is the same in its pictures",
    "color": "is in the rest of its pictures, too",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A cue that may be suspicious."""

    label: int
    kind: str
    """A key of ``KINDS``."""
    cluster: Cluster | None = None
    beside: bool = False
    """Whether cells beside the cluster's may belong to the cue, too: they are no control."""

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
    effect: float
    """How far the transfer moves pictures toward those that the cue comes from, less the control:
    0 is not at all, and with 1 the class is as clear as there."""
    low: float
    """The ends of the effect's 95 % interval."""
    high: float
    removals: int
    lost: float
    """The share of pictures that are not classified as the class once the cue is removed."""
    lost_control: float
    needed: float
    """How far the removal moves pictures away from the class, on the scale of ``effect``, less the
    control."""
    becomes: tuple[tuple[str, float], ...]
    """What the pictures are then, most often first."""
    accuracy_with: float
    """Of the class's pictures that have the cue."""
    accuracy_without: float | None
    """Of the class's pictures that do not have it; None where there are none."""
    p: float
    """Of the permutation test, before correction."""
    repeats: float
    """How much the cue is the same in its pictures, 0 to 1 (see `bcosvit.auditing.repeats`)."""
    p_corrected: float = 1.0
    complete: bool = True
    """Whether all transfers were made; a candidate without effect is given up after a few."""
    affected: tuple[tuple[int, float], ...] = ()
    """Pictures and by how much the logit of the class falls without the cue, the most first."""

    @property
    def score(self) -> float:
        """What suspicions are ranked by: the effect of the transfer, relative to the smallest that
        is called large for cells; a third of it for a cue that does not repeat."""
        turned, low = LEAST["cells"]
        effect = ((self.turned - self.turned_control) / turned + self.low / low) / 2
        return effect if self.repeated else VARYING * effect

    @property
    def repeated(self) -> bool:
        """Whether the cue is the same in its pictures, like something that was added."""
        return self.repeats >= REPEATS[self.candidate.kind]

    @property
    def strong(self) -> bool:
        """Whether the effect is large, and no coincidence."""
        turned, low = LEAST[self.candidate.kind]
        large = self.turned - self.turned_control >= turned and self.low >= low
        return self.p_corrected < ALPHA and large

    @property
    def significant(self) -> bool:
        """Whether the effect is large, and the cue the same in its pictures."""
        return self.strong and self.repeated

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.significant:
            return "significant"
        return "strong, but varies like a part of an object" if self.strong else "not significant"

    @property
    def reasons(self) -> list[str]:
        """What speaks for the cue being a shortcut, in words."""
        cluster, found = self.candidate.cluster, []
        if self.share is not None and self.share >= 0.25:
            found.append(f"carries {_percent(self.share)} of the class's positive evidence")
        if self.pictures <= 0.25 * self.class_pictures:
            among = _percent(self.pictures / self.class_pictures)
            found.append(f"is in few of the class's pictures ({among})")
        if self.repeated:
            found.append(REPEATING[self.candidate.kind])
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
        if self.turned - self.turned_control >= LEAST[self.candidate.kind][0]:
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
    known: dict[int, Tensor]
    """Logits of pictures as they are."""
    mean: Tensor
    """Black and white point of the data's colors, on average [2, 3]."""

    def margins(self, numbers: Array, label: int | Array) -> Array:
        """Margins of pictures as they are."""
        new = [number for number in dict.fromkeys(numbers.tolist()) if number not in self.known]
        for start in range(0, len(new), self.batch_size):
            part = new[start : start + self.batch_size]
            self.known.update(zip(part, self.logits(self.images(np.array(part))), strict=True))
        return _margins(torch.stack([self.known[number] for number in numbers.tolist()]), label)

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
        known={},
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
        replace(each, affected=_affected(bench, each))
        if rank < DETAILED or each.significant
        else each
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
    others = np.flatnonzero(evidence.correct & (evidence.label != label))
    if len(sources) < SMALLEST_COUNT or not len(others):
        return None
    if candidate.kind != "cells":
        # An edge or a cast need not be in all pictures: those that need it most.
        sources = random.permutation(sources)[:CONSIDERED]
        falls = bench.margins(sources, label) - _margins(_without(bench, candidate, sources), label)
        order = np.argsort(-falls, kind="stable")[: max(FEW, len(sources) // 10)]
        enough = NEED * np.median(falls[order[:SMALLEST_COUNT]])
        needed = max(SMALLEST_COUNT, int((falls[order] >= enough).sum()))
        sources = sources[order[:needed]]
    sources = random.permutation(sources)[:pairs]
    repeats = _repeats(bench, candidate, sources, random.choice(others, COMPARED))
    if candidate.kind == "cells" and repeats >= REPEATS["cells"]:
        # A copy can be larger than the cells of one cluster.
        candidate = replace(candidate, beside=True)
    compare = random.choice(others, len(sources))
    without = _without(bench, candidate, sources)
    classes = without.argmax(1).numpy()
    lost_control, control_falls = _control_removal(bench, candidate, sources, compare)
    from_ = np.arange(pairs) % len(sources)
    onto = (
        random.choice(others, pairs)
        if candidate.kind == "color"
        else _rivals(evidence, without, label, others, from_, random)
    )
    before, after = bench.margins(sources, label), _margins(without, label)
    gap = before[from_] - bench.margins(onto, label)
    few = min(FEW, pairs)
    cue, control = _transfer(bench, candidate, sources[from_[:few]], onto[:few], random)
    complete = pairs == few or bool((cue - control).mean() > GIVEN_UP * gap[:few].mean())
    if complete and pairs > few:
        more = _transfer(bench, candidate, sources[from_[few:]], onto[few:], random)
        cue, control = (np.concatenate(both) for both in zip((cue, control), more, strict=True))
    made = len(cue)
    # Transfers from the same picture are not independent, so that pictures are counted.
    used = np.unique(from_[:made])
    moved = np.array([(cue - control)[from_[:made] == each].mean() for each in used])
    scale = float(gap[:made].mean())
    low, high = (end / scale for end in _interval(moved, random))
    names, counts = np.unique(classes[classes != label], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:3]
    absent = np.setdiff1d(members, has)
    return Suspicion(
        candidate=candidate,
        class_name=own.name,
        pictures=len(has),
        class_pictures=len(members),
        share=_share(bench, candidate, members),
        transfers=made,
        turned=float((cue > 0).mean()),
        turned_control=float((control > 0).mean()),
        effect=float(moved.mean()) / scale,
        low=low,
        high=high,
        removals=len(sources),
        lost=float((classes != label).mean()),
        lost_control=lost_control,
        needed=float((before - after).mean() - control_falls) / scale,
        becomes=tuple(
            (evidence.settings.classes[int(names[at])], float(counts[at] / len(classes)))
            for at in order
        ),
        accuracy_with=float(evidence.correct[has].mean()),
        accuracy_without=float(evidence.correct[absent].mean()) if len(absent) else None,
        p=permutation_test(moved) if complete else 1.0,
        repeats=repeats,
        complete=complete,
    )


def _margins(logits: Tensor, label: int | Array) -> Array:
    """By how much the logit of a class is above all others; positive where it is predicted.

    The class is the same for all pictures, or one of each.
    """
    labels = torch.as_tensor(label).expand(len(logits)).unsqueeze(1)
    own = logits.gather(1, labels).squeeze(1)
    return (own - logits.scatter(1, labels, -torch.inf).amax(1)).double().numpy()


def _rivals(
    evidence: Evidence, without: Tensor, label: int, others: Array, from_: Array, random: Any
) -> Array:
    """A picture to copy the cue onto for each transfer, of the class that the source is closest to
    without the cue: a cue may decide between two classes only."""
    without = without.clone()
    without[:, label] = -torch.inf
    found = []
    for rival in without.argmax(1).numpy()[from_]:
        theirs = others[evidence.label[others] == rival]
        found.append(random.choice(theirs if len(theirs) else others))
    return np.array(found)


def _transfer(
    bench: _Bench, candidate: Candidate, from_: Array, onto: Array, random: Any
) -> tuple[Array, Array]:
    """The margins of pictures when the cue is copied there, and in the control."""
    source, target = bench.images(from_), bench.images(onto)
    if candidate.kind == "cells":
        cue, control = (_pixels(each, source) for each in _chosen(bench, candidate, from_))
        images = torch.where(cue[:, None], source, target)
        controls = torch.where(control[:, None], source, target)
    else:
        move = _copy_edge if candidate.kind == "edge" else _copy_color
        evidence = bench.evidence
        # From other pictures of the class that the cue is copied onto.
        compare = [
            random.choice(np.flatnonzero(evidence.correct & (evidence.label == own)))
            for own in evidence.label[onto]
        ]
        images, controls = move(source, target), move(bench.images(np.array(compare)), target)
    return (
        _margins(bench.logits(images), candidate.label),
        _margins(bench.logits(controls), candidate.label),
    )


def _without(bench: _Bench, candidate: Candidate, numbers: Array) -> Tensor:
    """Logits without the cue."""
    found = []
    for start in range(0, len(numbers), bench.batch_size):
        some = numbers[start : start + bench.batch_size]
        images = bench.images(some)
        if candidate.kind == "color":
            images = _recolored(images, bench.mean.expand(len(images), -1, -1))
            found.append(bench.logits(images))
        else:
            gone = (
                _edge(images).expand(len(images), -1, -1)
                if candidate.kind == "edge"
                else _pixels(_chosen(bench, candidate, some)[0], images)
            )
            found.append(bench.logits(images, gone))
    return torch.cat(found)


def _control_removal(
    bench: _Bench, candidate: Candidate, numbers: Array, compare: Array
) -> tuple[float, float]:
    """How many pictures lose their class in the control, and by how much margins fall."""
    if candidate.kind == "cells":
        images = bench.images(numbers)
        gone = _pixels(_chosen(bench, candidate, numbers)[1], images)
        after = _margins(bench.logits(images, gone), candidate.label)
        before = bench.margins(numbers, candidate.label)
    else:
        labels = bench.evidence.label[compare]
        after = _margins(_without(bench, candidate, compare), labels)
        before = bench.margins(compare, labels)
    return float((after <= 0).mean()), float((before - after).mean())


def _chosen(bench: _Bench, candidate: Candidate, numbers: Array) -> tuple[Tensor, Tensor]:
    """Some of the cue's cells in pictures, and as many other strong ones [B, G, G]."""
    assert candidate.cluster is not None
    evidence, grid = bench.evidence, bench.evidence.settings.grid
    most = max(LEAST_CELLS, round(AREA * grid**2))
    cue = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
    control = torch.zeros_like(cue)
    for row, number in enumerate(numbers):
        cells = candidate.cluster.cells_of(evidence, number)
        rows, columns = np.divmod(np.arange(grid * grid), grid)
        away = np.maximum(
            np.abs(rows[:, None] - rows[cells]), np.abs(columns[:, None] - columns[cells])
        )
        # Around one of them, which is not the strongest: that of any object would be better than
        # the other cells.
        start = np.random.default_rng([candidate.label, number]).integers(len(cells))
        chosen = cells[np.argsort(away[cells, start], kind="stable")[:most]]
        cue[row, torch.from_numpy(chosen)] = True
        strength = evidence.cells[number, 0].ravel().astype(np.float64)
        order = np.lexsort([-strength, away.min(1) <= candidate.beside])
        control[row, torch.from_numpy(order[: len(chosen)].copy())] = True
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


def _repeats(bench: _Bench, candidate: Candidate, numbers: Array, compare: Array) -> float:
    """How much the cue is the same in pictures."""
    if candidate.kind == "cells":
        numbers = numbers[:PAIRED]
        images = bench.images(numbers).float().cpu()
        return found_again(images, _anchors(_chosen(bench, candidate, numbers)[0], images))
    own, other = (bench.images(each).float().cpu() for each in (numbers, compare))
    if candidate.kind == "edge":
        return max(0.0, edges_alike(own, other))
    return cast_elsewhere(
        own, other, _rest(bench, numbers, own.shape[-2:]), _rest(bench, compare, own.shape[-2:])
    )


def _anchors(cells: Tensor, images: Tensor) -> Tensor:
    """The cell with the most details of those that are chosen [B, G, G], as `found_again` takes
    it."""
    grid = cells.shape[-1]
    across, down = (images.diff(dim=dim).square().sum(1) for dim in (-1, -2))
    details = F.pad(across, (0, 1)) + F.pad(down, (0, 0, 0, 1))
    each = F.adaptive_avg_pool2d(details, grid).masked_fill(~cells, -1)
    best = each.flatten(1).argmax(1)
    sides = torch.tensor([side / grid for side in images.shape[-2:]])
    centers = (torch.stack([best // grid, best % grid], 1) + 0.5) * sides
    return torch.cat([centers, sides.expand(len(centers), -1)], 1)


def _rest(bench: _Bench, numbers: Array, size: Sequence[int]) -> Tensor:
    """The pixels of the cells with the least evidence [B, H, W]."""
    grid = bench.evidence.settings.grid
    strength = bench.evidence.cells[numbers, 0].reshape(len(numbers), -1)
    order = strength.argsort(1, kind="stable")[:, : round(REST * grid * grid)]
    cells = torch.zeros(len(numbers), grid * grid, dtype=torch.bool)
    cells.scatter_(1, torch.from_numpy(order.copy()), True)
    return _pixels(cells.unflatten(1, (grid, grid)), torch.empty(0, *size))


def _copy_edge(source: Tensor, target: Tensor) -> Tensor:
    return torch.where(_edge(target)[:, None], source, target)


def _copy_color(source: Tensor, target: Tensor) -> Tensor:
    return _recolored(target, colors(source))


def _recolored(images: Tensor, new: Tensor) -> Tensor:
    """Images with other black and white points of their channels [B, 2, 3]."""
    (black, white), (new_black, new_white) = (
        each[..., None, None].unbind(1) for each in (colors(images), new)
    )
    inside = (images - black) / (white - black).clamp_min(1e-3)
    return (inside * (new_white - new_black) + new_black).clamp(0, 1)


def _mean_colors(pictures: Images, evidence: Evidence, seed: int, most: int = 200) -> Tensor:
    """Black and white points of some pictures, on average [2, 3]."""
    chosen = np.random.default_rng(seed).permutation(len(evidence))[:most]
    each = [colors(pictures[int(evidence.index[n])][0][None])[0] for n in np.sort(chosen)]
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
    """By how much margins fall without the cue, for the pictures that have it."""
    candidate, label = found.candidate, found.candidate.label
    has = (
        np.flatnonzero(bench.evidence.label == label)
        if candidate.cluster is None
        else candidate.cluster.pictures
    )[:most]
    falls = bench.margins(has, label) - _margins(_without(bench, candidate, has), label)
    each = zip(has.tolist(), falls.tolist(), strict=True)
    return tuple(sorted(each, key=lambda item: (-item[1], item[0])))


def permutation_test(values: Array, steps: int = 1000) -> float:
    """Returns the p-value of a mean above zero: the share of all flips of signs with at least
    this mean.

    All flips are counted, by a convolution; for that values are rounded to a thousandth of the
    largest.

    Example:
        >>> permutation_test(np.array([1.0, 2.0, 0.5]))
        0.125
    """
    largest = float(np.abs(values).max(initial=0.0))
    if not largest:
        return 1.0
    sizes = np.rint(np.abs(values) / largest * steps).astype(np.int64)
    total = int((np.sign(values) * sizes).sum())
    # The sum of the positive ones is (the total of a flip + the sum of all) / 2.
    share = np.zeros(int(sizes.sum()) + 1)
    share[0] = 1.0
    for size in sizes.tolist():
        moved = np.zeros_like(share)
        moved[size:] = share[: len(share) - size]
        share = (share + moved) / 2
    return float(share[(total + int(sizes.sum())) // 2 :].sum())


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

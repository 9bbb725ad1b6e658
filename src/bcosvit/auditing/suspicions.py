"""Suspicions: cues on which a class depends, ranked by what was measured when they were moved.

A cue is a cluster of cells, the same pixels in several pictures, the edge of the pictures, or their
look: a cast of color, or how sharp they are. It is tested by two interventions, each beside its
control:

* **Transfer**: the cue is copied from a picture of the class onto a picture of the class's rival,
  the class that comes next once the cue is removed. If the model then predicts the class, the cue
  alone is enough. A cluster transfers only a few cells (5 % of the picture, at least three, beside
  each other where it has more), and the control copies as many of the picture's other cells, the
  strongest ones outside the cluster (and not beside it, where it repeats: then they may be parts of
  the same thing): parts of an object are about as good as each other, a cue is better than all of
  them. The control of a copy are the same pixels of pictures of other classes: what is the same to
  the pixel is no part of the object. For edges and looks, the sources are the pictures of the class
  whose edge or look moves others most, and the control is the same transfer from pictures of other
  classes that were chosen in the same way (`bcosvit.auditing.screening`). Looks are copied onto
  pictures of all other classes, since two classes often differ by them.
* **Removal**: the cue's cells are set to zero in the encoded picture, which is nothing to a B-cos
  model; the edge too; a look is replaced by the data's mean. If the model does not predict the
  class any more, it needed the cue. The control removes as many other cells, or edge and look of
  pictures of other classes.

The effect of a transfer is measured on margins (the logit of the class less the largest other one):
how far it moves pictures toward those that the cue comes from, less the control, so that 0 is
nothing and 1 the whole way. The p-value is that of an exact permutation test of these differences
(their signs are flipped; transfers from the same picture count once), corrected by Holm's method
for all candidates that repeat, since no others can be called significant, and apart from them for
those that vary. Whether a cue repeats is seen before it is copied, so that this choice leaves the
p-values as they are. A suspicion is called significant if the corrected p-value is below 0.05, the
effect is large, and the cue repeats like something that was added. Large means that the transfer
turns at least 40 % more of the pictures than the control does, and that the lower end of the
effect's 95 % interval is above 30 % (for casts of color 85 % and 60 %, since many classes depend on
their colors); small effects are everywhere. A look must be that of at least ten pictures. Repeats
means what `bcosvit.auditing.repeats` measures: a tag is a copy in all of its pictures, while parts
of objects, which may turn other pictures as well, vary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcosvit.auditing.clusters import ClassEvidence
from bcosvit.auditing.copies import Copies, Copy
from bcosvit.auditing.cues import LOOKS, Bench, Cells, Copied, Cue, Edge, Whole, margins
from bcosvit.auditing.evidence import Adjoint, Array, Evidence, Progress, on_grid
from bcosvit.auditing.screening import Screening
from bcosvit.metrics.loader import Images
from bcosvit.predictor import Predictor

VARYING = 1 / 4
"""What the effect of a cue that does not repeat counts for in the ranking; otherwise it counts as
much as the cue repeats."""
ALPHA = 0.05
DRAWS = 2000
"""Of intervals."""
GIVEN_UP = 0.05
"""The effect below which a candidate is given up after a few transfers."""
COMPARED = 96
"""Pictures of other classes that edges and looks are compared with."""
FEW = 12
"""Transfers after which a candidate without any effect is given up."""
DETAILED = 8
"""Suspicions of which each picture is tested."""
PER_CLASS = 5
"""Clusters of a class that are tested, those with the most evidence per picture."""
SMALLEST_SHARE = 0.005
"""Clusters with less evidence are not tested."""
COPIES = 100
"""Where the places of copies begin, behind those of all other cues of a class."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Suspicion:
    """A cue and what was measured about it."""

    cue: Cue
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
        is called large for cells, times how much the cue repeats, and how seldom what repeats so
        is a part of objects."""
        turned, low = Cue.large
        moved = self.low if self.cue.doubted else self.effect
        effect = ((self.turned - self.turned_control) / turned + moved / low) / 2
        return effect * max(VARYING, self.repeats) * self.cue.counts

    @property
    def repeated(self) -> bool:
        """Whether the cue is the same in its pictures, like something that was added."""
        return self.repeats >= self.cue.repeats_least

    @property
    def large(self) -> bool:
        """Whether the effect is large."""
        turned, low = self.cue.large
        return self.turned - self.turned_control >= turned and self.low >= low

    @property
    def strong(self) -> bool:
        """Whether the effect is large, and seen in enough pictures to be no coincidence."""
        return self.large and self.p_corrected < ALPHA and self.removals >= self.cue.enough

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
    def carries_much(self) -> bool:
        """Whether it carries a quarter of the class's positive evidence or more."""
        return self.share is not None and self.share >= 0.25

    @property
    def reasons(self) -> list[str]:
        """What speaks for the cue being a shortcut, in words."""
        cluster, found = getattr(self.cue, "cluster", None), []
        if self.share is not None and self.carries_much:
            found.append(f"carries {_percent(self.share)} of the class's positive evidence")
        if self.pictures <= 0.25 * self.class_pictures:
            among = _percent(self.pictures / self.class_pictures)
            found.append(f"is in few of the class's pictures ({among})")
        if self.repeated:
            found.append(self.cue.repeating)
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
        if self.turned - self.turned_control >= self.cue.large[0]:
            found.append("is enough by itself: other pictures become the class with it")
        if self.lost - self.lost_control >= 0.1:
            found.append(
                f"is needed: {_percent(self.lost)} of its pictures are not recognized without it, "
                f"and {_percent(self.lost_control)} in the control"
            )
        return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def find_suspicions(
    predictor: Predictor,
    pictures: Images,
    evidence: Evidence,
    classes: Sequence[ClassEvidence],
    *,
    pairs: int = 48,
    tests: int = 2000,
    seed: int = 0,
    num_workers: int = 0,
    progress: Progress | None = None,
) -> list[Suspicion]:
    """Tests what classes depend on.

    Args:
        predictor: The model.
        pictures: The data of the evidence.
        evidence: The store.
        classes: What its classes are made of.
        pairs: Transfers per candidate.
        tests: How many candidates are tested at most. Each class has up to eight and its
            copies; where they are too many, copies come first, then the first ones of all classes.
        seed: Of the choice of pictures and of the intervals.
        num_workers: How many processes read ahead where copies are looked for.
        progress: A function that is called after each candidate.

    Returns:
        All candidates that were tested, the most suspicious first.
    """
    reference = next(predictor.model.parameters())
    bench = Bench(
        model=predictor.model,
        pictures=pictures,
        evidence=evidence,
        batch_size=evidence.settings.batch_size,
        known={},
        means=_means(pictures, evidence, seed, reference),
    )
    copies = Copies(
        evidence,
        pictures,
        seed,
        device=reference.device,
        num_workers=num_workers,
        rivals=partial(_for_rivals, bench, Adjoint(predictor.model)),
    ).find_all([each.label for each in classes])
    candidates = _candidates(evidence, classes, copies, progress)
    by_class = {each.label: each for each in classes}
    screening = Screening(bench, np.random.default_rng(seed))
    found = []
    for number, (place, cue) in enumerate(candidates[:tests]):
        # A seed for each, so that one test does not depend on the others.
        random = np.random.default_rng([seed, cue.label, place])
        measured = _measure(bench, screening, cue, by_class[cue.label], pairs, random)
        if measured is not None:
            found.append(measured)
        if progress is not None:
            progress(number + 1, len(candidates[:tests]), "suspicions")
    found = _corrected(found)
    found.sort(key=lambda each: (not each.significant, -each.score, each.cue.name))
    return [
        replace(each, affected=_affected(bench, each))
        if rank < DETAILED or each.significant
        else each
        for rank, each in enumerate(found)
    ]


def _for_rivals(bench: Bench, adjoint: Adjoint, images: Tensor, numbers: Array) -> Array:
    """Contributions to the class that comes next, for images of one class [N, G, G]."""
    found, label = [], torch.from_numpy(bench.evidence.label[numbers])
    images = images.to(next(bench.model.parameters()))
    for some, own in zip(
        images.split(bench.batch_size), label.split(bench.batch_size), strict=True
    ):
        logits = bench.logits(some).scatter(1, own[:, None], -torch.inf)
        found.append(
            on_grid(
                adjoint(some, logits.argmax(1).to(some.device)).channels.sum(1),
                bench.evidence.settings.grid,
            )
        )
    return torch.cat(found).float().cpu().numpy()


def _candidates(
    evidence: Evidence,
    classes: Sequence[ClassEvidence],
    copies: Iterator[list[Copy]],
    progress: Progress | None,
) -> list[tuple[int, Cue]]:
    """Cues with their places within their classes, the first ones of all classes first."""
    found: list[tuple[int, int, Cue]] = []
    for number, (each, its_copies) in enumerate(zip(classes, copies, strict=True)):
        able = [
            cluster
            for cluster in each.clusters
            if cluster.share >= SMALLEST_SHARE
            and evidence.correct[cluster.pictures].sum() >= Cells.fewest
        ]
        # Rare clusters carry little in sum, so evidence per picture counts.
        able.sort(key=lambda c: (-c.mean * each.pictures / len(c.pictures), c.number))
        mine: list[Cue] = [Cells(label=each.label, cluster=one) for one in able[:PER_CLASS]]
        mine[1:1] = [Edge(label=each.label), *(look(label=each.label) for look in LOOKS)]
        found += [(place, place, cue) for place, cue in enumerate(mine)]
        # Before all others, since there are few; with places of their own.
        found += [
            (-1, COPIES + copy.number, Copied(label=each.label, copy=copy)) for copy in its_copies
        ]
        if progress is not None:
            progress(number + 1, len(classes), "copies")
    found.sort(key=lambda item: (item[0], -item[2].weight))
    return [(place, cue) for _, place, cue in found]


def _measure(
    bench: Bench, screening: Screening, cue: Cue, own: ClassEvidence, pairs: int, random: Any
) -> Suspicion | None:
    evidence, label = bench.evidence, cue.label
    members = np.flatnonzero(evidence.label == label)
    has = cue.members(evidence)
    sources = has[evidence.correct[has]]
    others = np.flatnonzero(evidence.correct & (evidence.label != label))
    if len(sources) < cue.fewest or not len(others):
        return None
    sources, compare = random.permutation(sources), random.choice(others, pairs)
    if isinstance(cue, Whole):
        sources, compare = screening.choose(cue, sources)
        # Tested on other pictures than those by which they were chosen.
        others = np.setdiff1d(others, screening.onto)
        if not len(sources) or not len(others):
            return None
        sources = random.permutation(sources)
    sources = sources[:pairs]
    compare = random.permutation(compare)[np.arange(len(sources)) % len(compare)]
    repeats = cue.repeats(bench, sources, random.choice(others, COMPARED))
    cue = cue.measured(repeats)
    without = cue.without(bench, sources)
    classes = without.argmax(1).numpy()
    control_after, control_before = cue.control_removal(bench, sources, compare)
    from_ = np.arange(pairs) % len(sources)
    onto = (
        random.choice(others, pairs)
        if cue.onto_any
        else _rivals(evidence, without, label, others, from_, random)
    )
    before, after = bench.margins(sources, label), margins(without, label)
    gap = before[from_] - bench.margins(onto, label)
    few = min(FEW, pairs)
    copied, control = _transfer(bench, cue, sources, compare, from_[:few], onto[:few])
    complete = pairs == few or bool((copied - control).mean() > GIVEN_UP * gap[:few].mean())
    if complete and pairs > few:
        more = _transfer(bench, cue, sources, compare, from_[few:], onto[few:])
        copied, control = (
            np.concatenate(both) for both in zip((copied, control), more, strict=True)
        )
    made = len(copied)
    # Transfers from the same picture are not independent, so that pictures are counted.
    used = np.unique(from_[:made])
    moved = np.array([(copied - control)[from_[:made] == each].mean() for each in used])
    scale = float(gap[:made].mean())
    low, high = (end / scale for end in _interval(moved, random))
    names, counts = np.unique(classes[classes != label], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:3]
    absent = np.setdiff1d(members, has)
    return Suspicion(
        cue=cue,
        class_name=own.name,
        pictures=len(has),
        class_pictures=len(members),
        share=cue.share(evidence),
        transfers=made,
        turned=float((copied > 0).mean()),
        turned_control=float((control > 0).mean()),
        effect=float(moved.mean()) / scale,
        low=low,
        high=high,
        removals=len(sources),
        lost=float((classes != label).mean()),
        lost_control=float((control_after <= 0).mean()),
        needed=float((before - after).mean() - (control_before - control_after).mean()) / scale,
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
    bench: Bench, cue: Cue, sources: Array, compare: Array, from_: Array, onto: Array
) -> tuple[Array, Array]:
    """The margins of pictures when the cue is copied there, and in the control."""
    images, controls = cue.transfer(bench, sources[from_], onto, compare[from_])
    return margins(bench.logits(images), cue.label), margins(bench.logits(controls), cue.label)


def _means(
    pictures: Images, evidence: Evidence, seed: int, like: Tensor, most: int = 200
) -> dict[str, Tensor]:
    """The mean look of some pictures, by the kind of cue."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(evidence))[:most])
    each = [
        [look.of(pictures[int(evidence.index[n])][0][None])[0] for look in LOOKS] for n in chosen
    ]
    return {
        look.kind: torch.stack(values).mean(0).to(like)
        for look, values in zip(LOOKS, zip(*each, strict=True), strict=True)
    }


def _affected(bench: Bench, found: Suspicion, most: int = 1000) -> tuple[tuple[int, float], ...]:
    """By how much margins fall without the cue, for the pictures that have it."""
    cue = found.cue
    has = cue.members(bench.evidence)[:most]
    falls = bench.margins(has, cue.label) - margins(cue.without(bench, has), cue.label)
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
    """Holm's correction for the candidates that repeat, and for those that do not."""
    corrected = [1.0] * len(found)
    for repeated in (True, False):
        mine = [at for at in range(len(found)) if found[at].repeated == repeated]
        largest = 0.0
        for rank, at in enumerate(sorted(mine, key=lambda at: found[at].p)):
            largest = max(largest, min(1.0, (len(mine) - rank) * found[at].p))
            corrected[at] = largest
    return [replace(each, p_corrected=p) for each, p in zip(found, corrected, strict=True)]

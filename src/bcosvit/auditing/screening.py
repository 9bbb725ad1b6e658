"""Screening: which pictures of a class have an edge or a look that turns others.

A cue need not be in all pictures of its class, and the class may need it little beside the object.
So the edge or look of each picture is copied onto a few pictures of other classes, and those that
move them most toward the class are tested, on other pictures. The control are pictures of other
classes that are chosen in the same way: of natural colors, too, some move the model more.

Letters for shapes: N pictures, T pictures that are copied onto, K classes, F numbers of a look.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcosvit.auditing.cues import Bench, Whole, margins
from bcosvit.auditing.evidence import Array, Evidence

ONTO = 8
"""Pictures that are copied onto, of as many classes as possible."""
CLOSEST = 4
"""Those of them that are used for a class, the closest to it: a cue may decide between two classes
only."""
CONSIDERED = 100
"""Pictures of a class that are copied from, and of all classes for the control."""
NEIGHBORS = 5
"""Pictures of about the same edge or look over which is averaged, since an added one is the same in
all of its pictures."""
CHOSEN = 12
"""Pictures that are chosen, or a tenth where they are more."""
ALIKE = 2.0
"""How far the looks of chosen pictures may be from that of the first, relative to the nearest
``NEIGHBORS``."""
NEED = 0.5
"""How far a picture must move others to be chosen, relative to those that move them most."""


class Screening:
    """Chooses pictures whose edge or look is tested.

    Args:
        bench: What interventions need.
        random: A generator, which draws the pictures that are copied onto and those of the control.
    """

    def __init__(self, bench: Bench, random: Any) -> None:
        self.bench = bench
        order = _by_turns(bench.evidence, random)
        self.onto: Array = order[:ONTO]
        """These must not be in the test."""
        self._pool: Array = order[ONTO : ONTO + CONSIDERED]
        self._known: dict[str, Tensor] = {}

    def choose(self, cue: Whole, sources: Array) -> tuple[Array, Array]:
        """Returns those of a class's pictures that move others most toward the class, and those of
        other classes; none where there are too few pictures.

        Args:
            cue: The edge or look.
            sources: Pictures of the class, in a random order.
        """
        bench, labels = self.bench, self.bench.evidence.label
        onto = np.flatnonzero(labels[self.onto] != cue.label)
        theirs = np.flatnonzero(labels[self._pool] != cue.label)
        if not len(onto) or len(theirs) < NEIGHBORS:
            return sources[:0], theirs[:0]
        before = bench.margins(self.onto[onto], cue.label)
        closest = np.argsort(-before, kind="stable")[:CLOSEST]
        onto, before = onto[closest], before[closest, None]
        if cue.kind not in self._known:
            self._known[cue.kind] = self._copied(cue, self._pool, self.onto)
        sources, pool = sources[:CONSIDERED], self._pool[theirs]
        own, other = (
            np.stack([margins(each, cue.label) for each in logits]) - before
            for logits in (
                self._copied(cue, sources, self.onto[onto]),
                self._known[cue.kind][onto][:, theirs],
            )
        )
        # Some pictures move much by anything that is copied onto them.
        usual, much = np.median(other, 1)[:, None], other.std(1)[:, None] + 1e-9
        looks, other_looks = (
            cue.of(bench.images(numbers)).flatten(1).double().cpu() for numbers in (sources, pool)
        )
        # Looks are compared by what is unusual in other classes.
        spread = torch.cov(other_looks.T) + 1e-4 * torch.eye(looks.shape[1])
        scale = torch.linalg.inv(torch.linalg.cholesky(spread)).T
        chosen, compare = (
            numbers[_most(((moved - usual) / much).mean(0), (look @ scale).numpy())]
            for numbers, moved, look in ((sources, own, looks), (pool, other, other_looks))
        )
        return chosen, compare

    def _copied(self, cue: Whole, from_: Array, onto: Array) -> Tensor:
        """Logits of some pictures with the edge or look of others [T, N, K]."""
        targets, found = self.bench.images(onto), []
        for start in range(0, len(from_), self.bench.batch_size):
            source = self.bench.images(from_[start : start + self.bench.batch_size])
            several = [cue.copied(source, target.expand_as(source)) for target in targets]
            found.append(torch.stack([self.bench.logits(images) for images in several]))
        return torch.cat(found, 1)


def _by_turns(evidence: Evidence, random: Any) -> Array:
    """Pictures that are classified as labeled: one of each class, then a second one, and so on."""
    numbers = random.permutation(np.flatnonzero(evidence.correct))
    labels, turn = evidence.label[numbers], np.zeros(len(numbers), np.int64)
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return numbers[np.argsort(turn, kind="stable")]


def _smoothed(moved: Array, looks: Array) -> Array:
    """The mean over each picture and those whose looks [N, F] are the nearest."""
    away = np.linalg.norm(looks[:, None] - looks[None], axis=2)
    return moved[np.argsort(away, 1, kind="stable")[:, :NEIGHBORS]].mean(1)


def _most(moved: Array, looks: Array) -> Array:
    """Positions of pictures that move most and have about the same look, the first ones first."""
    moved = _smoothed(moved, looks)
    order = np.argsort(-moved, kind="stable")[: max(CHOSEN, len(moved) // 10)]
    enough = NEED * np.median(moved[order[:NEIGHBORS]])
    # An added look is one: of several that move others, that of the first.
    away = np.linalg.norm(looks - looks[order[0]], axis=1)
    near = ALIKE * np.sort(away)[min(NEIGHBORS, len(away) - 1)]
    chosen = order[(moved[order] >= enough) & (away[order] <= near)]
    return chosen if len(chosen) >= NEIGHBORS else np.argsort(away, kind="stable")[:NEIGHBORS]

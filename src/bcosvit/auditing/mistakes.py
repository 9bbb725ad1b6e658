"""Mistakes: how often each class is recognized, what misled the model, and likely wrong labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bcosvit.auditing.clusters import ClassEvidence
from bcosvit.auditing.evidence import MISLEADING, Array, Evidence


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A picture that is not classified as labeled."""

    picture: int
    """Its place in the evidence."""
    label: int
    predicted: int
    confidence: float
    """In the predicted class."""
    label_confidence: float
    gap: float
    """The logit of the predicted class minus that of the labeled one."""
    misled_by: str | None
    """The cluster of the predicted class that most of the misleading evidence looks like."""
    share: float
    """Of the misleading evidence that looks like this cluster."""
    wrong_label: bool
    """Whether the label is likely wrong (confident learning, Northcutt et al., 2021): the
    confidence in the predicted class is at least what is usual for pictures of that class."""


@dataclass(frozen=True, kw_only=True)
class MistakeGroup:
    """Mistakes that the same kind of evidence has caused."""

    predicted: int
    misled_by: str | None
    mistakes: tuple[Mistake, ...]
    """The most confident first."""


def find_mistakes(evidence: Evidence, classes: Sequence[ClassEvidence]) -> list[Mistake]:
    """Lists all mistakes, the most confident first.

    Args:
        evidence: The store.
        classes: What its classes are made of.
    """
    by_label = {each.label: each for each in classes}
    confidence = evidence.confidence
    usual = {
        each.label: float(confidence[evidence.label == each.label, 0].mean()) for each in classes
    }
    misleading = np.flatnonzero(evidence.cell_role == MISLEADING)
    misleading = misleading[np.argsort(evidence.cell_picture[misleading], kind="stable")]
    starts = np.searchsorted(evidence.cell_picture[misleading], np.arange(len(evidence) + 1))
    centers = {
        each.label: np.stack([evidence.descriptors[c.rows].mean(0) for c in each.clusters])
        for each in classes
        if each.clusters
    }
    found = []
    for picture in np.flatnonzero(~evidence.correct).tolist():
        label, predicted = int(evidence.label[picture]), int(evidence.predicted[picture])
        rows = misleading[starts[picture] : starts[picture + 1]]
        name, share = None, 0.0
        if predicted in centers and len(rows):
            nearest, share = _nearest(evidence, rows, centers[predicted])
            name = by_label[predicted].clusters[nearest].name
        sure = float(confidence[picture, 1])
        found.append(
            Mistake(
                picture=picture,
                label=label,
                predicted=predicted,
                confidence=sure,
                label_confidence=float(confidence[picture, 0]),
                gap=float(evidence.logit[picture, 1] - evidence.logit[picture, 0]),
                misled_by=name,
                share=share,
                wrong_label=sure >= usual.get(predicted, np.inf),
            )
        )
    found.sort(key=lambda each: (-each.gap, each.picture))
    return found


def _nearest(evidence: Evidence, rows: Array, centers: Array) -> tuple[int, float]:
    """The center that most of the misleading evidence is nearest to, and its share."""
    away = np.linalg.norm(evidence.descriptors[rows][:, None] - centers[None], axis=2)
    sums = np.bincount(away.argmin(1), evidence.cell_sum[rows], len(centers))
    best = int(sums.argmax())
    return best, float(sums[best] / sums.sum())


def grouped(mistakes: Sequence[Mistake]) -> list[MistakeGroup]:
    """Groups mistakes by the evidence that misled the model, the largest groups first."""
    groups: dict[tuple[int, str | None], list[Mistake]] = {}
    for each in mistakes:
        groups.setdefault((each.predicted, each.misled_by), []).append(each)
    found = [
        MistakeGroup(predicted=predicted, misled_by=name, mistakes=tuple(several))
        for (predicted, name), several in groups.items()
    ]
    return sorted(found, key=lambda g: (-len(g.mistakes), g.predicted, g.misled_by or ""))

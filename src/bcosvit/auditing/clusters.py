"""What a class is made of: its strong cells, grouped by what they look like to the model.

Cells that look nearly alike in many pictures are found by density (HDBSCAN); the other cells are
divided by k-means, the strongest ones first, so that each belongs to a cluster. Shares are exact:
the contributions of all clusters and of the remaining weak cells, the residual and the bias add up
to the mean logit of the class.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from bcosvit.auditing.evidence import FOR_LABEL, Array, Evidence
from bcosvit.messages import require

DIMENSIONS = 12
"""Principal components in which cells are compared."""
AT_MOST = 4000
"""Cells of a class by which clusters are found; further ones join the nearest cluster."""
LOOSE = 4
"""Clusters that k-means makes of the cells that density does not group."""
STRONG = 3
"""Clusters that k-means makes of the strongest of these cells, before the others."""
STRONGEST = 0.05
"""The share of a class's cells that count as the strongest."""
TIGHT = 0.6
"""The spread, relative to that of the class, up to which a group is dense."""


Groups = tuple[Array, int]
"""The group of each cell, and how many of the groups are dense; those come first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Cells of a class that look alike."""

    label: int
    number: int
    """Within the class, the largest share first."""
    rows: Array
    """Positions among the strong cells of the evidence [m]."""
    pictures: Array
    """The pictures that it is in, each once."""
    mean: float
    """Its part of the class's mean logit."""
    share: float
    """Its share of the class's positive evidence."""
    dense: bool
    """Whether it was found by density: its cells look nearly alike."""
    spread: float
    """The mean distance of its cells from their center, relative to that of the class."""
    where: Array
    """How often it is in each cell of the grid [G, G], as a share of its pictures."""
    elsewhere: float
    """The share of similar strong cells that speak for other classes."""
    off_object: float | None
    """The share of its cells' area beside the object; None without masks."""

    @property
    def name(self) -> str:
        """What the cluster is called in tables: its class's number and its own."""
        return f"{self.label}.{self.number}"

    def cells_of(self, evidence: Evidence, picture: int) -> Array:
        """Returns its cells in a picture, the strongest first."""
        mine = self.rows[evidence.cell_picture[self.rows] == picture]
        return evidence.cell_index[mine[np.argsort(-evidence.cell_sum[mine], kind="stable")]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassEvidence:
    """What one class's logit is made of, on average over its pictures."""

    label: int
    name: str
    pictures: int
    accuracy: float
    logit: float
    """The mean over its pictures."""
    clusters: tuple[Cluster, ...]
    rest: float
    """What cells that belong to no cluster contribute; negative evidence is here."""
    rest_positive: float
    """The share of positive evidence that is in no cluster."""
    residual: float
    bias: float

    @property
    def error(self) -> float:
        """Returns |Σ clusters + rest + residual + bias − mean logit|."""
        parts = [cluster.mean for cluster in self.clusters]
        return abs(sum(parts) + self.rest + self.residual + self.bias - self.logit)

    def terms(self) -> list[tuple[str, float]]:
        """Returns what adds up to the mean logit, by name."""
        named = [(f"Cluster {cluster.name}", cluster.mean) for cluster in self.clusters]
        rest = [("Other cells", self.rest), ("Residual", self.residual), ("Bias", self.bias)]
        return named + rest


def class_evidence(evidence: Evidence, *, seed: int = 0, processes: int = 1) -> list[ClassEvidence]:
    """Clusters the evidence of every class.

    Args:
        evidence: The store.
        seed: Of k-means.
        processes: How many processes look for clusters; they find the same ones.

    Returns:
        One entry per class that has pictures.

    Raises:
        ValueError: If scikit-learn is not installed.
    """
    require("sklearn.cluster", extra="audit", purpose="An audit")
    several = [_Strong.of(evidence, label) for label in np.unique(evidence.label).tolist()]
    points, sums = [each.points for each in several], [each.sums for each in several]
    counts = [int((evidence.label == each.label).sum()) for each in several]
    with ExitStack() as stack:
        mapped: Callable[..., Iterable[Groups]] = map
        if processes > 1 and len(several) > 1:
            # New ones, which share no GPU with this one.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(processes, len(several)), context)
            mapped = stack.enter_context(pool).map
        groups = mapped(_grouped, points, sums, counts, repeat(seed))
        return list(_classes(evidence, several, groups))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Strong:
    """The strong cells of a class."""

    label: int
    rows: Array
    """Positions among the strong cells of the evidence [m]."""
    sums: Array
    """Their contributions [m]."""
    points: Array
    """Their descriptors' principal components [m, d]."""
    project: Callable[[Array], Array]
    """From the descriptors of any cells to the same components."""

    @classmethod
    def of(cls, evidence: Evidence, label: int) -> "_Strong":
        own = evidence.label[evidence.cell_picture] == label
        rows = np.flatnonzero((evidence.cell_role == FOR_LABEL) & own)
        points, project = _components(evidence.descriptors[rows])
        return cls(
            label=label, rows=rows, sums=evidence.cell_sum[rows], points=points, project=project
        )


def _classes(
    evidence: Evidence, several: Iterable[_Strong], groups: Iterable[Groups]
) -> Iterator[ClassEvidence]:
    for strong, found in zip(several, groups, strict=True):
        label = strong.label
        mine = np.flatnonzero(evidence.label == label)
        cells = evidence.cells[mine, 0].astype(np.float64)
        positive = float(np.clip(cells, 0, None).sum())
        clusters = _clusters(evidence, strong, found, len(mine), positive)
        in_clusters = sum(cluster.mean for cluster in clusters)
        # From what the cells hold, not from what is left of the logit.
        rest = float(cells.sum()) / len(mine) - in_clusters
        yield ClassEvidence(
            label=label,
            name=evidence.settings.classes[label],
            pictures=len(mine),
            accuracy=float(evidence.correct[mine].mean()),
            logit=float(evidence.logit[mine, 0].mean()),
            clusters=tuple(clusters),
            rest=rest,
            rest_positive=max(0.0, 1 - sum(cluster.share for cluster in clusters)),
            residual=float(evidence.residual[mine, 0].mean()),
            bias=evidence.settings.bias,
        )


def _clusters(
    evidence: Evidence, strong: _Strong, grouped: Groups, pictures: int, positive: float
) -> list[Cluster]:
    label, rows, points = strong.label, strong.rows, strong.points
    if not len(rows):
        return []
    groups, dense = grouped
    scale = float(np.linalg.norm(points, axis=1).mean()) or 1.0
    own = evidence.label[evidence.cell_picture] == label
    others = np.flatnonzero((evidence.cell_role == FOR_LABEL) & ~own)
    thinned = max(1, len(others) // AT_MOST)
    foreign = strong.project(evidence.descriptors[others[::thinned]])
    found = []
    for group in range(groups.max() + 1):
        members = np.flatnonzero(groups == group)
        if not len(members):
            continue
        center = points[members].mean(0)
        away = np.linalg.norm(points[members] - center, axis=1)
        near = np.quantile(away, 0.9)
        alike = thinned * int((np.linalg.norm(foreign - center, axis=1) <= near).sum())
        mine = rows[members]
        seen = np.unique(evidence.cell_picture[mine])
        where = np.zeros(evidence.settings.grid**2)
        np.add.at(where, evidence.cell_index[mine], 1)
        covered = None
        if evidence.coverage is not None:
            flat = evidence.coverage.reshape(len(evidence), -1)
            inside = flat[evidence.cell_picture[mine], evidence.cell_index[mine]]
            known = inside[~np.isnan(inside)].astype(np.float64)
            covered = None if not len(known) else float(1 - known.mean())
        total = float(evidence.cell_sum[mine].sum())
        found.append(
            Cluster(
                label=label,
                number=0,
                rows=mine,
                pictures=seen,
                mean=total / pictures,
                share=total / positive if positive else 0.0,
                dense=group < dense,
                spread=float(away.mean()) / scale,
                where=where.reshape(evidence.settings.grid, -1) / len(seen),
                elsewhere=alike / (alike + len(mine)),
                off_object=covered,
            )
        )
    found.sort(key=lambda cluster: (-cluster.share, int(cluster.rows[0])))
    return [_numbered(cluster, number) for number, cluster in enumerate(found, 1)]


def _numbered(cluster: Cluster, number: int) -> Cluster:
    return Cluster(**{**cluster.__dict__, "number": number})


def _components(descriptors: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Principal components of cells, and the same projection for others."""
    if not len(descriptors):
        return np.zeros((0, DIMENSIONS)), lambda other: other[:, :DIMENSIONS]
    values = descriptors.astype(np.float64)
    center = values.mean(0)
    _, vectors = np.linalg.eigh((values - center).T @ (values - center))
    axes = vectors[:, ::-1][:, :DIMENSIONS]
    # The sign of an eigenvector is arbitrary.
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])
    return (values - center) @ axes, lambda other: (other.astype(np.float64) - center) @ axes


def _grouped(points: Array, sums: Array, pictures: int, seed: int) -> Groups:
    from sklearn.cluster import HDBSCAN, KMeans

    if not len(points):
        return np.zeros(0, np.int64), 0
    chosen = np.arange(len(points))
    if len(points) > AT_MOST:
        chosen = np.sort(np.random.default_rng(seed).permutation(len(points))[:AT_MOST])
    some, sums = points[chosen], sums[chosen]
    groups = np.full(len(some), -1)
    kept = min(1.0, AT_MOST / len(points))
    smallest = max(5, round(0.06 * pictures * kept))
    if len(some) >= 2 * smallest:
        groups = HDBSCAN(min_cluster_size=smallest, copy=True).fit_predict(some)
    scale = np.linalg.norm(some - some.mean(0), axis=1).mean()
    tight = [
        group
        for group in range(groups.max() + 1)
        if _spread(some[groups == group]) <= TIGHT * scale
    ]
    place = {group: number for number, group in enumerate(tight)}
    groups = np.array([place.get(group, -1) for group in groups.tolist()])
    # A cue that matters is among the strongest cells, even where few pictures have it.
    strong = sums >= np.quantile(sums, 1 - STRONGEST)
    count = len(tight)
    for parts, some_cells in ((STRONG, strong), (LOOSE, ~strong)):
        loose = np.flatnonzero((groups < 0) & some_cells)
        parts = min(parts, len(loose) // 5) or (1 if len(loose) else 0)
        if parts:
            found = KMeans(parts, n_init=4, random_state=seed).fit_predict(some[loose])
            groups[loose] = count + found
            count += parts
    if len(chosen) == len(points):
        return groups, len(tight)
    centers = np.stack([some[groups == group].mean(0) for group in range(groups.max() + 1)])
    every = np.linalg.norm(points[:, None] - centers[None], axis=2).argmin(1)
    every[chosen] = groups
    return every, len(tight)


def _spread(points: Array) -> float:
    """The mean distance from the center."""
    return float(np.linalg.norm(points - points.mean(0), axis=1).mean())

"""The report of an audit: one HTML page, tables as CSV and Parquet, and ``audit.json``.

Pictures are inlined. Where they would make the page larger than 20 MB, they are written to a folder
beside it instead and loaded when they come into view. Filters work by style sheets alone, so that
nothing runs in the browser.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from bcosvit.attribution import explain
from bcosvit.auditing.clusters import ClassEvidence, Cluster
from bcosvit.auditing.cues import Cells, Copied, Cue
from bcosvit.auditing.evidence import FOR_LABEL, Array, Evidence
from bcosvit.auditing.mistakes import Mistake, MistakeGroup, grouped
from bcosvit.auditing.repeats import EDGE
from bcosvit.auditing.suspicions import Suspicion
from bcosvit.files import atomic, read_regular
from bcosvit.metrics.accuracy import ClassAccuracy, class_accuracies
from bcosvit.metrics.evaluation import write_summary, write_table
from bcosvit.metrics.loader import Images
from bcosvit.predictor import Predictor
from bcosvit.report.images import RGB, Picture, photo_image, weight_image
from bcosvit.report.pages import write_page
from bcosvit.report.provenance import Provenance
from bcosvit.report.tables import confusion_matrix

REPORT, SUMMARY, PICTURES = "report.html", "audit.json", "pictures"
SUMMARY_BYTES = 200_000_000
"""Of ``audit.json``, which lists the pictures of every class and cluster."""
INLINE = 16_000_000
"""Bytes of pictures above which they get files of their own; a page stays below 20 MB."""
EXAMPLES = 4
"""Pictures that are shown of a cluster."""
BAR = (200, 48, 47)
"""The color of bars and of places."""
SIDE = 112
"""The width of pictures in pixels."""
SHOWN = 24
"""Mistakes and other pictures of a list that are shown; tables have all."""
LISTED = 8
"""Suspicions that are shown."""
DETAILED = 100
"""Classes of which clusters are shown; tables have all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
    """What `bcosvit.audit` has found."""

    evidence: Evidence
    classes: Sequence[ClassEvidence]
    suspicions: Sequence[Suspicion]
    """The most suspicious first."""
    mistakes: Sequence[Mistake]
    """The most confident first."""
    folder: Path

    @property
    def significant(self) -> list[Suspicion]:
        """The suspicions that are significant."""
        return [each for each in self.suspicions if each.significant]

    @property
    def groups(self) -> list[MistakeGroup]:
        """Mistakes by what misled the model."""
        return grouped(self.mistakes)

    @property
    def accuracies(self) -> list[ClassAccuracy]:
        """The accuracy of every class."""
        return class_accuracies(self.evidence.label.tolist(), self.evidence.predicted.tolist())

    def name(self, label: int) -> str:
        """Returns the name of a class."""
        return self.evidence.settings.classes[label]

    def wrong_reason(self) -> list[int]:
        """Returns pictures that are right for the wrong reason, the worst first.

        They are classified as labeled, and less of the evidence is on the object than the object's
        share of the picture.
        """
        on = self.evidence.on_object
        if on is None:
            return []
        share, area = on[:, 0].astype(np.float64), on[:, 1].astype(np.float64)
        below = np.flatnonzero(self.evidence.correct & (share < area))
        return below[np.argsort(share[below] / area[below], kind="stable")].tolist()

    def summary(self) -> dict[str, Any]:
        """Returns what was found, fit for JSON."""
        evidence = self.evidence
        return {
            "pictures": len(evidence),
            "repeated": evidence.repeated,
            "accuracy": float(evidence.correct.mean()),
            "contributions_miss_logits_by": evidence.completeness(),
            "clusters_miss_mean_logits_by": max(each.error for each in self.classes),
            "significant": len(self.significant),
            "suspicions": [suspicion_row(each) for each in self.suspicions],
            "classes": [
                {
                    "label": each.label,
                    "class": each.name,
                    "logit": each.logit,
                    "terms": dict(each.terms()),
                    "pictures": evidence.index[evidence.label == each.label].tolist(),
                }
                for each in self.classes
            ],
            "clusters": {
                cluster.name: evidence.index[cluster.pictures].tolist()
                for each in self.classes
                for cluster in each.clusters
            },
            "mistakes": [int(evidence.index[each.picture]) for each in self.mistakes],
            "settings": {
                key: value for key, value in vars(evidence.settings).items() if key != "classes"
            },
        }


_MEASURED = (
    *("significant", "verdict", "score", "pictures", "class_pictures", "share"),
    *("turned", "turned_control", "effect", "effect_low", "effect_high", "transfers"),
    *("lost", "lost_control", "removals", "needed", "repeats"),
    *("accuracy_with", "accuracy_without", "p", "p_corrected"),
)
"""The columns of a suspicion, in this order."""


def suspicion_row(found: Suspicion) -> dict[str, Any]:
    """Returns a suspicion as a row of a table."""
    named = {"name": found.cue.name, "class": found.class_name, "kind": found.cue.kind}
    return named | {name: getattr(found, name.removeprefix("effect_")) for name in _MEASURED}


def write_audit(
    audit: Audit,
    predictor: Predictor,
    pictures: Images,
    *,
    facts: Mapping[str, str],
    command: str,
) -> None:
    """Writes the report and the tables of an audit to its folder.

    Args:
        audit: What was found.
        predictor: The model.
        pictures: The data.
        facts: What the report says about model, weights and data.
        command: The command that makes the same report again.
    """
    write_summary(audit.folder / SUMMARY, audit.summary())
    for name, columns in _tables(audit).items():
        write_table(audit.folder / f"{name}.csv", _rows(columns))
        _write_parquet(audit.folder / f"{name}.parquet", columns)
    gallery = _Gallery(predictor, pictures, audit.evidence)
    view = _view(audit, gallery)
    gallery.settle(audit.folder)
    made = Provenance.of({"audit": audit.summary()["settings"], "model": predictor.config})
    write_page(
        audit.folder / REPORT,
        "auditing/templates/audit.html.jinja",
        facts=facts,
        provenance=Provenance(command=command, versions=made.versions, config=made.config),
        image_sources="data:" if gallery.inline else "data: file: 'self'",
        audit=audit,
        fewest=Cue.fewest,
        **view,
    )


Columns = Mapping[str, Sequence[Any] | Array]
"""A table by column."""


def _tables(audit: Audit) -> dict[str, Columns]:
    evidence, confidence = audit.evidence, audit.evidence.confidence
    of_cell = np.full(len(evidence.cell_picture), "", dtype=object)
    for each in audit.classes:
        for cluster in each.clusters:
            of_cell[cluster.rows] = cluster.name
    pictures: dict[str, Sequence[Any] | Array] = {
        "index": evidence.index,
        "key": evidence.keys,
        "label": [audit.name(label) for label in evidence.label.tolist()],
        "predicted": [audit.name(label) for label in evidence.predicted.tolist()],
        "correct": evidence.correct,
        "confidence": confidence[:, 1],
        "label_confidence": confidence[:, 0],
        "logit": evidence.logit[:, 1],
        "label_logit": evidence.logit[:, 0],
        "label_residual": evidence.residual[:, 0],
    }
    if evidence.on_object is not None:
        for column, name in enumerate(("on_object", "object_area")):
            pictures[name] = [_known(value) for value in evidence.on_object[:, column].tolist()]
    return {
        "pictures": pictures,
        "cells": {
            "index": evidence.index[evidence.cell_picture],
            "cell": evidence.cell_index,
            "misleading": evidence.cell_role != FOR_LABEL,
            "contribution": evidence.cell_sum,
            "cluster": of_cell,
        },
        "clusters": _columns(
            {
                "name": cluster.name,
                "class": each.name,
                "pictures": len(cluster.pictures),
                "cells": len(cluster.rows),
                "mean": cluster.mean,
                "share": cluster.share,
                "dense": cluster.dense,
                "spread": cluster.spread,
                "elsewhere": cluster.elsewhere,
                "off_object": cluster.off_object,
            }
            for each in audit.classes
            for cluster in each.clusters
        ),
        "suspicions": _columns(suspicion_row(each) for each in audit.suspicions),
        "mistakes": _columns(
            {
                "index": int(evidence.index[each.picture]),
                "key": evidence.keys[each.picture],
                "label": audit.name(each.label),
                "predicted": audit.name(each.predicted),
                "confidence": each.confidence,
                "label_confidence": each.label_confidence,
                "gap": each.gap,
                "misled_by": each.misled_by or "",
                "likely_wrong_label": each.wrong_label,
            }
            for each in audit.mistakes
        ),
    }


def _columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    found = list(rows)
    return {name: [row[name] for row in found] for name in found[0]} if found else {}


def _rows(columns: Columns, at_once: int = 10_000) -> Iterator[dict[str, Any]]:
    """The rows of a table, of which few are objects at the same time."""
    count = len(next(iter(columns.values()), ()))
    for start in range(0, count, at_once):
        parts = [column[start : start + at_once] for column in columns.values()]
        values = [part.tolist() if isinstance(part, np.ndarray) else part for part in parts]
        for row in zip(*values, strict=True):
            yield dict(zip(columns, row, strict=True))


def _known(value: float) -> float | None:
    return None if value != value else value


def _write_parquet(path: Path, columns: Columns) -> None:
    """Where pyarrow is installed; CSV files hold the same."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    if columns:
        # Names of files need not be valid Unicode; in the CSV files they are written alike.
        valid = {name: _valid(column) for name, column in columns.items()}
        with atomic(path) as temporary:
            pyarrow.parquet.write_table(pyarrow.table(valid), temporary)


def _valid(column: Sequence[Any] | Array) -> Sequence[Any] | Array:
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column
    return [
        each.encode("utf-8", "backslashreplace").decode() if isinstance(each, str) else each
        for each in column
    ]


@dataclass
class Shown:
    """A picture of the page."""

    picture: Picture
    source: str = ""
    """The data, or a file of its own."""


class _Gallery:
    """Makes the pictures of a page, each once."""

    def __init__(self, predictor: Predictor, pictures: Images, evidence: Evidence) -> None:
        self.predictor, self.pictures, self.evidence = predictor, pictures, evidence
        self.shown: list[Shown] = []
        self.inline = True
        self._read: dict[int, RGB] = {}
        self._colors: dict[tuple[int, int], RGB] = {}

    def photo(self, number: int) -> RGB:
        if number not in self._read:
            if len(self._read) > 500:
                self._read.clear()
            image = self.pictures[int(self.evidence.index[number])][0]
            self._read[number] = photo_image(image)
        return self._read[number]

    def add(self, image: RGB, alt: str, side: int = SIDE) -> Shown:
        small = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=85)
        self.shown.append(Shown(Picture(data=buffer.getvalue(), alt=alt, width=side, height=side)))
        return self.shown[-1]

    def whole(self, number: int, cells: Array | None = None, *, edge: bool = False) -> Shown:
        """A picture; the cells are framed, or the edge is."""
        photo = Image.fromarray(self.photo(number)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        grid = self.evidence.settings.grid
        if edge:
            wide = round(EDGE * SIDE)
            inner = (wide, wide, SIDE - 1 - wide, SIDE - 1 - wide)
            ImageDraw.Draw(photo).rectangle(inner, outline=(255, 45, 45), width=2)
        if cells is not None:
            draw, chosen = ImageDraw.Draw(photo), np.zeros((grid + 2, grid + 2), np.bool_)
            chosen[1:-1, 1:-1].flat[cells] = True
            for row, column in np.argwhere(chosen).tolist():
                x, y = ((at - 1) * SIDE / grid for at in (column, row))
                right, bottom = x + SIDE / grid - 1, y + SIDE / grid - 1
                # Cells that touch share one frame.
                for across, down, line in (
                    (-1, 0, (x, y, x + 1, bottom)),
                    (1, 0, (right - 1, y, right, bottom)),
                    (0, -1, (x, y, right, y + 1)),
                    (0, 1, (x, bottom - 1, right, bottom)),
                ):
                    if not chosen[row + down, column + across]:
                        draw.rectangle(line, fill=(255, 45, 45))
        return self.add(np.asarray(photo), self.evidence.keys[number])

    def overlay(self, number: int, cells: Array) -> Shown:
        """A picture in gray with contributions of cells [G, G] in red and blue."""
        photo = np.asarray(Image.fromarray(self.photo(number)).resize((SIDE, SIDE)))
        gray = (photo @ np.array([0.299, 0.587, 0.114]))[..., None]
        values = np.asarray(
            Image.fromarray(cells.astype(np.float32)).resize(
                (SIDE, SIDE), Image.Resampling.BILINEAR
            )
        )
        strength = np.clip(values / max(float(np.abs(cells).max()), 1e-12), -1, 1)[..., None]
        color = np.where(strength > 0, [206.0, 24.0, 38.0], [33.0, 72.0, 196.0])
        cover = 0.75 * np.abs(strength)
        return self.add(
            np.rint((1 - cover) * gray + cover * color).astype(np.uint8),
            f"Evidence in {self.evidence.keys[number]}",
        )

    def cutouts(self, number: int, cells: Array, label: int) -> tuple[Shown, Shown]:
        """The cells' surroundings, and the same in the colors of W(x)."""
        photo, grid = self.photo(number), self.evidence.settings.grid
        top, left = divmod(int(cells[0]), grid)
        height, width = photo.shape[:2]
        half = 1.5 * height / grid
        middle = ((top + 0.5) * height / grid, (left + 0.5) * width / grid)
        y, x = (int(np.clip(m - half, 0, height - 2 * half)) for m in middle)
        part = (slice(y, y + int(2 * half)), slice(x, x + int(2 * half)))
        colors = self.colors(number, label)
        key = self.evidence.keys[number]
        return (
            self.add(photo[part], f"Part of {key}", 64),
            self.add(colors[part], f"The same part in the colors of W(x), {key}", 64),
        )

    def colors(self, number: int, label: int) -> RGB:
        """A picture in the colors of W(x)."""
        if (number, label) not in self._colors:
            self.explain([number], label)
        return self._colors[number, label]

    def explain(self, numbers: Iterable[int], label: int) -> None:
        """Makes pictures in the colors of W(x), several at once: all that a class shows."""
        new = [each for each in dict.fromkeys(numbers) if (each, label) not in self._colors]
        if len(self._colors) > 100:
            # Those of other classes are not asked for again.
            self._colors = {key: each for key, each in self._colors.items() if key[1] == label}
        reference = next(self.predictor.model.parameters())
        size = self.evidence.settings.batch_size
        for start in range(0, len(new), size):
            some = new[start : start + size]
            images = [self.pictures[int(self.evidence.index[number])][0] for number in some]
            found = explain(self.predictor.model, torch.stack(images).to(reference), label)
            for row, number in enumerate(some):
                colors = weight_image(found, row)
                assert colors is not None
                self._colors[number, label] = colors

    def settle(self, folder: Path) -> None:
        """Decides where the pictures are."""
        self.inline = sum(4 * len(each.picture.data) // 3 for each in self.shown) <= INLINE
        for number, each in enumerate(self.shown):
            if self.inline:
                each.source = each.picture.source
                continue
            each.source = f"{PICTURES}/{number:06d}.jpg"
            with atomic(folder / each.source) as temporary:
                temporary.write_bytes(each.picture.data)


def _view(audit: Audit, gallery: _Gallery) -> dict[str, Any]:
    """What the template shows."""
    evidence = audit.evidence
    on = evidence.on_object
    known = np.zeros(0, np.int64) if on is None else np.flatnonzero(~np.isnan(on[:, 0]))
    return {
        "suspicions": [_suspicion(audit, gallery, each) for each in audit.suspicions[:LISTED]],
        "classes": [_class(gallery, each, evidence) for each in _detailed(audit)],
        "accuracies": audit.accuracies,
        "confusion": confusion_matrix(audit.accuracies),
        "groups": [
            {
                "group": group,
                "examples": [_mistake(gallery, evidence, m) for m in group.mistakes[:EXAMPLES]],
            }
            for group in audit.groups[:SHOWN]
        ],
        "mistakes": [_mistake(gallery, evidence, m) for m in audit.mistakes[:SHOWN]],
        "wrong_labels": [
            _mistake(gallery, evidence, m)
            for m in [m for m in audit.mistakes if m.wrong_label][:12]
        ],
        "on_object": [] if on is None else _per_class_on_object(audit, known),
        "wrong_reason": [
            {
                "number": n,
                "shown": [gallery.whole(n), gallery.overlay(n, evidence.cells[n, 0])],
                "share": float(evidence.on_object[n, 0]),  # type: ignore[index]
                "area": float(evidence.on_object[n, 1]),  # type: ignore[index]
            }
            for n in audit.wrong_reason()[:12]
        ],
        "with_masks": len(known),
    }


def _suspicion(audit: Audit, gallery: _Gallery, found: Suspicion) -> dict[str, Any]:
    evidence, cue = audit.evidence, found.cue
    if found.affected:
        numbers = [number for number, _ in found.affected[:EXAMPLES]]
    elif isinstance(cue, Cells):
        numbers = _best(evidence, cue.cluster)
    else:
        numbers = cue.members(evidence)[:EXAMPLES].tolist()
    examples = []
    for number in numbers:
        cells = cue.cells_of(evidence, number) if isinstance(cue, Cells | Copied) else None
        shown = [gallery.whole(number, cells, edge=cue.kind == "edge")]
        if cells is not None:
            shown += gallery.cutouts(number, cells, cue.label)
        examples.append({"number": number, "shown": shown})
    return {"found": found, "examples": examples}


def _best(evidence: Evidence, cluster: Cluster) -> list[int]:
    """The pictures in which a cluster is strongest."""
    sums = np.bincount(
        evidence.cell_picture[cluster.rows], evidence.cell_sum[cluster.rows], len(evidence)
    )
    return np.argsort(-sums, kind="stable")[:EXAMPLES].tolist()


def _detailed(audit: Audit) -> list[ClassEvidence]:
    """The classes of which clusters are shown: those of suspicions, then the worst ones."""
    suspicious = [each.cue.label for each in audit.suspicions[:LISTED]]
    order = sorted(audit.classes, key=lambda e: (e.label not in suspicious, e.accuracy, e.label))
    return sorted(order[:DETAILED], key=lambda each: each.label)


def _class(gallery: _Gallery, own: ClassEvidence, evidence: Evidence) -> dict[str, Any]:
    clusters = []
    best = [_best(evidence, cluster) for cluster in own.clusters]
    gallery.explain((number for numbers in best for number in numbers), own.label)
    for cluster, numbers in zip(own.clusters, best, strict=True):
        examples = []
        for number in numbers:
            cells = cluster.cells_of(evidence, number)
            if len(cells):
                shown = [gallery.whole(number, cells), *gallery.cutouts(number, cells, own.label)]
                examples.append({"number": number, "shown": shown})
        where = _where(cluster.where, f"Where cluster {cluster.name} sits")
        clusters.append({"cluster": cluster, "examples": examples, "where": where})
    largest = max(abs(value) for _, value in own.terms()) or 1.0
    return {"own": own, "clusters": clusters, "largest": largest}


def _mistake(gallery: _Gallery, evidence: Evidence, mistake: Mistake) -> dict[str, Any]:
    number = mistake.picture
    difference = evidence.cells[number, 1] - evidence.cells[number, 0]
    return {
        "mistake": mistake,
        "number": number,
        "shown": [gallery.whole(number), gallery.overlay(number, difference)],
    }


def _where(often: Array, alt: str) -> Picture:
    """How often a cluster is in each cell, as a picture with one pixel per cell."""
    cover = np.rint(255 * often / (often.max() or 1)).astype(np.uint8)
    color = np.broadcast_to(np.array(BAR, np.uint8), (*cover.shape, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.dstack([color, cover])).save(buffer, "PNG")
    return Picture(data=buffer.getvalue(), alt=alt, width=cover.shape[1], height=cover.shape[0])


def _per_class_on_object(audit: Audit, known: Array) -> list[dict[str, Any]]:
    evidence = audit.evidence
    assert evidence.on_object is not None
    found = []
    for each in audit.classes:
        mine = known[evidence.label[known] == each.label]
        if len(mine):
            share, area = evidence.on_object[mine].astype(np.float64).mean(0).tolist()
            found.append({"class": each.name, "pictures": len(mine), "share": share, "area": area})
    return sorted(found, key=lambda row: row["share"] / max(row["area"], 1e-9))


def read_summary(folder: str | Path) -> dict[str, Any]:
    """Reads what an audit has found.

    Raises:
        ValueError: If the folder holds no finished audit.
    """
    try:
        return dict(json.loads(read_regular(Path(folder, SUMMARY), SUMMARY_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds no finished audit; give the folder that `bcosvit audit` has written."
        ) from error

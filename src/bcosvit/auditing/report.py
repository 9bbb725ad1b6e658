"""The report of an audit: one HTML page, tables as CSV and Parquet, and ``audit.json``.

Pictures are inlined. Where they would make the page larger than 20 MB, they are written to a folder
beside it instead and loaded when they come into view. Filters work by style sheets alone, so that
nothing runs in the browser.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from bcosvit.attribution import explain
from bcosvit.attribution.color import SMOOTH, color_image
from bcosvit.auditing.clusters import ClassEvidence, Cluster
from bcosvit.auditing.evidence import Array, Evidence
from bcosvit.auditing.mistakes import Mistake, MistakeGroup, grouped
from bcosvit.auditing.suspicions import KINDS, Suspicion
from bcosvit.files import atomic
from bcosvit.metrics.accuracy import ClassAccuracy, class_accuracies
from bcosvit.metrics.evaluation import write_summary, write_table
from bcosvit.metrics.loader import Images
from bcosvit.predictor import Predictor
from bcosvit.report.images import RGB, Picture, on_white, photo_image
from bcosvit.report.pages import write_page
from bcosvit.report.provenance import Provenance

REPORT, SUMMARY, PICTURES = "report.html", "audit.json", "pictures"
INLINE = 20_000_000
"""Bytes of pictures above which they get files of their own."""
EXAMPLES = 4
"""Pictures that are shown of a cluster."""
SIDE = 112
"""The width of pictures in pixels."""
SHOWN = 24
"""Mistakes and other pictures of a list that are shown; tables have all."""
LISTED = 8
"""Suspicions that are shown."""
CONFUSED = 20
"""Classes up to which the confusion matrix is shown whole."""


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
                {"class": each.name, "logit": each.logit, "terms": dict(each.terms())}
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


def suspicion_row(found: Suspicion) -> dict[str, Any]:
    """Returns a suspicion as a row of a table."""
    return {
        "name": found.candidate.name,
        "class": found.class_name,
        "kind": found.candidate.kind,
        "significant": found.significant,
        "score": found.score,
        "pictures": found.pictures,
        "share": found.share,
        "turned": found.turned,
        "turned_control": found.turned_control,
        "effect_low": found.low,
        "effect_high": found.high,
        "transfers": found.transfers,
        "lost": found.lost,
        "lost_control": found.lost_control,
        "removals": found.removals,
        "accuracy_with": found.accuracy_with,
        "accuracy_without": found.accuracy_without,
        "p": found.p,
        "p_corrected": found.p_corrected,
    }


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
    for name, rows in _tables(audit).items():
        write_table(audit.folder / f"{name}.csv", rows)
        _write_parquet(audit.folder / f"{name}.parquet", rows)
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
        **view,
    )


def _tables(audit: Audit) -> dict[str, list[dict[str, Any]]]:
    evidence = audit.evidence
    of_cell = np.full(len(evidence.cell_picture), "", dtype=object)
    for each in audit.classes:
        for cluster in each.clusters:
            of_cell[cluster.rows] = cluster.name
    confidence = evidence.confidence
    rows = []
    for n, key in enumerate(evidence.keys):
        row = {
            "index": int(evidence.index[n]),
            "key": key,
            "label": audit.name(int(evidence.label[n])),
            "predicted": audit.name(int(evidence.predicted[n])),
            "correct": bool(evidence.correct[n]),
            "confidence": float(confidence[n, 1]),
            "label_confidence": float(confidence[n, 0]),
            "logit": float(evidence.logit[n, 1]),
            "label_logit": float(evidence.logit[n, 0]),
            "label_residual": float(evidence.residual[n, 0]),
        }
        if evidence.on_object is not None:
            share, area = evidence.on_object[n].tolist()
            row |= {"on_object": _known(share), "object_area": _known(area)}
        rows.append(row)
    return {
        "pictures": rows,
        "cells": [
            {
                "index": int(evidence.index[picture]),
                "cell": int(cell),
                "misleading": bool(role),
                "contribution": float(value),
                "cluster": str(name),
            }
            for picture, cell, role, value, name in zip(
                evidence.cell_picture,
                evidence.cell_index,
                evidence.cell_role,
                evidence.cell_sum,
                of_cell,
                strict=True,
            )
        ],
        "clusters": [
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
        ],
        "suspicions": [suspicion_row(each) for each in audit.suspicions],
        "mistakes": [
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
        ],
    }


def _known(value: float) -> float | None:
    return None if value != value else value


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Where pyarrow is installed; CSV files hold the same."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    if not rows:
        return
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    with atomic(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)


class Shown:
    """A picture of the page, inlined or in a file of its own."""

    def __init__(self, picture: Picture, number: int | None) -> None:
        self.picture, self.number, self.source = picture, number, ""

    @property
    def alt(self) -> str:
        return self.picture.alt

    @property
    def width(self) -> int:
        return self.picture.width

    @property
    def height(self) -> int:
        return self.picture.height


class _Gallery:
    """Makes the pictures of a page, each once."""

    def __init__(self, predictor: Predictor, pictures: Images, evidence: Evidence) -> None:
        self.predictor, self.pictures, self.evidence = predictor, pictures, evidence
        self.shown: list[Shown] = []
        self.inline = True
        self._read: dict[int, RGB] = {}

    def photo(self, number: int) -> RGB:
        if number not in self._read:
            if len(self._read) > 500:
                self._read.clear()
            image = self.pictures[int(self.evidence.index[number])][0]
            self._read[number] = photo_image(image)
        return self._read[number]

    def add(self, image: RGB, alt: str, number: int | None, side: int = SIDE) -> Shown:
        small = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=85)
        picture = Picture(data=buffer.getvalue(), alt=alt, width=side, height=side)
        shown = Shown(picture, number)
        self.shown.append(shown)
        return shown

    def whole(self, number: int, cells: Array | None = None) -> Shown:
        """A picture; the cells are framed."""
        photo = Image.fromarray(self.photo(number)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        grid = self.evidence.settings.grid
        if cells is not None:
            draw = ImageDraw.Draw(photo)
            for cell in cells.tolist():
                top, left = divmod(cell, grid)
                box = [left * SIDE / grid, top * SIDE / grid]
                box += [(left + 1) * SIDE / grid - 1, (top + 1) * SIDE / grid - 1]
                draw.rectangle(box, outline=(255, 45, 45), width=2)
        return self.add(np.asarray(photo), self.evidence.keys[number], number)

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
            number,
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
        reference = next(self.predictor.model.parameters())
        image = self.pictures[int(self.evidence.index[number])][0]
        found = explain(self.predictor.model, image[None].to(reference), label)
        assert found.weights is not None
        smooth = max(1, round(SMOOTH * width / 224))
        colors = on_white(color_image(found.weights[0], found.map[0], smooth=smooth))
        key = self.evidence.keys[number]
        return (
            self.add(photo[part], f"Part of {key}", number, 64),
            self.add(colors[part], f"The same part in the colors of W(x), {key}", number, 64),
        )

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
        "kinds": KINDS,
        "suspicions": [_suspicion(audit, gallery, each) for each in audit.suspicions[:LISTED]],
        "classes": [_class(gallery, each, evidence) for each in audit.classes],
        "accuracies": audit.accuracies,
        "confusion": _confusion(audit) if len(audit.classes) <= CONFUSED else None,
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
    evidence, cluster = audit.evidence, found.candidate.cluster
    if found.affected:
        numbers = [number for number, _ in found.affected[:EXAMPLES]]
    elif cluster is not None:
        numbers = _best(evidence, cluster)
    else:
        numbers = np.flatnonzero(evidence.label == found.candidate.label)[:EXAMPLES].tolist()
    grid = evidence.settings.grid
    edge = np.ones((grid, grid), np.bool_)
    edge[1:-1, 1:-1] = False
    examples = []
    for number in numbers:
        cells = None
        if cluster is not None:
            cells = cluster.cells_of(evidence, number)
        elif found.candidate.kind == "edge":
            cells = np.flatnonzero(edge)
        shown = [gallery.whole(number, cells)]
        if cluster is not None and cells is not None:
            shown += gallery.cutouts(number, cells, found.candidate.label)
        examples.append({"number": number, "shown": shown})
    return {"found": found, "examples": examples}


def _best(evidence: Evidence, cluster: Cluster) -> list[int]:
    """The pictures in which a cluster is strongest."""
    sums = np.bincount(
        evidence.cell_picture[cluster.rows], evidence.cell_sum[cluster.rows], len(evidence)
    )
    return np.argsort(-sums, kind="stable")[:EXAMPLES].tolist()


def _class(gallery: _Gallery, own: ClassEvidence, evidence: Evidence) -> dict[str, Any]:
    clusters = []
    for cluster in own.clusters:
        examples = []
        for number in _best(evidence, cluster):
            cells = cluster.cells_of(evidence, number)
            if len(cells):
                shown = [gallery.whole(number, cells), *gallery.cutouts(number, cells, own.label)]
                examples.append({"number": number, "shown": shown})
        clusters.append({"cluster": cluster, "examples": examples})
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


def _confusion(audit: Audit) -> tuple[list[int], list[list[int]]]:
    """Labels of rows and columns, and how often each was predicted for each."""
    evidence = audit.evidence
    names = np.unique(np.concatenate([evidence.label, evidence.predicted]))
    counts = [
        [int(((evidence.label == a) & (evidence.predicted == b)).sum()) for b in names]
        for a in names
    ]
    return names.tolist(), counts


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
        return dict(json.loads(Path(folder, SUMMARY).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no finished audit; give the folder that `bcosvit audit` has written."
        ) from error

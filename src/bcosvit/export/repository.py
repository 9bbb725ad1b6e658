"""A folder as the Hugging Face hub wants it, its card with pictures of explained scenes.

The pictures are drawn, so that a card never shows somebody's photograph.
"""

from pathlib import Path

import numpy as np

from bcosvit.export.compare import drawn
from bcosvit.models.pretrained import locate
from bcosvit.models.weights import read_metadata
from bcosvit.report.explained import Lens, colors
from bcosvit.report.figures import (
    Tile,
    method_image,
    on_white,
    panel,
    photo_image,
    png_bytes,
)
from bcosvit.report.subject import Subject

PICTURE = "explained.png"
SCENES = 4


def export_repository(weights: str | Path, folder: str | Path) -> None:
    """Writes the model in ``weights`` to ``folder`` with its class names and a card."""
    path = locate(weights)
    subject = Subject.load(path, "cpu")
    pictures = {PICTURE: explained_scenes(subject)}
    subject.model.save_pretrained(folder, metadata=read_metadata(path), pictures=pictures)


def explained_scenes(subject: Subject) -> bytes:
    """A PNG: a row of drawn scenes, and below each the map of its predicted class."""
    lens = Lens(model=subject.model, methods=subject.methods(None))
    columns = []
    for number, image in enumerate(drawn(subject, SCENES)):
        found = lens(number, f"scene {number}", image)
        method, attribution = next(iter(found.attributions.items()))
        column = [
            Tile(
                image=photo_image(image),
                label=f"seen as {subject.names[int(found.target[0])]}",
            ),
            Tile(image=method_image(method, attribution.map[0]), label=method),
        ]
        if found.inherent is not None:
            column.append(Tile(image=on_white(colors(found.inherent, 0)), label="W(x) in color"))
        columns.append(column)
    return png_bytes(np.asarray(panel(list(zip(*columns, strict=True)))))

"""A folder for the Hugging Face hub, whose model card shows explained scenes.

The scenes are drawn, so that a card never shows somebody's photograph.
"""

from pathlib import Path

import numpy as np

from bcosvit.export.compare import drawn
from bcosvit.files import locked_folder
from bcosvit.models.hub import locate
from bcosvit.models.weights import read_metadata
from bcosvit.predictor import Predictor
from bcosvit.report.images import (
    Tile,
    colors,
    method_image,
    on_white,
    panel,
    photo_image,
    png_bytes,
)

PICTURE = "explained.png"
SCENES = 4


def export_repository(weights: str | Path, folder: str | Path) -> None:
    """Writes a model as a folder that can be uploaded to the Hugging Face hub.

    Args:
        weights: The model, as ``bcosvit.load`` takes it.
        folder: Gets the weights with their class names, the config, and a model card with explained
            scenes.

    Raises:
        ValueError: There are no such weights.
    """
    path = locate(weights)
    with locked_folder(folder):
        predictor = Predictor.load(path, "cpu")
        pictures = {PICTURE: explained_scenes(predictor)}
        predictor.model.save_pretrained(folder, metadata=read_metadata(path), pictures=pictures)


def explained_scenes(predictor: Predictor) -> bytes:
    """A PNG with a row of drawn scenes, and below each the map of its predicted class."""
    columns = []
    for number, image in enumerate(drawn(predictor, SCENES)):
        found = predictor.explain(image, name=f"scene {number}")
        method, attribution = next(iter(found.attributions.items()))
        column = [
            Tile(
                image=photo_image(image),
                label=f"seen as {predictor.class_names[int(found.target[0])]}",
            ),
            Tile(image=method_image(method, attribution.map[0]), label=method),
        ]
        if found.exact is not None:
            column.append(Tile(image=on_white(colors(found.exact, 0)), label="W(x) in color"))
        columns.append(column)
    return png_bytes(np.asarray(panel(list(zip(*columns, strict=True)))))

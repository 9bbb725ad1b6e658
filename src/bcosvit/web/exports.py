"""Files to take away: a report, arrays, or one picture with a row for each picture."""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bcosvit.attribution import method_title
from bcosvit.predictor import Explanation
from bcosvit.report.explain_files import npz_files
from bcosvit.report.explain_html import About, explain_page
from bcosvit.report.figures import (
    Tile,
    colors,
    contribution_scales,
    method_image,
    on_white,
    overlay_image,
    panel,
    photo_image,
)
from bcosvit.report.provenance import versions
from bcosvit.web.answers import Answers, Picture

NAME = "bcosvit"
"""Of the files, before the ending."""


def export(
    answers: Answers,
    chosen: Sequence[tuple[Picture, int]],
    methods: str,
    kind: str,
    folder: str | Path,
) -> Path:
    """One file in ``folder`` about pictures, each with the class to explain.

    ``kind`` is html, npz or png; ``methods`` are names with commas between them, "" the first one
    that applies. Several NPZ files come in a zip file.
    """
    if kind not in KINDS:
        raise ValueError(f"There is no kind of file {kind!r}; choose from {', '.join(KINDS)}.")
    if not chosen:
        raise ValueError("There is no picture: upload one first.")
    predictor = answers.predictor
    used = predictor.methods(methods or None)
    # Of the weights only the name: where they lie is nobody's business.
    weights = Path(predictor.weights).name
    about = About(
        weights=weights,
        model=predictor.describe(),
        config=predictor.config,
        classes=predictor.class_names,
        methods=used,
        joint=False,
        command=f"bcosvit serve --weights {weights}",
        versions=versions(),
    )
    found = [
        predictor.explain(each.image, (label,), methods=used, name=each.name, number=number)
        for number, (each, label) in enumerate(chosen, start=1)
    ]
    return KINDS[kind](found, about, Path(folder))


def _html(found: Sequence[Explanation], about: About, folder: Path) -> Path:
    path = folder / f"{NAME}.html"
    with explain_page(path, about) as add:
        for each in found:
            add(each)
    return path


def _npz(found: Sequence[Explanation], about: About, folder: Path) -> Path:
    with npz_files(folder / NAME, about) as add:
        for each in found:
            add(each)
    files = sorted(Path(folder, NAME).iterdir())
    if len(files) == 1:
        return files[0]
    path = folder / f"{NAME}.zip"
    # The arrays are compressed already.
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, file.name)
    return path


def _png(found: Sequence[Explanation], about: About, folder: Path) -> Path:
    path = folder / f"{NAME}.png"
    panel([_row(each, about) for each in found]).save(path)
    return path


def _row(found: Explanation, about: About) -> list[Tile]:
    photo, label = photo_image(found.image), int(found.target[0])
    tiles = [Tile(image=photo, label=found.name)]
    for method, attribution in found.attributions.items():
        (full,) = contribution_scales(attribution.map, joint=about.joint)
        image = method_image(method, attribution.map[0], full)
        tiles.append(Tile(image=image, label=method_title(method)))
        if len(tiles) == 2:
            over = overlay_image(photo, method, attribution.map[0], full)
            tiles.append(Tile(image=over, label=about.classes[label]))
    if found.exact is not None:
        tiles.append(Tile(image=on_white(colors(found.exact, 0)), label="W(x) in color"))
    return tiles


KINDS: dict[str, Callable[[Sequence[Explanation], About, Path], Path]] = {
    "html": _html,
    "npz": _npz,
    "png": _png,
}

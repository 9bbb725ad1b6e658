"""`bcosvit explain`: reads pictures one after the other, explains them, writes what is asked for.

A picture is forgotten before the next one is read, whatever is written, so that memory does not
grow with their number. One that cannot be read is listed and passed over; only where none can be
read there is nothing to report, which is an error.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bcosvit.data.dataset import Skipped
from bcosvit.data.images import ImageError, list_images
from bcosvit.predictor import Explanation, Predictor
from bcosvit.report.explain_files import json_file, npz_files, png_files
from bcosvit.report.explain_html import About, explain_page
from bcosvit.report.provenance import command_line, versions


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the pictures."""

    explained: int
    skipped: tuple[Skipped, ...]

    def told(self, out: str | Path) -> str:
        """In a sentence or two, for the terminal."""
        count = len(self.skipped)
        left_out = f"; {count} could not be read, which it lists" if count else ""
        pictures = "1 picture" if self.explained == 1 else f"{self.explained} pictures"
        return f"{pictures} explained{left_out}: {out}"


def explain_pictures(
    inputs: Sequence[str | Path],
    weights: str | Path,
    *,
    classes: str | None = None,
    top: int | None = None,
    methods: str | None = None,
    out: str | Path | None = "report.html",
    npz: str | Path | None = None,
    png: str | Path | None = None,
    json: str | Path | None = None,
    joint: bool = False,
    device: str = "auto",
    console: Console | None = None,
) -> Outcome:
    """Explains picture files and folders of them with the model in ``weights``.

    ``classes`` are names or numbers with commas between them (`find_classes`); without, the ``top``
    surest classes of each picture are explained, by default one. For ``methods`` see
    `Predictor.methods`. ``out`` is the HTML report, ``npz`` and ``png`` are folders, ``json`` is a
    file; None leaves each out. ``joint`` draws a picture's maps of one method on one scale.
    """
    if classes is not None and top is not None:
        raise ValueError("Classes are given by name or as the surest few: give --classes or --top.")
    if top is not None and top < 1:
        raise ValueError(f"top = {top} is not allowed: give an integer >= 1.")
    paths = find_pictures(inputs)
    predictor = Predictor.load(weights, device)
    chosen = predictor.methods(methods)
    targets = None if classes is None else predictor.find_classes(classes)
    about = About(
        weights=predictor.weights,
        model=predictor.describe(),
        config=predictor.config,
        classes=predictor.class_names,
        methods=chosen,
        joint=joint,
        command=command_line(),
        versions=versions(),
    )
    skipped: list[Skipped] = []
    kinds = ((out, explain_page), (npz, npz_files), (png, png_files), (json, json_file))
    asked = [(path, kind) for path, kind in kinds if path is not None]
    with ExitStack() as stack:
        writers = [stack.enter_context(kind(path, about)) for path, kind in asked]
        for number, (name, path) in enumerate(_told(paths, console), start=1):
            found: Explanation | Skipped
            try:
                image = predictor.read(path)
            except ImageError as error:
                if len(skipped) == len(paths) - 1:
                    raise _nothing(len(paths), error) from error
                found = Skipped(key=name, reason=str(error))
                skipped.append(found)
            else:
                found = predictor.explain(
                    image, targets, top=top or 1, methods=chosen, name=name, number=number
                )
            for add in writers:
                add(found)
    return Outcome(explained=len(paths) - len(skipped), skipped=tuple(skipped))


def find_pictures(inputs: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """(name to show, path) of every picture file given, or found in a folder given.

    Names are paths below the deepest folder that holds them all.
    """
    found: list[Path] = []
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"There is no file or folder {given}; check the path.")
        inside = list_images(given) if given.is_dir() else [given]
        if not inside:
            raise ValueError(f"The folder {given} holds no pictures; give another, or files.")
        found += inside
    if not found:
        raise ValueError("There is nothing to explain; give picture files or folders.")
    root = os.path.commonpath([path.absolute().parent for path in found])
    return [(path.absolute().relative_to(root).as_posix(), path) for path in found]


def _told(paths: list[tuple[str, Path]], console: Console | None) -> Iterable[tuple[str, Path]]:
    """With a progress bar, where somebody watches."""
    if console is None:
        return paths
    return track(paths, "Explaining", console=console, transient=True)


def _nothing(count: int, error: ImageError) -> ValueError:
    if count == 1:
        return error
    reason = str(error).rstrip(".")
    return ValueError(f"None of {count} pictures can be read (the last one: {reason}).")

"""`bcosvit explain`: reads pictures one after the other, explains them and writes the results.

No picture stays in memory after it was written, so that memory does not grow with their number.
Pictures that cannot be read are listed and left out; it is an error if none can be read.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bcosvit.attribution import method_title
from bcosvit.data.dataset import Skipped
from bcosvit.data.images import ImageError, list_images
from bcosvit.files import atomic, locked_file, locked_folder
from bcosvit.messages import percent
from bcosvit.predictor import Explanation, Predictor, Sums
from bcosvit.progress import track
from bcosvit.report.images import (
    RGB,
    MapFigure,
    Picture,
    Tile,
    colors,
    contribution_scales,
    map_figure,
    method_image,
    overlay_image,
    panel,
    photo_image,
    png_bytes,
    weight_image,
)
from bcosvit.report.pages import render, stream_page
from bcosvit.report.provenance import Provenance

TOP = 5
"""How many classes are listed for each picture, besides those that are explained."""

Add = Callable[[int, Explanation | Skipped], None]
"""Takes a picture's number, from 1, and its explanation, or why there is none."""


PRINTED = 20
"""How many pictures are listed in the terminal."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is predicted for a picture."""

    name: str
    entries: tuple[dict[str, Any], ...]
    """The most confident classes, and those that are explained."""
    unlike_note: str = ""
    """Where the picture is unlike what the model knows."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How many pictures were explained, and which were left out."""

    explained: int
    skipped: tuple[Skipped, ...]
    predictions: tuple[Prediction, ...] = ()
    """Of the first pictures, for the terminal."""
    note: str = ""
    """What readers of the probabilities should know."""

    def summary(self, out: str | Path | None) -> str:
        """Summarizes the outcome in one line for the terminal."""
        count = len(self.skipped)
        unread = f" ({count} could not be read and {'is' if count == 1 else 'are'} listed there)"
        pictures = "1 picture" if self.explained == 1 else f"{self.explained} pictures"
        return f"{pictures} explained: {out}{unread if count else ''}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportInfo:
    """What is the same for all pictures of a report."""

    predictor: Predictor
    methods: Sequence[str]
    provenance: Provenance
    joint: bool = False
    """Whether the maps of one method share a scale over the classes of a picture."""


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
    strict: bool = False,
) -> Outcome:
    """Explains picture files and writes a report, arrays, pictures or numbers.

    Args:
        inputs: Picture files, and folders of them.
        weights: A shipped model's name, or anything else that `bcosvit.load` takes.
        classes: The classes to explain, by name or number, separated by commas
            (`Predictor.find_classes`).
        top: Without ``classes``, how many of the most confident classes are explained; 1 by
            default.
        methods: Names of methods, separated by commas, or "all" (`Predictor.methods`).
        out: The HTML report; None writes none, here and below.
        npz: A folder for arrays, with one NPZ file per picture.
        png: A folder for PNG files of each map.
        json: A file for predictions and sums.
        joint: Whether the maps of one method share a scale over the classes of a picture.
        device: A device by name; ``"auto"`` is the accelerator where there is one.
        console: Where a progress bar is shown.
        strict: Whether contributions that miss the logit beyond rounding are an error.

    Returns:
        How many pictures were explained, and which could not be read.

    Raises:
        ValueError: If an argument is not allowed, or no picture can be read.
    """
    if classes is not None and top is not None:
        raise ValueError("Both classes and a number of classes are given: use --classes or --top.")
    if top is not None and top < 1:
        raise ValueError(f"top = {top} is not allowed: give an integer >= 1.")
    paths = find_pictures(inputs)
    _check_files(paths, out, json)
    predictor = Predictor.load(weights, device)
    chosen = predictor.methods(methods)
    targets = None if classes is None else predictor.find_classes(classes)
    info = ReportInfo(
        predictor=predictor,
        methods=chosen,
        joint=joint,
        provenance=Provenance.of(predictor.config),
    )
    skipped: list[Skipped] = []
    predictions: list[Prediction] = []
    kinds = ((out, html_report), (npz, npz_files), (png, png_files), (json, json_file))
    with ExitStack() as stack:
        folders, single = (npz, png), (out, json)
        for lock, written in ((locked_folder, folders), (locked_file, single)):
            for path in written:
                if path is not None:
                    stack.enter_context(lock(path))
        writers = [
            stack.enter_context(kind(path, info)) for path, kind in kinds if path is not None
        ]
        for number, (name, path) in enumerate(track(paths, "Explaining", console), start=1):
            found: Explanation | Skipped
            try:
                image = predictor.read(path)
            except ImageError as error:
                if len(skipped) == len(paths) - 1:
                    raise _nothing_readable(len(paths), error) from error
                found = Skipped(key=name, reason=str(error))
                skipped.append(found)
            else:
                found = predictor.explain(
                    image, targets, top=top or 1, methods=chosen, name=name, strict=strict
                )
                if len(predictions) < PRINTED:
                    predictions.append(_prediction(found, predictor))
            for add in writers:
                add(number, found)
    return Outcome(
        explained=len(paths) - len(skipped),
        skipped=tuple(skipped),
        predictions=tuple(predictions),
        note=probability_note(predictor),
    )


def _check_files(
    pictures: Sequence[tuple[str, Path]], out: str | Path | None, json: str | Path | None
) -> None:
    """Refuses files that would replace a picture or each other, or whose endings are wrong."""
    given = {path.resolve() for _, path in pictures}
    for path, ending in ((out, ".html"), (json, ".json")):
        if path is None:
            continue
        if Path(path).resolve() in given:
            raise ValueError(f"{path} is one of the pictures and would be replaced; give another.")
        guessed = guess_type(Path(path).name)[0]
        if guessed is not None and not guessed.endswith(ending[1:]):
            raise ValueError(f"{path} is written as {ending[1:].upper()}; give a name in {ending}.")
    if out is not None and json is not None and Path(out).resolve() == Path(json).resolve():
        raise ValueError(f"The report and the numbers have the same file {out}; give two.")


def probability_note(predictor: Predictor) -> str:
    """Says what the probabilities of a model mean, where they are not those of a softmax."""
    if predictor.model.config.activation != "sigmoid":
        return ""
    return "Probabilities are independent sigmoids, one per class: they need not sum to 1."


def _prediction(found: Explanation, predictor: Predictor) -> Prediction:
    listed = dict.fromkeys([*found.top(TOP), *found.target.tolist()])
    entries = [found.entry(label, predictor.class_names) for label in listed]
    return Prediction(name=found.name, entries=tuple(entries), unlike_note=found.unlike_note)


def find_pictures(inputs: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Finds picture files.

    Args:
        inputs: Files, and folders that are searched.

    Returns:
        The name to show and the path of each picture. Names are paths below the deepest folder
        that all pictures have in common.

    Raises:
        ValueError: If a file or folder does not exist, or there are no pictures in it.
    """
    found: list[Path] = []
    if "" in inputs:
        # pathlib reads it as the current folder.
        raise ValueError("A path is empty; give picture files or folders.")
    for given in map(Path, inputs):
        if not given.exists():
            raise ValueError(f"There is no file or folder {given}; check the path.")
        inside = list_images(given) if given.is_dir() else [given]
        if not inside:
            raise ValueError(f"The folder {given} contains no pictures; give another, or files.")
        found += inside
    if not found:
        raise ValueError("There is nothing to explain; give picture files or folders.")
    root = os.path.commonpath([path.absolute().parent for path in found])
    return [(path.absolute().relative_to(root).as_posix(), path) for path in found]


@contextmanager
def html_report(path: str | Path, info: ReportInfo) -> Iterator[Add]:
    """Writes an HTML report with one section per picture.

    Args:
        path: The file, which appears if the block ends without an error.
        info: What is the same for all pictures.

    Yields:
        A function that adds a picture.
    """
    skipped: list[Skipped] = []
    names: list[tuple[int, str]] = []
    with stream_page(
        path,
        "report/templates/explain.html.jinja",
        predictor=info.predictor,
        note=probability_note(info.predictor),
        methods=info.methods,
        joint=info.joint,
        provenance=info.provenance,
        skipped=skipped,
        names=names,
    ) as write:

        def add(number: int, item: Explanation | Skipped) -> None:
            if isinstance(item, Skipped):
                skipped.append(item)
            else:
                names.append((number, item.name))
                write(_section(number, item, info))

        yield add


@contextmanager
def npz_files(folder: str | Path, info: ReportInfo) -> Iterator[Add]:
    """Writes one NPZ file per picture.

    Each file contains ``image``, ``logits``, ``probabilities``, ``target``, ``classes`` (the names
    of the target classes), one ``map_METHOD`` [C, H, W] per method, and for inherent explanations
    ``weights`` [C, 6, H, W], ``residual`` and ``bias``.
    """

    def add(number: int, item: Explanation | Skipped) -> None:
        if isinstance(item, Skipped):
            return
        names = info.predictor.class_names
        arrays: dict[str, Any] = {
            "image": item.image.numpy(),
            "logits": item.logits.numpy(),
            "probabilities": item.probabilities.numpy(),
            "target": item.target.numpy(),
            "classes": np.array([names[label] for label in item.target.tolist()]),
        }
        for method, attribution in item.attributions.items():
            arrays[f"map_{method}"] = attribution.map.numpy()
        own = item.exact
        if own is not None and own.weights is not None and own.residual is not None:
            arrays |= {"weights": own.weights.numpy(), "residual": own.residual.numpy()}
            arrays["bias"] = np.float64(own.bias)
        with atomic(Path(folder, f"{_stem(number, item)}.npz")) as temporary:
            np.savez_compressed(temporary, **arrays)

    yield add


@contextmanager
def png_files(folder: str | Path, info: ReportInfo) -> Iterator[Add]:
    """Writes PNG files for each picture and class: one per method, the first method's overlay on
    the photo, and the colors of W(x) on a transparent background."""

    def add(number: int, item: Explanation | Skipped) -> None:
        if isinstance(item, Skipped):
            return
        scales = _scales(item, info.joint)
        first = next(iter(item.attributions))
        photo = photo_image(item.image)
        for row, label in enumerate(item.target.tolist()):
            drawn: dict[str, RGB] = {}
            for method, attribution in item.attributions.items():
                map_, scale = attribution.map[row], scales[method][row]
                drawn[method] = method_image(method, map_, scale)
                if method == first:
                    drawn["overlay"] = overlay_image(photo, method, map_, scale)
            if (own := item.exact) is not None and own.weights is not None:
                drawn["colors"] = photo_image(colors(own, row))
            for kind, image in drawn.items():
                class_name = _safe(info.predictor.class_names[label])
                name = f"{_stem(number, item)}-{label}-{class_name}-{kind}.png"
                with atomic(Path(folder, name)) as temporary:
                    temporary.write_bytes(png_bytes(image))

    yield add


@contextmanager
def json_file(path: str | Path, info: ReportInfo) -> Iterator[Add]:
    """Writes one JSON object with the model, a list of ``images``, and those ``skipped``."""
    skipped: list[dict[str, str]] = []
    head = {
        "command": info.provenance.command,
        "weights": info.predictor.weights,
        "versions": dict(info.provenance.versions),
        "config": dict(info.provenance.config),
        "methods": list(info.methods),
    }
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=1)[:-2] + ',\n "images": [')
        separator = "\n"

        def add(number: int, item: Explanation | Skipped) -> None:
            nonlocal separator
            if isinstance(item, Skipped):
                skipped.append({"file": item.key, "reason": item.reason})
                return
            record = _record(number, item, info.predictor.class_names)
            file.write(separator + json.dumps(record, allow_nan=False))
            separator = ",\n"

        yield add
        file.write(f'\n ],\n "skipped": {json.dumps(skipped)}\n}}\n')


@contextmanager
def contact_sheet(path: str | Path, info: ReportInfo) -> Iterator[Add]:
    """Writes one PNG file with one row per picture and target class."""
    rows: list[list[Tile]] = []

    def add(number: int, item: Explanation | Skipped) -> None:
        if not isinstance(item, Skipped):
            rows.extend(sheet_rows(item, info.predictor.class_names, joint=info.joint))

    yield add
    with atomic(path) as temporary:
        panel(rows).save(temporary, format="PNG")


def sheet_rows(
    found: Explanation,
    class_names: Sequence[str],
    *,
    joint: bool = False,
    versus: Sequence[int] | None = None,
) -> list[list[Tile]]:
    """Draws one row of tiles per class that is explained.

    Args:
        found: The explanation of one picture.
        class_names: The names of all classes.
        joint: Whether the maps of one method share a scale over the classes.
        versus: Where the maps say what speaks for a class rather than another one, the latter for
            each row.

    Returns:
        The rows: the picture, the map of each method with the overlay of the first, and W(x).
    """
    rows = []
    photo, scales = photo_image(found.image), _scales(found, joint)
    for row, label in enumerate(found.target.tolist()):
        shown = f"{class_names[label]} {percent(found.probabilities[label].item())}"
        if versus is not None:
            shown = f"{class_names[label]} rather than {class_names[versus[row]]}"
        tiles = [Tile(image=photo, label=found.name)]
        for method, attribution in found.attributions.items():
            map_, scale = attribution.map[row], scales[method][row]
            image = method_image(method, map_, scale)
            tiles.append(Tile(image=image, label=method_title(method)))
            if len(tiles) == 2:
                over = overlay_image(photo, method, map_, scale)
                tiles.append(Tile(image=over, label=shown))
        if (weights := weight_image(found.exact, row)) is not None:
            tiles.append(Tile(image=weights, label="W(x) in color"))
        rows.append(tiles)
    return rows


@dataclass(frozen=True, kw_only=True)
class _ExplainedClass:
    """What the template shows for one class of a picture."""

    entry: dict[str, Any]
    maps: list[MapFigure]
    overlay: Picture
    colors: Picture | None
    sums: Sums | None
    exact: str
    """The title of the method whose contributions are summed."""


def _section(number: int, found: Explanation, info: ReportInfo) -> str:
    names = info.predictor.class_names
    explained = found.target.tolist()
    listed = list(dict.fromkeys([*found.top(TOP), *explained]))
    photo, scales = photo_image(found.image), _scales(found, info.joint)
    return render(
        "report/templates/explanation.html.jinja",
        number=number,
        name=found.name,
        notes=found.notes,
        listed=[found.entry(label, names) for label in listed],
        chosen=[place for place, label in enumerate(listed) if label in explained],
        photo=Picture.of(photo, f"{found.name}, as the model saw it"),
        classes=[
            _explained_class(found, row, photo, scales, found.entry(label, names))
            for row, label in enumerate(explained)
        ],
    )


def _explained_class(
    found: Explanation,
    row: int,
    photo: RGB,
    scales: dict[str, list[float]],
    entry: dict[str, Any],
) -> _ExplainedClass:
    maps = {method: each.map[row] for method, each in found.attributions.items()}
    name, first, own = entry["class"], next(iter(maps)), found.exact
    over = overlay_image(photo, first, maps[first], scales[first][row])
    weights = weight_image(own, row)
    return _ExplainedClass(
        entry=entry,
        maps=[map_figure(method, maps[method], scales[method][row], name) for method in maps],
        overlay=Picture.of(over, f"{method_title(first)} to {name}, on the picture"),
        colors=None if weights is None else Picture.of(weights, f"The colors of W(x) for {name}"),
        sums=None if own is None else found.sums(row),
        exact="".join(method_title(m) for m, each in found.attributions.items() if each is own),
    )


def _scales(found: Explanation, joint: bool) -> dict[str, list[float]]:
    return {
        method: contribution_scales(attribution.map, joint=joint)
        for method, attribution in found.attributions.items()
    }


def _record(number: int, found: Explanation, names: Sequence[str]) -> dict[str, Any]:
    explained = [found.entry(label, names) for label in found.target.tolist()]
    if found.exact is not None:
        for row, entry in enumerate(explained):
            # The logit is the prediction's, with and without an explanation.
            entry |= asdict(found.sums(row)) | {"logit": entry["logit"]}
    return {
        "number": number,
        "file": found.name,
        "unlike": found.unlike,
        "is_unlike": found.is_unlike,
        "incompleteness": found.incompleteness,
        "top": [found.entry(label, names) for label in found.top(TOP)],
        "explained": explained,
    }


def _stem(number: int, found: Explanation) -> str:
    """A file name: the number makes it unique, the picture's name makes it readable."""
    return f"{number:05}-{_safe(Path(found.name).stem)}"


def _safe(name: str) -> str:
    """Letters, digits and dashes only, and not too many, for all file systems."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._")[:60] or "picture"


def _nothing_readable(count: int, error: ImageError) -> ValueError:
    if count == 1:
        return error
    reason = str(error).rstrip(".")
    return ValueError(f"None of {count} pictures can be read (the last one: {reason}).")

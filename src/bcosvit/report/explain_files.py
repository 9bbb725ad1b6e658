"""What `bcosvit explain` writes for machines: arrays, pictures and numbers, each as it is made."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bcosvit.data.dataset import Skipped
from bcosvit.files import atomic
from bcosvit.predictor import Explanation
from bcosvit.report.explain_html import TOP, About, Add
from bcosvit.report.figures import (
    colors,
    contribution_scales,
    method_image,
    overlay_image,
    photo_image,
    png_bytes,
)


def stem(found: Explanation) -> str:
    """A file name for a picture: its number makes it unique, its own name readable."""
    return f"{found.number:05}-{_safe(Path(found.name).stem)}"


@contextmanager
def npz_files(folder: str | Path, about: About) -> Iterator[Add]:
    """An NPZ file a picture: ``image``, ``logits``, ``probabilities``, ``target``, ``classes``
    (the names of those explained), a ``map_METHOD`` [C, H, W] each, and of inherent explanations
    ``weights`` [C, 6, H, W], ``residual`` and ``bias``."""

    def add(item: Explanation | Skipped) -> None:
        if isinstance(item, Skipped):
            return
        arrays: dict[str, Any] = {
            "image": item.image.numpy(),
            "logits": item.logits.numpy(),
            "probabilities": item.probabilities.numpy(),
            "target": item.target.numpy(),
            "classes": np.array([about.classes[label] for label in item.target.tolist()]),
        }
        for method, attribution in item.attributions.items():
            arrays[f"map_{method}"] = attribution.map.numpy()
        own = item.exact
        if own is not None and own.weights is not None and own.residual is not None:
            arrays |= {"weights": own.weights.numpy(), "residual": own.residual.numpy()}
            arrays["bias"] = np.float64(own.bias)
        with atomic(Path(folder, f"{stem(item)}.npz")) as temporary:
            np.savez_compressed(temporary, **arrays)

    yield add


@contextmanager
def png_files(folder: str | Path, about: About) -> Iterator[Add]:
    """PNG files a picture and class: one a method, the first method's overlay, and the colors of
    W(x) on a transparent ground."""

    def add(item: Explanation | Skipped) -> None:
        if isinstance(item, Skipped):
            return
        first = next(iter(item.attributions))
        for method, attribution in item.attributions.items():
            scales = contribution_scales(attribution.map, joint=about.joint)
            for row, (map_, full) in enumerate(zip(attribution.map, scales, strict=True)):
                write(item, row, method, method_image(method, map_, full))
                if method == first:
                    over = overlay_image(photo_image(item.image), method, map_, full)
                    write(item, row, "overlay", over)
        if (own := item.exact) is not None and own.weights is not None:
            for row in range(len(own.map)):
                write(item, row, "colors", photo_image(colors(own, row)))

    def write(item: Explanation, row: int, what: str, image: np.ndarray) -> None:
        label = int(item.target[row])
        name = f"{stem(item)}-{label}-{_safe(about.classes[label])}-{what}.png"
        with atomic(Path(folder, name)) as temporary:
            temporary.write_bytes(png_bytes(image))

    yield add


@contextmanager
def json_file(path: str | Path, about: About) -> Iterator[Add]:
    """One JSON object: about the model, a list of ``images``, and the ``skipped`` ones."""
    skipped: list[dict[str, str]] = []
    head = {
        "command": about.command,
        "weights": about.weights,
        "versions": dict(about.versions),
        "config": dict(about.config),
        "methods": list(about.methods),
    }
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head, indent=1)[:-2] + ',\n "images": [')
        separator = "\n"

        def add(item: Explanation | Skipped) -> None:
            nonlocal separator
            if isinstance(item, Skipped):
                skipped.append({"file": item.key, "reason": item.reason})
                return
            file.write(separator + json.dumps(_record(item, about.classes), allow_nan=False))
            separator = ",\n"

        yield add
        file.write(f'\n ],\n "skipped": {json.dumps(skipped)}\n}}\n')


def _record(found: Explanation, names: Sequence[str]) -> dict[str, Any]:
    explained = [found.entry(label, names) for label in found.target.tolist()]
    if found.exact is not None:
        for row, entry in enumerate(explained):
            # The logit is the prediction's, with and without an explanation.
            entry |= asdict(found.sums(row)) | {"logit": entry["logit"]}
    return {
        "number": found.number,
        "file": found.name,
        "top": [found.entry(label, names) for label in found.top(TOP)],
        "explained": explained,
    }


def _safe(name: str) -> str:
    """Letters, digits and dashes alone, and not too many: fit for any file system."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._")[:60] or "picture"

"""Class names: what a weights file calls its classes, and which ones a user means."""

import csv
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from bcosvit.models.card import CLASSES_KEY as CLASSES_KEY
from bcosvit.models.weights import read_metadata


def class_names(weights: str | Path, count: int) -> tuple[str, ...] | None:
    """The names that a weights file brings for its ``count`` classes, if any."""
    notes = read_metadata(weights)
    if CLASSES_KEY not in notes:
        return None
    names = tuple(str(name) for name in json.loads(notes[CLASSES_KEY]))
    if len(names) != count:
        raise ValueError(
            f"{weights} names {len(names)} classes, but its model has {count}; "
            f"save it again with a name for each."
        )
    return names


def numbered(count: int) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(f"class {number}" for number in range(count))


def find_classes(given: str, names: Sequence[str]) -> list[int]:
    """Positions of classes given by name or number: ``cat,dog``, ``3,17``.

    Names that hold commas stand in double quotes: ``"tench, Tinca tinca",dog``.
    """
    wanted = next(csv.reader([given], skipinitialspace=True), [])
    found = dict.fromkeys(_find(name.strip(), names) for name in wanted if name.strip())
    if not found:
        raise ValueError(f"{given!r} names no class; give some, e.g. {names[0]!r}.")
    return list(found)


def _find(name: str, names: Sequence[str]) -> int:
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    folded = [each.casefold() for each in names]
    close = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)
    near = [names[folded.index(match)] for match in close]
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"the model knows {_some(names)}; numbers from 0 to {len(names) - 1} are allowed too."
    )
    raise ValueError(f"There is no class {name!r}; {hint}")


def _some(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

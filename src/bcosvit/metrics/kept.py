"""Scores in a file that grows with every batch, so that a stopped evaluation can go on."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcosvit.files import make_folder
from bcosvit.metrics.base import Item

Rows = dict[str, Any]
"""The scores of an item, by metric and method."""


@dataclass(frozen=True)
class KeptScores:
    """A file with one line per batch of scored items.

    The file does not know what its scores depend on. Use one file for each model, data set, methods
    and metrics with their options, and remove it when the evaluation is complete.

    Examples:
        >>> import tempfile
        >>> keep = KeptScores(Path(tempfile.mkdtemp(), "scores.jsonl"))
        >>> keep.read(["perturbation"], [])  # nothing yet
        ({}, [])
    """

    path: Path
    """The file, which need not exist."""

    def read(
        self, metrics: Iterable[str], items: Sequence[Item]
    ) -> tuple[dict[Item, Rows], list[float]]:
        """Reads what was kept for metrics that were measured together.

        Args:
            metrics: Their names.
            items: All items that they look at.

        Returns:
            The scores of some of the items, and by how much their explanations missed the logit.
            Lines that are not complete are not read, so that their items are scored again.
        """
        by_indices = {_indices(item): item for item in items}
        found: dict[Item, Rows] = {}
        missed: list[float] = []
        names = sorted(metrics)
        for line in self._lines():
            keys = [tuple(each) for each in line["items"]]
            if line["metrics"] == names and all(key in by_indices for key in keys):
                found |= zip((by_indices[key] for key in keys), line["rows"], strict=True)
                missed += line["missed"]
        return found, missed

    def add(
        self,
        metrics: Iterable[str],
        items: Sequence[Item],
        rows: Sequence[Rows],
        missed: Sequence[float],
    ) -> None:
        """Adds the scores of a batch; the arguments are those of `read` and what it returns."""
        line = {
            "metrics": sorted(metrics),
            "items": [_indices(item) for item in items],
            "rows": list(rows),
            "missed": list(missed),
        }
        make_folder(self.path.parent)
        with self.path.open("a", encoding="utf-8") as file:
            # A process that was killed may have left half a line.
            file.write("\n" + json.dumps(line) + "\n")

    def remove(self) -> None:
        """Removes the file, if it exists."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterable[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            # Half a line may be complete JSON, such as a number, but never a whole object.
            if isinstance(line, dict):
                yield line


def _indices(item: Item) -> tuple[int, ...]:
    return tuple(image.index for image in item)

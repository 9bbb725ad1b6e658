"""Everything that an evaluation found: the tables image by image, and a summary of their means."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bcosvit.files import atomic
from bcosvit.metrics.accuracy import Accuracy
from bcosvit.metrics.localization import Localization
from bcosvit.metrics.masks import Masked
from bcosvit.metrics.perturbation import Perturbation


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """Whether contributions add up to what they explain."""

    explanations: int
    """How many were looked at, of inherent methods alone: no other claims to be complete."""
    worst: float
    """The largest |Σ contributions + residual + bias − logit|, as a share of the logit or the bias,
    whichever is larger: where contributions cancel out, either of them may be near zero."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The metrics that were asked for; the others are None."""

    accuracy: Accuracy
    localization: Localization | None = None
    perturbation: Perturbation | None = None
    masks: Masked | None = None
    completeness: Completeness | None = None
    """Of all that was explained for the other metrics."""
    settings: Mapping[str, Any]
    """Methods and parameters of the metrics, fit for JSON."""

    def summary(self) -> dict[str, Any]:
        """Every mean with its interval and what it is a mean of, fit for JSON."""
        found = {name: part.summary() for name, part in self._parts().items()}
        if self.completeness is not None:
            found["completeness"] = asdict(self.completeness)
        return {**found, "settings": dict(self.settings)}

    def write(self, folder: str | Path) -> None:
        """``accuracy.csv``, ``localization.csv`` ... and ``summary.json``, each whole or absent.

        Where several processes evaluate, all hold the same results: let one write.
        """
        for name, part in self._parts().items():
            write_table(Path(folder, f"{name}.csv"), part.rows())
        write_summary(Path(folder, "summary.json"), self.summary())

    def _parts(self) -> dict[str, Accuracy | Localization | Perturbation | Masked]:
        parts = {
            "accuracy": self.accuracy,
            "localization": self.localization,
            "perturbation": self.perturbation,
            "masks": self.masks,
        }
        return {name: part for name, part in parts.items() if part is not None}


def write_table(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows of equal columns as CSV, all digits kept; without rows the file is empty."""
    with (
        atomic(path) as temporary,
        # Keys are often file names, which need not be valid Unicode.
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """``summary`` as JSON for people and machines."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")

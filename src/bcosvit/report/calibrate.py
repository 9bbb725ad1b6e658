"""`bcosvit calibrate`: fits and measures the score of pictures of unknown kinds."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from bcosvit.data.images import ImageError, list_images
from bcosvit.messages import percent
from bcosvit.models.hub import locate
from bcosvit.models.unknown import Unlike, auroc, auroc_interval, fit_unlike
from bcosvit.models.weights import UNLIKE_KEY, read_metadata, read_weights, save_state
from bcosvit.predictor import Predictor
from bcosvit.progress import track

BATCH = 4
"""Pictures that pass through the model at once."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted score and what was measured."""

    unlike: Unlike
    known: int
    unknown: int
    auroc: tuple[float, float, float]
    """Its value, and the ends of its 95 % interval."""
    by_kind: dict[str, float]
    false_alarms: float
    """The share of known pictures that are called unlike."""
    found: float
    """The share of unknown pictures that are."""
    tested: bool
    """Whether other pictures were measured on than the score was fitted to."""

    def summary(self) -> str:
        """Describes the measurement in some lines."""
        value, low, high = self.auroc
        where = "test pictures" if self.tested else "the pictures that it was fitted to"
        kinds = ", ".join(f"{kind} {area:.2f}" for kind, area in self.by_kind.items())
        return (
            f"AUROC {value:.3f} [{low:.3f}, {high:.3f}] on {where}: {self.known} of known and "
            f"{self.unknown} of unknown kinds ({kinds})\n"
            f"Called unlike: {percent(self.found)} of unknown and {percent(self.false_alarms)} of "
            f"known kinds"
        )


def calibrate_weights(
    weights: str | Path,
    known: str | Path,
    unknown: str | Path,
    *,
    test_known: str | Path | None = None,
    test_unknown: str | Path | None = None,
    out: str | Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Calibration:
    """Fits the score of pictures of unknown kinds, measures it, and stores it with the weights.

    Args:
        weights: A shipped model's name, or anything else that `bcosvit.load` takes.
        known: A folder of pictures of the model's kinds that it was not trained on.
        unknown: A folder of pictures of other kinds, with one sub-folder per kind.
        test_known: Further pictures of the model's kinds.
        test_unknown: Pictures of kinds that are in none of the other folders.
        out: The weights file to write; None writes none.
        limit: How many pictures of each folder are used, evenly spread; all by default.
        device: A device by name.
        console: Where a progress bar is shown.

    Returns:
        The score, and its area under the ROC curve.

    Raises:
        ValueError: A folder has too few pictures, or only one of the test folders is given.
    """
    if (test_known is None) != (test_unknown is None):
        raise ValueError("Both test folders are needed: give --test-known and --test-unknown.")
    predictor = Predictor.load(weights, device)

    def logits(folder: str | Path) -> tuple[Tensor, list[str]]:
        return _logits(predictor, Path(folder), limit, console)

    inside, _ = logits(known)
    outside, kinds = logits(unknown)
    unlike = fit_unlike(inside, outside, kinds)
    if test_known is not None and test_unknown is not None:
        inside, _ = logits(test_known)
        outside, kinds = logits(test_unknown)
    scores, others = unlike(inside), unlike(outside)
    area = auroc_interval(scores, others)
    by_kind = {
        kind: auroc(scores, others[torch.tensor([each == kind for each in kinds])])
        for kind in dict.fromkeys(kinds)
    }
    about = {
        **(unlike.about or {}),
        "tested": test_known is not None,
        "auroc": [round(value, 4) for value in area],
        "test_known": len(scores),
        "test_unknown": len(others),
    }
    unlike = dataclasses.replace(unlike, about=about)
    if out is not None:
        path = locate(weights)
        config, _ = read_weights(path)
        notes = {**read_metadata(path), UNLIKE_KEY: unlike.dumps()}
        # In the precision in which they are stored.
        save_state(load_file(path), config, out, metadata=notes)
    return Calibration(
        unlike=unlike,
        known=len(scores),
        unknown=len(others),
        auroc=area,
        by_kind=by_kind,
        false_alarms=(scores > unlike.threshold).double().mean().item(),
        found=(others > unlike.threshold).double().mean().item(),
        tested=test_known is not None,
    )


def _logits(
    predictor: Predictor, folder: Path, limit: int | None, console: Console | None
) -> tuple[Tensor, list[str]]:
    """Logits [N, K] of the pictures in a folder, and the sub-folder of each."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}; check the path.")
    paths = list_images(folder)
    paths = paths[:: max(1, len(paths) // (limit or len(paths) or 1))][:limit]
    images: list[Tensor] = []
    kinds: list[str] = []
    found: list[Tensor] = []
    for number, path in enumerate(track(paths, f"Pictures of {folder.name}", console)):
        try:
            images.append(predictor.read(path))
            kinds.append(path.relative_to(folder).parts[0])
        except ImageError:
            pass
        if images and (len(images) == BATCH or number == len(paths) - 1):
            with torch.no_grad():
                batch = torch.stack(images).to(next(predictor.model.parameters()))
                found.append(predictor.model(batch).double().cpu())
            images = []
    if sum(map(len, found)) < 2:
        raise ValueError(f"The folder {folder} has fewer than two pictures; give more.")
    return torch.cat(found), kinds

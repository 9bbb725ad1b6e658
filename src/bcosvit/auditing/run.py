"""`bcosvit audit`: collects the evidence of a data set, analyzes it and writes the report."""

import json
import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from rich.console import Console

from bcosvit.attribution.base import TOLERANCES, CompletenessWarning
from bcosvit.auditing.clusters import class_evidence
from bcosvit.auditing.evidence import Evidence, EvidenceSettings, chunk_path, collect_evidence
from bcosvit.auditing.mistakes import find_mistakes
from bcosvit.auditing.report import Audit, write_audit
from bcosvit.auditing.suspicions import find_suspicions
from bcosvit.data.labeled import LabeledImages
from bcosvit.data.masks import MaskFiles
from bcosvit.data.sources import open_source
from bcosvit.files import atomic, locked_folder
from bcosvit.messages import require
from bcosvit.predictor import Predictor
from bcosvit.report.evaluate import progress_bars

SOURCE = "source.json"
"""Where the data were opened from, for the page of `bcosvit serve`."""


def audit(
    weights: str | Path | Predictor,
    data: str | Path,
    *,
    out: str | Path,
    masks: str | Path | None = None,
    mask_values: Sequence[int] | None = None,
    split: str = "val",
    limit: int | None = None,
    grid: int | None = None,
    pairs: int = 48,
    batch_size: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    processes: int = 1,
    shard: tuple[int, int] | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Audit | None:
    """Finds out what a model's decisions on a whole data set are made of.

    Exact contributions are summed over the data: what each class consists of, which cues it
    depends on, and what misled the model where it is wrong. A run that was interrupted continues.

    Args:
        weights: A shipped model's name, anything else that `bcosvit.load` takes, or a predictor.
            The model must be a B-cos model.
        data: Anything that `open_source` takes, with labels.
        out: The folder for the evidence, ``report.html``, ``audit.json`` and tables as CSV and
            (where pyarrow is installed) Parquet.
        masks: Masks of the objects, as for `bcosvit.data.masks.MaskFiles`; scenes have their own.
        mask_values: The values that mark the object in label images; by default all but 0.
        split: The part of the data: "val", "train" or "all".
        limit: The number of pictures to draw at random; by default all are audited.
        grid: Cells along a side; by default those of the tokens, or 14.
        pairs: How many transfers test a suspicion.
        batch_size: How many pictures pass through the model at once; by default as many as suit the
            device (`bcosvit.machine.choose_batch_size`).
        seed: Of everything that is drawn at random.
        num_workers: How many processes read ahead.
        processes: How many processes collect evidence and look for clusters.
        shard: The part of the evidence to collect, ``(number, count)`` counted from 0, where
            several machines share the folder; the call that finds nothing missing writes the
            report.
        device: A device by name; ``"auto"`` is the accelerator where there is one.
        console: Where progress bars are shown.

    Returns:
        What was found, or None where evidence of other shards is missing.

    Raises:
        ValueError: If an argument is not allowed, ``out`` holds another audit, or another process
            writes to it.

    Examples:
        >>> import bcosvit
        >>> found = bcosvit.audit("best.safetensors", "photos/", out="audit")  # doctest: +SKIP
        >>> found.suspicions[0].cue.name  # doctest: +SKIP
        '2.1'
    """
    require("sklearn.cluster", extra="audit", purpose="An audit")
    predictor = weights if isinstance(weights, Predictor) else Predictor.load(weights, device)
    pictures, name = open_pictures(
        predictor, str(data), masks, mask_values, split=split, limit=limit, seed=seed
    )
    folder = Path(out)
    with ExitStack() as stack:
        # Shards are collected side by side; the report is written by one call.
        if shard is None:
            stack.enter_context(locked_folder(folder))
        with progress_bars(console) if console is not None else nullcontext() as progress:
            settings = collect_evidence(
                predictor,
                pictures,
                folder,
                masks=pictures.masks(),
                grid=grid,
                batch_size=batch_size,
                num_workers=num_workers,
                processes=processes,
                shard=shard,
                progress=progress,
            )
            chunks = range(-(-settings.pictures // settings.chunk))
            if not all(chunk_path(folder, number).exists() for number in chunks):
                return None
            if shard is not None:
                stack.enter_context(locked_folder(folder))
            evidence = Evidence(folder)
            _check_sums(evidence)
            classes = class_evidence(evidence, seed=seed, processes=processes)
            suspicions = find_suspicions(
                predictor,
                pictures,
                evidence,
                classes,
                pairs=pairs,
                seed=seed,
                num_workers=num_workers,
                progress=progress,
            )
        found = Audit(
            evidence=evidence,
            classes=classes,
            suspicions=suspicions,
            mistakes=find_mistakes(evidence, classes),
            folder=folder,
        )
        described = {
            "data": str(data),
            "masks": None if masks is None else str(masks),
            "mask_values": None if mask_values is None else list(mask_values),
            "split": split,
            "limit": limit,
            "seed": seed,
        }
        with atomic(folder / SOURCE) as temporary:
            temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        write_audit(
            found,
            predictor,
            pictures,
            facts={
                "Model": predictor.describe(),
                "Weights": predictor.weights,
                "Data": f"{name}, split {split}, {len(evidence)} pictures",
            },
            command=_command(predictor, described, settings, pairs),
        )
        return found


def _check_sums(evidence: Evidence) -> None:
    """Warns once where contributions miss a logit by more than rounding explains."""
    share, tolerance = evidence.completeness(), TOLERANCES[torch.float32]
    # Also where it is not a number.
    if not share <= tolerance:
        warnings.warn(
            f"The contributions miss a logit by {share:.1e} of it, {tolerance:.0e} is the "
            f"tolerance: check that weights and images are finite.",
            CompletenessWarning,
            stacklevel=3,
        )


def open_pictures(
    predictor: Predictor,
    data: str,
    masks: str | Path | None = None,
    mask_values: Sequence[int] | None = None,
    *,
    split: str = "val",
    limit: int | None = None,
    seed: int = 0,
) -> tuple[LabeledImages, str]:
    """Opens the pictures of an audit, with their masks, and says what the data are called."""
    source = open_source(data, only_val=True)
    pictures = predictor.labeled(source, split, limit=limit, seed=seed)
    if masks is not None:
        pictures = pictures.with_masks(MaskFiles(masks, mask_values), source.classes)
    return pictures, source.name


def _command(
    predictor: Predictor, described: Mapping[str, object], settings: EvidenceSettings, pairs: int
) -> str:
    """The command that gives the same report, however it was made."""
    words = ["bcosvit", "audit", "--weights", predictor.weights]
    values = {
        **described,
        "grid": settings.grid,
        "pairs": pairs,
        "batch-size": settings.batch_size,
    }
    given = values.pop("mask_values")
    if isinstance(given, list):
        values["mask-value"] = ",".join(map(str, given))
    for key, value in values.items():
        if value is not None:
            words += [f"--{key}", str(value)]
    return shlex.join([*words, "--out", "audit"])

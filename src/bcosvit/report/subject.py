"""The model that a report is about, and what goes with it: class names, input, methods, device."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bcosvit.attribution import explainers
from bcosvit.data.transforms import EvalTransform
from bcosvit.models.base import AnyModel
from bcosvit.models.card import RUN_KEY as RUN_KEY
from bcosvit.models.config import DenseNetConfig, to_dict
from bcosvit.models.pretrained import locate
from bcosvit.models.weights import load, read_metadata
from bcosvit.nn import prepared_view
from bcosvit.report.classes import class_names, numbered


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A loaded model on its device."""

    weights: str
    """As given: a path, a shipped model's name or an address."""
    model: AnyModel
    names: tuple[str, ...]
    """Of all classes; numbers where the weights file brings none."""
    named: bool
    """Whether it brings them."""
    transform: EvalTransform
    """How pictures become the model's input: as in training, else the paper's crop."""

    @classmethod
    def load(cls, weights: str | Path, device: str = "auto") -> "Subject":
        # Once: what was downloaded is checked each time it is looked for.
        path = locate(weights)
        model = load(path)
        transform = _transform_for(model, read_metadata(path))
        count = model.config.num_classes
        names = class_names(path, count)
        return cls(
            weights=str(weights),
            # Predicting and explaining many pictures: weights are normalized once.
            model=prepared_view(model.to(choose_device(device))),
            names=names or numbered(count),
            named=names is not None,
            transform=transform,
        )

    @property
    def config(self) -> dict[str, Any]:
        """Fit for JSON."""
        return to_dict(self.model.config)

    def describe(self) -> str:
        """In words: family, kind, classes and input."""
        config, size = self.model.config, self.transform.image_size
        family = "B-cos" if config.family == "bcos" else "Conventional"
        kind = "DenseNet" if isinstance(config, DenseNetConfig) else "vision transformer"
        return f"{family} {kind}, {config.num_classes} classes, {size}×{size} pixels"

    def methods(self, given: str | None) -> tuple[str, ...]:
        """Methods by their names with commas between them; "all" are those that apply.

        None is the first that applies: inherent for B-cos models, input × gradient for others.
        """
        able = explainers(self.model)
        if given is None:
            return able[:1]
        if given == "all":
            return able
        return pick(given, able, "method for this model called")


def pick(given: str, allowed: Sequence[str], what: str) -> tuple[str, ...]:
    """Words with commas between them, each one of ``allowed``, in the order given."""
    words = tuple(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    for word in words:
        if word not in allowed:
            raise ValueError(
                f"There is no {what} {word!r}; choose all, or some of {', '.join(allowed)}."
            )
    if not words:
        raise ValueError(f"{given!r} names nothing; choose all, or some of {', '.join(allowed)}.")
    return words


def choose_device(device: str) -> torch.device:
    """A device by name; "auto" is the accelerator where there is one."""
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The device {device!r} cannot be used ({reason}); give auto, cpu or cuda."
        ) from error


def _transform_for(model: AnyModel, notes: Mapping[str, str]) -> EvalTransform:
    config = model.config
    height, width = (224, 224) if isinstance(config, DenseNetConfig) else config.image_size
    if height != width:
        raise ValueError(
            f"The model takes pictures of {width}×{height} pixels, but only squares are cut here; "
            f"give it a square size with bcosvit.resize_prior."
        )
    run = json.loads(notes.get(RUN_KEY, "{}"))
    crop = run.get("eval_crop", EvalTransform.crop_fraction)
    return EvalTransform(height, crop)

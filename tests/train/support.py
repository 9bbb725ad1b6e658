"""A run that takes seconds, and ways to break it."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bcosvit import ModelConfig
from bcosvit.models.weights import read_metadata
from bcosvit.train import Recipe
from bcosvit.train import train as train_anywhere
from bcosvit.train.checkpoints import read_checkpoint
from tests.conftest import small_config

DATA = "scenes?size=32&train=25&val=11"
"""In batches of 8 one sample is left over for training, and three for validation."""

train = partial(train_anywhere, accelerator="cpu")
"""Where the last bit counts, GPUs stay out."""


def model_config(**options: object) -> ModelConfig:
    """For 16×16 pixels and the eight classes of scenes."""
    return small_config(**{"num_classes": 8, "depth": 1, **options})


def recipe(**changes: Any) -> Recipe:
    """Three epochs of four steps, with everything that keeps a state."""
    fields: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_epochs": 0.5,
        "rand_augment": (1, 5),
        "crop": (0.5, 1.0),
        "ema": 0.9,
        "clip": "adaptive",
        "clip_value": 0.1,
        "checkpoint_steps": 2,
        "explain_every": 0,
        "num_workers": 0,
    }
    return Recipe(**{**fields, **changes})


def rows(folder: Path) -> list[dict[str, float]]:
    """``metrics.csv`` as numbers."""
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def assert_same_run(one: Path, other: Path) -> None:
    """To the last bit: weights, averages, optimizer, curves, and what was best."""
    assert (one / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    best = [folder / "best.safetensors" for folder in (one, other)]
    assert read_metadata(best[0]) == read_metadata(best[1])
    assert_equal(load_file(best[0]), load_file(best[1]), "best")
    mine, theirs = read_checkpoint(one / "last.ckpt"), read_checkpoint(other / "last.ckpt")
    assert mine["global_step"] == theirs["global_step"]
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert_equal(mine[part], theirs[part], part)


def assert_equal(one: Any, other: Any, where: str) -> None:
    """Deeply, tensors included."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{number}]")
    else:
        assert one == other, where

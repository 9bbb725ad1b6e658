"""One call that trains: resolves what is asked for, refuses what cannot work, runs, and tells.

Everything that can be wrong is found before the first step: settings, data, model, weights and
machines are gone through in this order, and only then is anything written.
"""

import errno
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from bcosvit.data.dataset import Source, SourceError, Split
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.models.base import AnyModel, create_model
from bcosvit.models.config import Config
from bcosvit.train import record
from bcosvit.train.best import WEIGHTS, BestModel
from bcosvit.train.cached import cached_features, check_cache
from bcosvit.train.checkpoints import CheckedIO, Checkpoints, Found, newest
from bcosvit.train.data import Data, Pictures, Samples
from bcosvit.train.history import History, Row
from bcosvit.train.initialize import initialize
from bcosvit.train.machines import Machines
from bcosvit.train.memory import keep_drawn
from bcosvit.train.on_device import pictures_on_device
from bcosvit.train.pictures import ContributionPictures
from bcosvit.train.plan import resolve
from bcosvit.train.progress import Progress
from bcosvit.train.recipe import Recipe
from bcosvit.train.record import Plan
from bcosvit.train.signals import Signals, Stopped
from bcosvit.train.skips import SkippedFiles
from bcosvit.train.task import Task

_EXPECTED_WARNINGS = (
    # A frozen backbone stays in evaluation mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # How many workers there are is the recipe's business.
    r"The '\w+_dataloader' does not have many workers",
    r"This DataLoader will create \d+ worker processes in total",
    # What it runs on is the machines' business.
    r"GPU available but not used",
    # Lightning's own way with torch's trees.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    folder: Path
    rows: list[Row]
    """``metrics.csv``: an epoch each."""
    accuracy: float
    """On the validation split, of the best epoch, which is the one that was saved."""

    @property
    def weights(self) -> Path:
        """The best model."""
        return self.folder / WEIGHTS


def train(
    data: str | Path | Source | None = None,
    *,
    out: str | Path,
    model: str | Config | None = None,
    recipe: str | Recipe | None = None,
    settings: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
    resume: bool = False,
    machines: Machines | None = None,
) -> Run:
    """Trains ``model`` on ``data`` by ``recipe`` and leaves everything about it in ``out``.

    ``settings`` change fields of the recipe and, as ``model.xxx``, of the model. ``init`` names
    weights to start from. With ``resume`` a run goes on where it was; then only ``out`` is needed.
    Asked to stop by Ctrl-C or SIGTERM, it saves and raises `Stopped`.
    """
    folder, machines = Path(out), machines or Machines()
    then = record.read(folder) if resume else None
    if not resume:
        _check_free(folder)
    plan, source = resolve(data, model, recipe, settings or {}, init, then)
    recipe = plan.recipe
    machines.check(recipe)
    check_cache(plan)
    found = newest(folder) if resume else None
    # So that every process starts from the same weights.
    seed_everything(recipe.seed, verbose=False)
    network = create_model(plan.model)
    # A cache is known by its backbone, so that one has to be there when a run resumes, too.
    if plan.init is not None and (found is None or recipe.cache_views):
        _say(initialize(network, plan.init))
    splits = _splits(plan, source)
    steps = -(-plan.train_images // recipe.batch_size)
    history, best = History(folder), BestModel(folder, plan)
    callbacks = [Progress(), history, best, *_callbacks(plan, folder, splits, machines)]
    logger = TensorBoardLogger(
        folder,
        name="tensorboard",
        version="",
        # What was logged after the checkpoint will be logged again.
        purge_step=found.step if found else None,
    )
    with _hushed():
        trainer = machines.trainer(recipe, steps, folder, callbacks, logger, CheckedIO())
        if resume:
            _tell_resumed(folder, found)
        elif _is_first():
            record.write(plan, folder, asdict(machines))
        try:
            samples = _samples(plan, network, splits, folder, trainer.strategy.root_device)
            trainer.fit(
                Task(network, recipe, steps, inputs="features" if recipe.cache_views else "images"),
                datamodule=Data(*samples, recipe),
                ckpt_path=found.path if found else None,
                weights_only=True,
            )
        except Stopped:
            how = f"bcosvit train --resume --out {folder}{machines.options}"
            what = f"Stopped after step {trainer.global_step} of {steps * recipe.epochs}"
            raise Stopped(f"{what}; all is saved. To go on: {how}" if _is_first() else "") from None
        except SourceError as error:
            # A worker's error arrives with its traceback, the sentence last.
            sentence = str(error).strip().splitlines()[-1].rpartition("SourceError: ")[2]
            raise SourceError(sentence) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"There is no room left in {folder} ({error.strerror}): what was saved before is "
                f"untouched; make some and go on with --resume."
            ) from error
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "The device's memory is too small for its share of a batch: set accumulate=2 or "
                "more, precision=bf16, or a smaller batch_size."
            ) from error
    _say(f"Best validation accuracy {best.accuracy:.2%} in epoch {best.epoch}: {folder / WEIGHTS}")
    return Run(folder=folder, rows=history.rows, accuracy=best.accuracy)


def _splits(plan: Plan, source: Source) -> tuple[Split, Split]:
    recipe, size = plan.recipe, plan.image_size
    for_training = TrainTransform(
        size,
        rand_augment=recipe.rand_augment or (0, 0),
        flip=recipe.flip,
        scale=recipe.crop,
    )
    for_validation = EvalTransform(size, recipe.eval_crop)
    return (
        keep_drawn(source.train).with_transform(for_training),
        keep_drawn(source.val).with_transform(for_validation),
    )


def _samples(
    plan: Plan, network: AnyModel, splits: tuple[Split, Split], folder: Path, device: torch.device
) -> tuple[Samples, Samples]:
    recipe = plan.recipe
    if recipe.cache_views:
        return cached_features(plan, network, splits, folder, device, _say)
    if recipe.pictures_on_device:
        return pictures_on_device(splits, recipe, device)
    return Pictures(splits[0], recipe.seed), Pictures(splits[1], recipe.seed)


def _callbacks(
    plan: Plan, folder: Path, splits: tuple[Split, Split], machines: Machines
) -> list[Callback]:
    recipe = plan.recipe
    callbacks: list[Callback] = [SkippedFiles(folder, *splits)]
    if plan.model.family == "bcos" and recipe.picture_every:
        if machines.strategy == "fsdp":
            _say("No pictures of contributions are drawn with fsdp, which shards the weights.")
        else:
            pictures = folder / "pictures"
            callbacks.append(
                ContributionPictures(pictures, splits[1], plan.classes, recipe.picture_every)
            )
    if recipe.ema is not None:
        # After all that looks at the validated weights: it puts the trained ones back.
        callbacks.append(EMAWeightAveraging(decay=recipe.ema))
    return [*callbacks, Checkpoints(folder, recipe, Signals())]


def _check_free(folder: Path) -> None:
    # The other processes arrive when the first has begun to write.
    if not _is_first() or not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the run.")
    if (folder / record.RECORD).exists():
        raise ValueError(
            f"There is a run in {folder} already: go on with it by --resume, or give another --out."
        )
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder for the run.")


def _tell_resumed(folder: Path, found: Found | None) -> None:
    if found is None:
        _say(f"The run in {folder} had not saved anything yet: it starts from the beginning.")
        return
    if found.complaint is not None:
        _say(f"{found.complaint} The one before it is used.")
    _say(f"Resuming from {found.path}, step {found.step}.")


def _is_first() -> bool:
    """Whether this is the process that writes; known before Lightning starts the others."""
    return getattr(rank_zero_only, "rank", 0) == 0


@rank_zero_only
def _say(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def _hushed() -> Iterator[None]:
    """Without Lightning's chatter, and without its warnings about what is meant to be so."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

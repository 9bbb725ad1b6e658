"""`train`: resolves what was asked for, refuses what cannot work, and runs.

Everything that can be wrong is found before the first step. Settings, data, model, weights and
devices are checked in this order, and only then is anything written.
"""

import logging
import math
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.labeled import LabeledImages
from bcosvit.data.sources import Source
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.files import FULL, locked_folder
from bcosvit.models.base import AnyModel, create_model
from bcosvit.models.config import Config
from bcosvit.train.callbacks import (
    WEIGHTS,
    AveragedWeights,
    BestModel,
    Checkpoints,
    ContributionImages,
    History,
    Localization,
    ProgressBar,
    Row,
    SkippedFiles,
    Stopped,
    StopSignals,
)
from bcosvit.train.checkpoints import (
    LAST,
    ChecksummedIO,
    FoundCheckpoint,
    initialize,
    newest_checkpoint,
)
from bcosvit.train.data import BatchDataset, DataModule, ImageDataset, cache_drawn_images
from bcosvit.train.device_images import load_device_images
from bcosvit.train.devices import Devices
from bcosvit.train.feature_datasets import check_cache, feature_datasets
from bcosvit.train.plan import RECORD, Plan, resolve
from bcosvit.train.processes import (
    PERIOD,
    ProcessWatch,
    is_lost_connection,
    killed_reader,
    saved,
    without_lightnings_observer,
)
from bcosvit.train.recipe import Recipe
from bcosvit.train.resources import fit_to_machine
from bcosvit.train.task import DivergedError, Task

_EXPECTED_WARNINGS = (
    # A frozen backbone stays in evaluation mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # The recipe decides how many workers there are.
    r"The '\w+_dataloader' does not have many workers",
    r"This DataLoader will create \d+ worker processes in total",
    # The user decides which devices are used.
    r"GPU available but not used",
    # Lightning calls a deprecated function of torch.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    folder: Path
    rows: list[Row]
    """``metrics.csv``: one row per epoch."""
    accuracy: float
    """Validation accuracy of the best epoch, whose weights are saved."""

    @property
    def weights(self) -> Path:
        """The weights file of the best model."""
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
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
) -> Run:
    """Trains a model, and writes weights, metrics and checkpoints into a folder.

    Args:
        data: A folder with one sub-folder per class, tar shards, ``hf:NAME``, ``scenes``, or an
            opened `Source`; ``unlabeled:FOLDER`` where a teacher gives the labels.
        out: The folder of the run, which must be new unless ``resume`` is set.
        model: A model's name or config; by default that of ``init`` or of the recipe.
        recipe: A `Recipe`, or the name of a registered one; by default ``"quick"``.
        settings: Fields of the recipe to change and, as ``"model.xxx"``, of the model.
        init: Weights to start from: those of a model, or of its backbone.
        resume: Whether the run in ``out`` continues where it ended. Then only ``out`` is needed.
        accelerator: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        devices: Devices per machine, with one process each.
        num_nodes: Machines.
        strategy: ``"auto"``, ``"ddp"`` or ``"fsdp"``.

    Returns:
        The finished run.

    Raises:
        ValueError: Something is missing or not allowed, the data cannot be read, the loss diverged,
            or there is no space left on the disk or the device.
        Stopped: Ctrl-C or SIGTERM was received, and the state of the run is saved.

    Examples:
        >>> run = train("scenes?size=48", out="runs/quick")  # doctest: +SKIP
        >>> model = bcosvit.load(run.weights)  # doctest: +SKIP
    """
    folder = Path(out)
    where = Devices(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy
    )
    previous = Plan.read(folder) if resume else None
    # Ends what must not outlive the run: its lock, and the processes that read images.
    with ExitStack() as lock:
        if not resume:
            _check_empty(folder)
        elif _is_first_process():
            lock.enter_context(locked_folder(folder))
        command = f"bcosvit train --resume --out {folder}{where.options}"
        plan, source = resolve(data, model, recipe, settings or {}, init, previous)
        recipe = plan.recipe
        where.check(recipe)
        check_cache(plan)
        found = newest_checkpoint(folder) if resume else None
        # Every process starts from the same weights.
        seed_everything(recipe.seed, verbose=False)
        network = create_model(plan.model)
        # A cache is identified by its backbone: a run with a cache loads it when it resumes, too.
        if plan.init is not None and (found is None or recipe.cache_views):
            _print(initialize(network, plan.init))
        if recipe.head_only:
            network.requires_grad_(False)
            network.get_classifier().requires_grad_(True)
        splits = _splits(plan, source)
        if previous is None:
            images = ImageDataset(splits[0], recipe.seed)
            with _without_lightning_messages(), _plain_errors(folder, command):
                plan = fit_to_machine(plan, network, images, where, folder, _print)
            recipe = plan.recipe
        steps = -(-plan.train_images // recipe.batch_size)
        history, best = History(folder), BestModel(folder, plan)
        callbacks = [
            ProgressBar(),
            history,
            best,
            *_callbacks(plan, folder, source, splits, where, steps),
            ProcessWatch(command),
        ]
        logger = TensorBoardLogger(
            folder,
            name="tensorboard",
            version="",
            # What was logged after the checkpoint will be logged again.
            purge_step=found.step if found else None,
        )
        with _without_lightning_messages(), _plain_errors(folder, command):
            trainer = where.trainer(recipe, steps, folder, callbacks, logger, ChecksummedIO())
            if resume:
                _print_resumed(folder, found)
            elif _is_first_process():
                # Made as late as this, so that mistakes are found before anything is written.
                lock.enter_context(locked_folder(folder))
                _check_empty(folder)
                plan.write(folder, asdict(where))
            try:
                samples = _samples(plan, network, splits, folder, trainer.strategy.root_device)
                data_module = DataModule(
                    *samples,
                    batch_size=recipe.batch_size,
                    seed=recipe.seed,
                    num_workers=recipe.num_workers or 0,
                    accumulate=recipe.accumulate_grad_batches or 1,
                    # A thread that allocates pinned memory would disturb the recording of a graph.
                    pin_memory=not recipe.cuda_graphs,
                    name_of=splits[0].key,
                )
                lock.callback(data_module.close)
                trainer.fit(
                    Task(
                        network,
                        recipe,
                        steps,
                        inputs="features" if recipe.cache_views else "images",
                    ),
                    datamodule=data_module,
                    ckpt_path=found.path if found else None,
                    weights_only=True,
                )
            except Stopped:
                done = f"Stopped after step {trainer.global_step} of {steps * recipe.epochs}"
                message = f"{done}; everything is saved. To continue: {command}"
                raise Stopped(message if _is_first_process() else "") from None
    _print(
        f"Best validation accuracy {best.accuracy:.2%} in epoch {best.epoch}: {folder / WEIGHTS}"
    )
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
        cache_drawn_images(source.train).with_transform(for_training),
        cache_drawn_images(source.val).with_transform(for_validation),
    )


def _samples(
    plan: Plan, network: AnyModel, splits: tuple[Split, Split], folder: Path, device: torch.device
) -> tuple[BatchDataset, BatchDataset]:
    recipe = plan.recipe
    if recipe.cache_views:
        return feature_datasets(plan, network, splits, folder, device, _print)
    if recipe.images_on_device:
        return load_device_images(splits, recipe, device)
    return ImageDataset(splits[0], recipe.seed), ImageDataset(splits[1], recipe.seed)


def _callbacks(
    plan: Plan,
    folder: Path,
    source: Source,
    splits: tuple[Split, Split],
    where: Devices,
    steps: int,
) -> list[Callback]:
    recipe = plan.recipe
    callbacks: list[Callback] = [SkippedFiles(folder, *splits)]
    explains = plan.model.family == "bcos"
    if explains and where.strategy == "fsdp":
        explains = False
        _print("With fsdp, which shards the weights, contributions are neither drawn nor measured.")
    if explains and recipe.explain_every:
        images = folder / "explanations"
        callbacks.append(ContributionImages(images, splits[1], plan.classes, recipe.explain_every))
    if explains and recipe.localize_every:
        transform = EvalTransform(plan.image_size, recipe.eval_crop)
        # The original split: it knows masks. A label of -1 stays as it is.
        labels = [*range(len(source.classes)), -1]
        measured = LabeledImages([source.val], labels, transform)
        callbacks.append(Localization(measured, recipe.localize_every))
    if recipe.ema is not None:
        # After all callbacks that use the validated weights: it restores the trained ones.
        start = math.ceil((recipe.fade_until or 0) * (steps * recipe.epochs))
        callbacks.append(AveragedWeights(recipe.ema, start))
    return [*callbacks, Checkpoints(folder, recipe, StopSignals())]


def _check_empty(folder: Path) -> None:
    # The other processes start when the first one has begun to write.
    if not _is_first_process() or not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the run.")
    if (folder / RECORD).exists():
        raise ValueError(
            f"There is a run in {folder} already: continue it with --resume, or give another --out."
        )
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder for the run.")


def _print_resumed(folder: Path, found: FoundCheckpoint | None) -> None:
    if found is None:
        _print(f"The run in {folder} has no checkpoint yet: it starts from the beginning.")
        return
    if found.warning is not None:
        _print(f"{found.warning} The checkpoint before it is used.")
    _print(f"Resuming from {found.path}, step {found.step}.")


def _is_first_process() -> bool:
    """Whether this process writes; known before Lightning starts the others."""
    return getattr(rank_zero_only, "rank", 0) == 0


@rank_zero_only
def _print(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def _plain_errors(folder: Path, command: str) -> Iterator[None]:
    """Turns what users can repair into errors of one sentence."""
    try:
        with without_lightnings_observer(), _quiet_writers():
            yield
    except DivergedError as error:
        kept = [name for name in (LAST, WEIGHTS) if (folder / name).exists()]
        rest = f"{' and '.join(kept)} in {folder} are from before" if kept else "nothing was saved"
        raise DivergedError(
            f"Training diverged: {error}; {rest}. Start a new run with a lower learning_rate or "
            f"with clip=adaptive."
        ) from error
    except RuntimeError as error:
        said = killed_reader(error)
        if said is not None:
            raise ValueError(f"{said}; {saved(command)}") from error
        if is_lost_connection(error):
            # The thread that watches knows more, and ends this process.
            time.sleep(5 * PERIOD)
            raise ValueError(f"Another process of this run ended; {saved(command)}") from error
        raise
    except SourceError as error:
        # An error in a worker arrives with its traceback; the message comes last.
        sentence = str(error).strip().splitlines()[-1].rpartition("SourceError: ")[2]
        raise SourceError(sentence) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ValueError(
            f"There is no space left in {folder} ({error.strerror}): what was saved before is "
            f"untouched; make room and continue with --resume."
        ) from error
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "The device's memory is too small for its share of a batch: set "
            "accumulate_grad_batches=2 or more, precision=bf16, or a smaller batch_size."
        ) from error


@contextmanager
def _quiet_writers() -> Iterator[None]:
    """Keeps TensorBoard's thread from printing a traceback of what is raised in the run as well."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard")
        if not (is_writer and isinstance(args.exc_value, OSError)):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _without_lightning_messages() -> Iterator[None]:
    """Silences Lightning's messages, and its warnings about what is intended."""
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

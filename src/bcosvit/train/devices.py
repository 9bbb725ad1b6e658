"""The devices that a run uses, and their memory.

Everything that the hardware or the strategy cannot do is refused here, before a run starts.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from bcosvit.machine import free_memory
from bcosvit.train.recipe import Precision, Recipe

Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["auto", "ddp", "fsdp"]
LightningPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]

_PRECISIONS: dict[Precision, LightningPrecision] = {
    "32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The arguments of Lightning's ``Trainer`` that say where a run takes place.

    Apart from rounding, and from which images ``mixup`` mixes, the result of a run does not depend
    on them.
    """

    accelerator: str = "auto"
    devices: int = 1
    """Devices per machine, with one process each. CPU processes communicate through gloo."""
    num_nodes: int = 1
    """Machines."""
    strategy: str = "auto"
    """``auto``: ``ddp`` where there is more than one device."""

    def __post_init__(self) -> None:
        for name in ("devices", "num_nodes"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {value} is not allowed: give an integer >= 1.")
        for name, allowed in {
            "strategy": get_args(Strategy),
            "accelerator": get_args(Accelerator),
        }.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name} = {value!r} is not allowed: choose from {', '.join(allowed)}."
                )

    def check(self, recipe: Recipe) -> None:
        """Raises ``ValueError`` where these devices cannot do what the recipe asks for."""
        processes = self.processes
        parts = recipe.accumulate_grad_batches or 1
        if recipe.batch_size % (processes * parts):
            raise ValueError(
                f"batch_size = {recipe.batch_size} cannot be divided evenly: give a multiple of "
                f"{processes} devices × {parts} accumulated batches = {processes * parts}."
            )
        on_cpu = self.device.type == "cpu"
        if self.accelerator == "gpu" and on_cpu:
            raise ValueError(
                "accelerator = 'gpu' is not possible, because PyTorch finds no GPU; use cpu or "
                "auto, or find out why with `bcosvit doctor`."
            )
        if recipe.precision == "fp16" and on_cpu:
            raise ValueError("precision = 'fp16' needs a GPU; use bf16 or 32 on a CPU.")
        if recipe.cuda_graphs and (on_cpu or processes > 1):
            raise ValueError(
                "cuda_graphs = True needs exactly one CUDA GPU; leave it out, or set devices=1."
            )
        if self.strategy == "fsdp":
            if recipe.clip != "none":
                raise ValueError(
                    f"clip = {recipe.clip!r} is not possible with fsdp, which splits the weights "
                    f"that a norm is taken of; use ddp, or clip=none."
                )
            if recipe.ema is not None:
                raise ValueError(
                    "ema is not possible with fsdp, which shards the weights; use ddp, or ema=None."
                )

    @property
    def device(self) -> torch.device:
        """The first device of this process."""
        if self.accelerator != "cpu" and (found := torch.accelerator.current_accelerator(True)):
            return found
        return torch.device("cpu")

    @property
    def processes(self) -> int:
        """The number of processes of a run, on all machines."""
        return self.devices * self.num_nodes

    @property
    def options(self) -> str:
        """The options of the command line that select these devices."""
        defaults = Devices()
        return "".join(
            f" --{name.replace('_', '-')} {getattr(self, name)}"
            for name in ("devices", "num_nodes", "strategy", "accelerator")
            if getattr(self, name) != getattr(defaults, name)
        )

    def trainer(
        self,
        recipe: Recipe,
        steps_per_epoch: int,
        folder: Path,
        callbacks: list[Callback],
        logger: Logger,
        checkpoint_io: CheckpointIO,
    ) -> Trainer:
        """Returns Lightning's trainer for ``recipe`` on these devices."""
        plugins: list[CheckpointIO | ClusterEnvironment] = [checkpoint_io]
        if SLURMEnvironment.detect():
            # A requeued job resumes from our own checkpoints.
            plugins.append(SLURMEnvironment(auto_requeue=False))
        try:
            return Trainer(
                accelerator=self.accelerator,
                devices=self.devices,
                num_nodes=self.num_nodes,
                strategy=self.strategy,
                precision=_PRECISIONS[recipe.precision],
                max_epochs=recipe.epochs,
                accumulate_grad_batches=recipe.accumulate_grad_batches or 1,
                log_every_n_steps=min(50, steps_per_epoch),
                callbacks=callbacks,
                logger=logger,
                plugins=plugins,  # type: ignore[arg-type]
                default_root_dir=folder,
                # The data module distributes batches itself, each sample once.
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                enable_model_summary=False,
            )
        except (MisconfigurationException, RuntimeError) as error:
            raise ValueError(f"The run cannot start on these devices: {error}") from error


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies ``tensor`` to ``device`` without waiting for the work queued there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def memory_shortage(what: str, needed: int, share: float, device: torch.device) -> str | None:
    """Says why ``needed`` bytes exceed a share of the free memory; ``None`` where they fit."""
    free = free_memory(device)
    if needed <= share * free:
        return None
    return (
        f"{readable_bytes(needed)} of {what} are more than {share:.0%} of the "
        f"{readable_bytes(free)} that are free"
    )


def readable_bytes(number: int) -> str:
    """Writes a number of bytes for people.

    Examples:
        >>> readable_bytes(1536)
        '1.5 KiB'
    """
    power = min(4, int(math.log(max(number, 1), 1024)))
    return f"{number / 1024**power:.1f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

"""Where a run runs: devices, nodes and strategy, handed straight to Lightning.

Everything that the hardware or the strategy cannot do is refused here, by name.
"""

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

from bcosvit.train.recipe import Recipe

Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["auto", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The result of a run does not depend on these, rounding apart."""

    devices: int = 1
    """Per machine; one process each. On CPUs, too: they talk by gloo."""
    nodes: int = 1
    """Machines."""
    strategy: Strategy = "auto"
    """``auto``: ``ddp`` where there is more than one device."""
    accelerator: Accelerator = "auto"

    def __post_init__(self) -> None:
        for name in ("devices", "nodes"):
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
        """Refuses what the recipe asks of them and they cannot do."""
        processes = self.devices * self.nodes
        shares = processes * recipe.accumulate
        if recipe.batch_size % shares:
            raise ValueError(
                f"batch_size = {recipe.batch_size} cannot be shared out evenly: give a multiple of "
                f"{processes} devices × {recipe.accumulate} accumulated batches = {shares}."
            )
        on_cpu = self.accelerator == "cpu" or not torch.accelerator.is_available()
        if self.accelerator == "gpu" and on_cpu:
            raise ValueError(
                "accelerator = 'gpu' is not possible: torch finds none; use cpu or auto, or look "
                "into it with `bcosvit doctor`."
            )
        if recipe.precision == "fp16" and on_cpu:
            raise ValueError("precision = 'fp16' needs a GPU; use bf16 or 32 on a CPU.")
        if recipe.graphs and (on_cpu or processes > 1):
            raise ValueError(
                "graphs = True needs a CUDA GPU, and one alone; leave it out, or set devices=1."
            )
        if self.strategy == "fsdp":
            if recipe.clip == "adaptive":
                raise ValueError(
                    "clip = 'adaptive' is not possible with fsdp, which cuts weights across units; "
                    "use ddp, or clip=norm."
                )
            if recipe.ema is not None:
                raise ValueError(
                    "ema is not possible with fsdp, which shards the weights; use ddp, or ema=None."
                )

    @property
    def options(self) -> str:
        """As on the command line, without what is so by default."""
        defaults = Machines()
        return "".join(
            f" --{name} {getattr(self, name)}"
            for name in ("devices", "nodes", "strategy", "accelerator")
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
        """Lightning's trainer for ``recipe`` on these machines."""
        plugins: list[CheckpointIO | ClusterEnvironment] = [checkpoint_io]
        if SLURMEnvironment.detect():
            # Our own checkpoints serve a requeued job as well.
            plugins.append(SLURMEnvironment(auto_requeue=False))
        precision: Literal["32-true", "bf16-mixed", "16-mixed"] = (
            "32-true"
            if recipe.precision == "32"
            else "bf16-mixed"
            if recipe.precision == "bf16"
            else "16-mixed"
        )
        try:
            return Trainer(
                accelerator=self.accelerator,
                devices=self.devices,
                num_nodes=self.nodes,
                strategy=self.strategy,
                precision=precision,
                max_epochs=recipe.epochs,
                accumulate_grad_batches=recipe.accumulate,
                log_every_n_steps=min(50, steps_per_epoch),
                callbacks=callbacks,
                logger=logger,
                plugins=plugins,  # type: ignore[arg-type]
                default_root_dir=folder,
                # The data module shares out batches itself, each sample once.
                use_distributed_sampler=False,
                num_sanity_val_steps=0,
                enable_model_summary=False,
            )
        except (MisconfigurationException, RuntimeError) as error:
            raise ValueError(f"These machines cannot run it: {error}") from error

"""The store of runs: trains what is missing, resumes what is unfinished, and never trains twice.

A run lies in ``runs/NAME``. The name ends in a digest of all that its result depends on (data,
model, recipe, backbone), so that figures which need the same run find the same folder, and a run of
other settings another one. It counts as finished once ``done.json`` is there.

What is measured is the model of the *last* epoch, ``final.safetensors``. The best one that training
keeps was chosen by its accuracy on the validation pictures, on which it is to be measured.
"""

import dataclasses
import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bcosvit.data.dataset import Source
from bcosvit.metrics import write_summary
from bcosvit.models.config import Config, DenseNetConfig
from bcosvit.models.hub import locate
from bcosvit.models.registry import model_config, to_dict
from bcosvit.models.weights import RUN_KEY, read_metadata, save_state
from bcosvit.paper.spec import BACKBONE_OF, RunSpec
from bcosvit.paper.study import Study
from bcosvit.predictor import choose_device
from bcosvit.report.provenance import machine
from bcosvit.train import checkpoints
from bcosvit.train import train as train_run
from bcosvit.train.callbacks import WEIGHTS
from bcosvit.train.plan import NEUTRAL_FIELDS, RECORD
from bcosvit.train.recipe import Recipe
from bcosvit.train.task import model_state

FINAL, DONE = "final.safetensors", "done.json"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Every run of a study by its spec."""

    study: Study
    source: Source
    recipes: Mapping[str, Recipe]
    """By kind."""
    fingerprint: str
    """Of the source."""
    folder_name: str = "runs"
    say: Say = print

    def config(self, spec: RunSpec) -> Config:
        """The model, resolved."""
        classes = len(self.source.classes)
        dense = self.study.part("densenet.")
        if spec.is_backbone:
            flavor = {"flavor": self.study.flavor} if spec.family == "bcos" else {}
            return model_config(spec.model, **{**flavor, **dense, "num_classes": classes})
        flavor_ = self.study.flavor if spec.family == "bcos" else "conventional"
        options = {"backbone": DenseNetConfig(flavor=flavor_, **dense)}  # type: ignore[arg-type]
        size = self.recipe(spec).image_size
        sized = {} if size is None else {"image_size": size}
        return model_config(
            spec.model,
            **{
                **options,
                **sized,
                **self.study.part("model."),
                **dict(spec.options),
                "num_classes": classes,
            },
        )

    def recipe(self, spec: RunSpec) -> Recipe:
        return dataclasses.replace(self.recipes[spec.kind], seed=spec.seed)

    def backbone(self, spec: RunSpec) -> RunSpec | None:
        """The run whose weights this one starts from; None: no run's."""
        name = BACKBONE_OF[spec.family]
        own = spec.is_backbone or name in self.study.given
        return None if own else RunSpec(model=name)

    def name(self, spec: RunSpec) -> str:
        """Of its folder."""
        recipe = dataclasses.asdict(self.recipe(spec))
        backbone = self.backbone(spec)
        given = self.study.given.get(BACKBONE_OF[spec.family])
        made_of = {
            "data": self.fingerprint,
            "model": to_dict(self.config(spec)),
            "recipe": {k: v for k, v in recipe.items() if k not in NEUTRAL_FIELDS},
            "init": self.name(backbone)
            if backbone
            else None
            if spec.is_backbone or given is None
            else _digest(given),
        }
        digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        options = "".join(f"-{key}_{value}" for key, value in spec.options)
        return f"{spec.model}{options}-seed{spec.seed}-{digest[:8]}"

    def folder(self, spec: RunSpec) -> Path:
        return self.study.out / self.folder_name / self.name(spec)

    def done(self, spec: RunSpec) -> dict[str, Any] | None:
        """What a finished run leaves: accuracies, seconds; None before."""
        return read_json(self.folder(spec) / DONE)

    def weights(self, spec: RunSpec) -> Path:
        """Of a finished run."""
        return self.folder(spec) / FINAL

    def needed(self, specs: "list[RunSpec]") -> list[RunSpec]:
        """These and their backbones, the backbones first, each once."""
        backbones = [found for spec in specs if (found := self.backbone(spec)) is not None]
        return list(dict.fromkeys([*backbones, *specs]))

    def train(self, spec: RunSpec) -> None:
        """Trains the run, or the rest of it, unless it is finished; its backbone must be."""
        folder = self.folder(spec)
        # Several processes may work on one study, each on runs that no other is at.
        lock = self.study.out / "locks" / f"{folder.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if self.done(spec) is not None:
                return
            began = time.monotonic()
            resumes = (folder / RECORD).is_file()
            if resumes:
                self.say(f"Resuming {spec.label}")
                run = train_run(
                    self.source, out=folder, resume=True, accelerator=self.accelerator()
                )
            else:
                self.say(f"Training {spec.label}")
                # Without a record nothing in it counts: the process ended as it began.
                shutil.rmtree(folder, ignore_errors=True)
                run = self._start(spec, folder)
            save_final(folder, self.config(spec), run.rows[-1])
            facts = {
                "model": spec.label,
                "epochs": len(run.rows),
                "final_top1": run.rows[-1]["val_top1"],
                "best_top1": run.accuracy,
                # Of a run that was resumed only the last part was seen.
                "seconds": None if resumes else time.monotonic() - began,
                "recipe": dataclasses.asdict(self.recipe(spec)),
                "machine": machine(choose_device(self.study.device)),
            }
            write_summary(folder / DONE, facts)
            if torch.cuda.is_available():
                # Lightning's objects refer to each other, and would keep the device's memory.
                gc.collect()
            # They serve to resume alone, and take three times the room of the weights.
            for name in (checkpoints.LAST, checkpoints.PREVIOUS):
                (folder / name).unlink(missing_ok=True)

    def _start(self, spec: RunSpec, folder: Path) -> Any:
        backbone = self.backbone(spec)
        init: str | Path | None = None
        if backbone is not None:
            init = self.weights(backbone)
        elif not spec.is_backbone:
            init = self.study.given.get(BACKBONE_OF[spec.family])
        recipe = self.recipe(spec)
        if recipe.cache_views and not spec.is_backbone and recipe.cache_folder is None:
            recipe = dataclasses.replace(recipe, cache_folder=str(self._cache(spec)))
        return train_run(
            self.source,
            out=folder,
            model=self.config(spec),
            recipe=recipe,
            init=init,
            accelerator=self.accelerator(),
        )

    def _cache(self, spec: RunSpec) -> Path:
        """Features of one backbone, tap and seed serve all transformers on them."""
        tap = spec.model.rsplit("_", 1)[1]
        backbone = self.backbone(spec)
        source = self.name(backbone) if backbone else f"given-{spec.family}"
        return self.study.out / "features" / self.folder_name / f"{source}-{tap}-seed{spec.seed}"

    def accelerator(self) -> str:
        """Of the one device that a run uses: a study is spread over several devices run by run."""
        kind = self.study.device.partition(":")[0]
        return "cpu" if kind == "cpu" else "gpu" if kind == "cuda" else "auto"


def save_final(folder: Path, config: Config, row: Mapping[str, float]) -> None:
    """The last epoch's weights (their average, where the recipe keeps one), ready to be loaded."""
    state = model_state(checkpoints.read_checkpoint(folder / checkpoints.LAST)["state_dict"])
    notes = read_metadata(folder / WEIGHTS)
    run = json.loads(notes[RUN_KEY]) | {"epoch": int(row["epoch"]), "accuracy": row["val_top1"]}
    save_state(state, config, folder / FINAL, metadata={**notes, RUN_KEY: json.dumps(run)})


@cache
def _digest(weights: str) -> str:
    return hashlib.sha256(locate(weights).read_bytes()).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """What ``write_summary`` wrote; None where there is nothing."""
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return None

"""Trains and measures the models of `bcosvit reproduce` several at a time, on one GPU.

`bcosvit reproduce` trains one run after the other, and each computes the features of the same
frozen backbone again. Here the transformers of one family and seed are trained together: the
features of a batch are computed once for all of them. Measurements are taken by as many processes
as are started, in the order of the list. What is written are runs and measurements of `reproduce`:
the same command without this script finds them finished, and draws its figures from them.

    python benchmarks/paper_models.py backbone --data imagenette/ --out paper --family bcos
    python benchmarks/paper_models.py train --data imagenette/ --out paper --family bcos \\
        --models ti_13,ti_38,ti_87,ti_87+position=none
    python benchmarks/paper_models.py measure --data imagenette/ --out paper --family bcos \\
        --models ti_13,ti_38,ti_87 --metrics localization,perturbation,norms --images 60
    python benchmarks/paper_models.py work plan.txt --seconds 600

``work`` takes the measurements of a file with a ``measure`` command per line (without the script's
name), the first lines first, of all runs that are trained meanwhile. It ends when all are taken or
the time is up, and reads the file again when it changes. Images are read once for all models.

``backbone`` is left out where the backbone is given (``--bcos-backbone``,
``--conventional-backbone``). Options that `reproduce` has, too (``--set``, ``--flavor``,
``--methods``, ``--grids``, ``--images``), mean the same; its recipe is ``small``. ``--options``
measures with all sets of options of `reproduce options`. With the method ``attnlrp``, which is in
`attnlrp.py`, that script draws the figures instead of `reproduce`.
"""

import argparse
import dataclasses
import gc
import json
import os
import shlex
import time
import traceback
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.data.dataset import Sample, Split, Transform
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.metrics import write_summary
from bcosvit.models.base import create_model
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY, save_state
from bcosvit.nn import CUDAGraphRunner
from bcosvit.paper.faithfulness import Options
from bcosvit.paper.figures import Perturbation
from bcosvit.paper.measure import measure_options
from bcosvit.paper.runs import (
    DONE,
    FINAL,
    digest,
    run_backbone,
    run_config,
    run_folder,
    run_recipe,
    run_record,
    train_runs,
)
from bcosvit.paper.study import BACKBONE_OF, RunSpec, Study, StudyOptions
from bcosvit.predictor import choose_device
from bcosvit.report.provenance import machine
from bcosvit.settings import parse_settings
from bcosvit.train.checkpoints import initialize
from bcosvit.train.data import SampleRequest, derive_seed
from bcosvit.train.device_images import DeviceImageDataset
from bcosvit.train.resources import choose_workers

BLOCKS = {"13": 1, "38": 2, "87": 3}


def main() -> None:
    parser = arguments()
    given = parser.parse_args()
    if given.step == "work":
        work(Plan(Path(given.plan), parser), given.seconds)
        return
    study = open_study(given)
    if given.step == "backbone":
        train_runs(study, [RunSpec(model=BACKBONE_OF[given.family])])
    elif given.step == "train":
        lacking = [spec for spec in specs(given) if run_record(study, spec) is None]
        train_together(study, lacking, given.wait, given.after)
    else:
        work([given], 0)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", required=True)
    shared.add_argument("--out", required=True)
    shared.add_argument("--family", choices=("bcos", "conventional"), required=True)
    shared.add_argument("--flavor", default="v2")
    shared.add_argument("--bcos-backbone")
    shared.add_argument("--conventional-backbone")
    shared.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument("--models", required=True, help="e.g. ti_38,s_87+maxout=1")
    models.add_argument("--seed", type=int, default=0)
    steps.add_parser("backbone", parents=[shared])
    train = steps.add_parser("train", parents=[shared, models])
    train.add_argument("--wait", type=float, default=0, help="Seconds, for the backbone")
    train.add_argument("--after", type=Path, help="Begin when this file exists, prepared before")
    measure = steps.add_parser("measure", parents=[shared, models])
    measure.add_argument("--methods")
    measure.add_argument("--grids", type=int, default=250)
    measure.add_argument("--images", type=int, default=250)
    measure.add_argument("--batch-size", type=int, default=64)
    measure.add_argument("--metrics", default="localization,perturbation")
    measure.add_argument("--options", action="store_true", help="All sets of `reproduce options`")
    work = steps.add_parser("work")
    work.add_argument("plan")
    work.add_argument("--seconds", type=float, default=0, help="How long to wait for runs")
    return parser


def open_study(given: argparse.Namespace) -> Study:
    backbones = {
        "bcos_densenet121": given.bcos_backbone,
        "densenet121": given.conventional_backbone,
    }
    how: dict[str, Any] = {}
    if given.step == "measure":
        methods = given.methods.split(",") if given.methods else None
        if "attnlrp" in (methods or ()):
            import attnlrp  # noqa: F401  (registers the method)
        how = {name: getattr(given, name) for name in ("grids", "images", "batch_size")}
        how["methods"] = methods and tuple(methods)
    how |= {
        "flavor": given.flavor,
        "backbones": {name: file for name, file in backbones.items() if file},
    }
    # The data are listed once for all commands.
    key = (given.data, given.out, *given.set)
    if key in _opened:
        return dataclasses.replace(_opened[key], **how, missing={}, used={})
    settings = parse_settings(given.set)
    _opened[key] = Study.open(
        StudyOptions(data=given.data, out=Path(given.out), recipe="small", settings=settings, **how)
    )
    return _opened[key]


_opened: dict[tuple[str, ...], Study] = {}


def specs(given: argparse.Namespace) -> list[RunSpec]:
    """The runs that are named."""
    return [parse(given.family, text, given.seed) for text in given.models.split(",") if text]


def parse(family: str, text: str, seed: int) -> RunSpec:
    """``ti_38+maxout=1`` as a run."""
    name, *options = text.split("+")
    size, tap = name.split("_")
    spec = RunSpec.vit(family, size, tap, **parse_settings(options))
    return dataclasses.replace(spec, seed=seed)


Kept = dict[str, dict[Any, dict[int, Sample]]]
"""Images that were read, by data, transform and position."""


class KeptSplit(Split):
    """A split whose transformed images stay in memory, for passes over many models."""

    def __init__(self, split: Split, kept: dict[Any, dict[int, Sample]]) -> None:
        super().__init__(
            split.reader, split.indices, transform=split.transform, max_skipped=split.max_skipped
        )
        self._bad = split._bad
        self._all = kept
        self._kept = kept.setdefault(split.transform, {})

    def with_transform(self, transform: Transform | None) -> Split:
        return KeptSplit(super().with_transform(transform), self._all)

    def __getitem__(self, position: int | tuple[int, int]) -> Sample:
        if isinstance(position, tuple):
            return super().__getitem__(position)
        if position not in self._kept:
            self._kept[position] = super().__getitem__(position)
        return self._kept[position]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One metric of one run, with one or several sets of options."""

    study: Study
    spec: RunSpec
    metric: str
    sets: Sequence[dict[str, Any]]

    @cached_property
    def folder(self) -> Path:
        """Of its run."""
        return run_folder(self.study, self.spec)

    @cached_property
    def claim(self) -> Path:
        """A file that the process makes which takes the measurement."""
        study = self.study
        what = [self.metric, self.sets, study.methods, study.grids, study.images]
        return study.out / "claims" / f"{self.folder.name}-{self.metric}-{digest(what)}"

    @property
    def is_ready(self) -> bool:
        """Whether its run is trained."""
        return (self.folder / DONE).is_file()

    def begin(self) -> bool:
        """Whether no other process has taken it."""
        try:
            os.close(os.open(self.claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def take(self) -> None:
        began = time.monotonic()
        try:
            measure_options(self.study, self.spec, self.metric, self.sets)
            print(f"{time.monotonic() - began:.1f} s: {self.claim.name}", flush=True)
        except Exception:
            # That one fails is no reason to leave out the others. It is tried once again.
            traceback.print_exc()
            failed = self.claim.with_name(f"{self.claim.name}-failed")
            if not failed.exists():
                self.claim.rename(failed)
            if torch.cuda.is_available():
                # After some errors nothing works in this process, which ends here then.
                torch.ones(1, device="cuda").item()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measurements(given: argparse.Namespace, kept: Kept) -> list[Measurement]:
    """What a command asks for, metric by metric."""
    study = open_study(given)
    val = KeptSplit(study.source.val, kept.setdefault(given.data, {}))
    source = dataclasses.replace(study.source, val=val)
    # Images that processes of their own have read would not be kept.
    recipes = {
        kind: dataclasses.replace(each, num_workers=0) for kind, each in study.recipes.items()
    }
    study = dataclasses.replace(study, source=source, recipes=recipes)
    (study.out / "claims").mkdir(parents=True, exist_ok=True)
    figures = {Perturbation.name: list(Perturbation.options.values())}
    sets = Options.sets if given.options else figures
    return [
        Measurement(study=study, spec=spec, metric=metric, sets=sets.get(metric, [{}]))
        for metric in given.metrics.split(",")
        for spec in specs(given)
    ]


class Plan:
    """The commands of a file, which may change."""

    def __init__(self, path: Path, parser: argparse.ArgumentParser) -> None:
        self.path, self.parser = path, parser
        self._seen: int | None = None

    def changed(self) -> list[argparse.Namespace] | None:
        """All commands, or None if they are those of the last call."""
        now = self.path.stat().st_mtime_ns
        if now == self._seen:
            return None
        self._seen = now
        lines = self.path.read_text().splitlines()
        return [self.parser.parse_args(shlex.split(line)) for line in lines if line]


def work(commands: Sequence[argparse.Namespace] | Plan, seconds: float) -> None:
    """Takes what no other process has taken; inherent explanations stay in all of float32."""
    torch.set_float32_matmul_precision("high")
    end = time.monotonic() + seconds
    kept: Kept = {}
    jobs: list[Measurement] = []
    if not isinstance(commands, Plan):
        jobs = [job for given in commands for job in measurements(given, kept)]
    while True:
        if isinstance(commands, Plan) and (found_commands := commands.changed()) is not None:
            jobs = [job for given in found_commands for job in measurements(given, kept)]
        waiting = [job for job in jobs if not job.claim.exists()]
        if not waiting:
            break
        # After each, the first ones come first again: their runs may be trained now.
        found = next((job for job in waiting if job.is_ready and job.begin()), None)
        if found is not None:
            found.take()
        elif time.monotonic() < end:
            time.sleep(1)
        else:
            break
    for job in waiting:
        if not job.is_ready:
            print(f"{job.metric}: {job.spec.label} is not trained yet", flush=True)


class Taps(nn.Module):
    """The features after some dense blocks in one tensor, which a CUDA graph can return."""

    def __init__(self, backbone: nn.Module, blocks: Sequence[int]) -> None:
        super().__init__()
        self.backbone = backbone.to(memory_format=torch.channels_last)
        self.names = [f"denseblock{block}" for block in blocks]

    def each(self, x: Tensor) -> list[Tensor]:
        """The features, a tensor per block."""
        found = []
        for name, part in self.backbone.named_children():
            x = part(x)
            if name in self.names:
                found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([features.flatten(1) for features in self.each(x)], 1)


def train_together(
    study: Study, specs: Sequence[RunSpec], wait: float = 0, after: Path | None = None
) -> None:
    """Trains runs that differ in their transformers alone, by the recipe of their kind.

    Images and models are made first, while another process may still train the backbone, or other
    runs, until the file ``after`` exists.
    """
    if not specs:
        return
    device = torch.device(choose_device(study.device))
    recipe, cuda = run_recipe(study, specs[0]), device.type == "cuda"
    trained = run_backbone(study, specs[0])
    backbone: str | Path = (
        study.backbones[BACKBONE_OF[specs[0].family]]
        if trained is None
        else run_folder(study, trained) / FINAL
    )
    size = run_config(study, specs[0]).image_size[0]
    crops = TrainTransform(size, rand_augment=(0, 0), flip=recipe.flip, scale=recipe.crop)
    splits = (
        study.source.train.with_transform(crops),
        study.source.val.with_transform(EvalTransform(size, recipe.eval_crop)),
    )
    workers = choose_workers(device) if recipe.num_workers is None else recipe.num_workers
    data, test = (DeviceImageDataset(split, recipe.seed, device, workers) for split in splits)
    models: dict[RunSpec, Any] = {}
    optimizers, steps = {}, {}
    for spec in specs:
        torch.manual_seed(recipe.seed)
        models[spec] = create_model(run_config(study, spec))
    end = time.monotonic() + wait
    while trained is not None and run_record(study, trained) is None:
        if time.monotonic() > end:
            raise SystemExit(f"{trained.label} is not trained; train it first.")
        time.sleep(0.5)
    while after is not None and not after.exists():
        time.sleep(0.2)
    began = time.monotonic()
    for spec, model in models.items():
        initialize(model, backbone)
        model.to(device).train()
        optimizers[spec] = torch.optim.Adam(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.adam_eps,
            weight_decay=recipe.weight_decay,
            fused=cuda,
        )
        run = model.from_features
        steps[spec] = CUDAGraphRunner(model, run) if cuda else run
    blocks = sorted({BLOCKS[spec.tap] for spec in specs})
    deepest = models[max(specs, key=lambda spec: BLOCKS[spec.tap])]
    taps = Taps(deepest.tokenizer.backbone, blocks).eval().requires_grad_(False)
    features = CUDAGraphRunner(taps) if cuda else taps
    with torch.no_grad():
        example = deepest.encoding(torch.zeros(1, 3, size, size, device=device))
        shapes = [each.shape[1:] for each in taps.each(example)]

    def precision() -> Any:
        return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16")

    def encode(images: Tensor) -> Tensor:
        encoded: Tensor = deepest.encoding(images)
        return encoded.contiguous(memory_format=torch.channels_last)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        if recipe.loss == "ce":
            return F.cross_entropy(logits, labels)
        target = F.one_hot(labels, logits.shape[1]).to(logits)
        return F.binary_cross_entropy_with_logits(logits, target)

    batch_size = min(recipe.batch_size, len(data))
    per_epoch = -(-len(data) // batch_size)
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(derive_seed(recipe.seed, epoch))
        order = torch.randperm(len(data), generator=generator)
        # The last batch is filled up from the start of the epoch.
        order = torch.cat([order, order[: per_epoch * batch_size - len(order)]])
        for number, positions in enumerate(order.view(per_epoch, batch_size).tolist()):
            batch = data[[SampleRequest(epoch, position, 1.0) for position in positions]]
            with torch.no_grad(), precision():
                flat = features(encode(batch.inputs))
            parts = flat.split([shape.numel() for shape in shapes], 1)
            found = {
                block: part.view(-1, *shape)
                for block, part, shape in zip(blocks, parts, shapes, strict=True)
            }
            for spec in specs:
                with precision():
                    logits = steps[spec](found[BLOCKS[spec.tap]])
                loss = loss_of(logits.float(), batch.labels)
                for group in optimizers[spec].param_groups:
                    group["lr"] = recipe.lr_at(epoch + (number + 0.5) / per_epoch)
                optimizers[spec].zero_grad()
                loss.backward()
                optimizers[spec].step()
        print(f"epoch {epoch + 1} of {recipe.epochs}, {time.monotonic() - began:.0f} s", flush=True)
    right = dict.fromkeys(specs, 0)
    with torch.no_grad(), precision():
        for first in range(0, len(test), batch_size):
            positions = range(first, min(first + batch_size, len(test)))
            batch = test[[SampleRequest(0, position, 1.0) for position in positions]]
            found = dict(zip(blocks, taps.each(encode(batch.inputs)), strict=True))
            for spec in specs:
                logits = models[spec].eval().from_features(found[BLOCKS[spec.tap]])
                right[spec] += int((logits.argmax(1) == batch.labels).sum())
    for spec in specs:
        save_run(study, spec, models[spec], right[spec] / len(test), time.monotonic() - began)


def save_run(study: Study, spec: RunSpec, model: Any, top1: float, seconds: float) -> None:
    """Writes a run as `reproduce` does."""
    recipe = run_recipe(study, spec)
    run = {
        "data": study.data,
        "recipe": study.recipe,
        "epoch": recipe.epochs,
        "accuracy": top1,
        "eval_crop": recipe.eval_crop,
    }
    notes = {CLASSES_KEY: json.dumps(list(study.source.classes)), RUN_KEY: json.dumps(run)}
    folder = run_folder(study, spec)
    save_state(model.state_dict(), run_config(study, spec), folder / FINAL, metadata=notes)
    record = {
        "model": spec.label,
        "epochs": recipe.epochs,
        "final_top1": top1,
        "best_top1": top1,
        "seconds": seconds,
        "recipe": dataclasses.asdict(recipe),
        "machine": machine(choose_device(study.device)),
    }
    write_summary(folder / DONE, record)
    print(f"{spec.label}: {top1:.1%}", flush=True)


if __name__ == "__main__":
    main()

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

``backbone`` is left out where the backbone is given (``--bcos-backbone``,
``--conventional-backbone``). Options that `reproduce` has, too (``--set``, ``--flavor``,
``--methods``, ``--grids``, ``--images``), mean the same; its recipe is ``small``. ``--options``
measures with all sets of options of `reproduce options`. With the method ``attnlrp``, which is in
`attnlrp.py`, that script draws the figures instead of `reproduce`.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("backbone", "train", "measure"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--family", choices=("bcos", "conventional"), required=True)
    parser.add_argument("--models", default="", help="e.g. ti_38,s_87+maxout=1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flavor", default="v2")
    parser.add_argument("--bcos-backbone")
    parser.add_argument("--conventional-backbone")
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--methods")
    parser.add_argument("--grids", type=int, default=250)
    parser.add_argument("--images", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--metrics", default="localization,perturbation")
    parser.add_argument("--options", action="store_true", help="All sets of `reproduce options`")
    given = parser.parse_args()
    if "attnlrp" in (given.methods or "").split(","):
        import attnlrp  # noqa: F401  (registers the method)
    backbones = {
        "bcos_densenet121": given.bcos_backbone,
        "densenet121": given.conventional_backbone,
    }
    study = Study.open(
        StudyOptions(
            data=given.data,
            out=Path(given.out),
            recipe="small",
            settings=parse_settings(given.set),
            flavor=given.flavor,
            backbones={name: file for name, file in backbones.items() if file},
            methods=tuple(given.methods.split(",")) if given.methods else None,
            grids=given.grids,
            images=given.images,
            batch_size=given.batch_size,
        )
    )
    specs = [parse(given.family, text, given.seed) for text in given.models.split(",") if text]
    if given.step == "backbone":
        train_runs(study, [RunSpec(model=BACKBONE_OF[given.family])])
    elif given.step == "train":
        train_together(study, [spec for spec in specs if run_record(study, spec) is None])
    else:
        measure(study, specs, given.metrics.split(","), all_options=given.options)


def parse(family: str, text: str, seed: int) -> RunSpec:
    """``ti_38+maxout=1`` as a run."""
    name, *options = text.split("+")
    size, tap = name.split("_")
    spec = RunSpec.vit(family, size, tap, **parse_settings(options))
    return dataclasses.replace(spec, seed=seed)


def measure(study: Study, specs: Sequence[RunSpec], metrics: Sequence[str], **how: bool) -> None:
    """Takes what no other process has taken; inherent explanations stay in all of float32."""
    torch.set_float32_matmul_precision("high")
    claims = study.out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for metric in metrics:
        figure = {Perturbation.name: list(Perturbation.options.values())}
        sets = (Options.sets if how["all_options"] else figure).get(metric, [{}])
        for spec in specs:
            if run_record(study, spec) is None:
                print(f"{spec.label} is not trained yet", flush=True)
                continue
            amount = f"{study.grids}-{study.images}-{len(sets)}"
            claim = claims / f"{run_folder(study, spec).name}-{metric}-{amount}"
            try:
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            measure_options(study, spec, metric, sets)


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


def train_together(study: Study, specs: Sequence[RunSpec]) -> None:
    """Trains runs that differ in their transformers alone, by the recipe of their kind."""
    if not specs:
        return
    began, device = time.monotonic(), torch.device(choose_device(study.device))
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
    models, optimizers, steps = {}, {}, {}
    for spec in specs:
        torch.manual_seed(recipe.seed)
        model: Any = create_model(run_config(study, spec))
        initialize(model, backbone)
        models[spec] = model.to(device).train()
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

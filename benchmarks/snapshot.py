"""Records what the library computes, so that a refactoring can be compared bit by bit.

    python benchmarks/snapshot.py record before.json     # on the old commit
    python benchmarks/snapshot.py compare before.json    # on the new commit, on the same machine

A snapshot holds a hash of every tensor and every table: logits, rows of W(x), maps of all methods,
metrics and training curves, of the shipped models and of small models in float64 and float32.
Hashes depend on the processor and on the version of PyTorch, so both sides are made on one machine.
"""

import argparse
import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

import bcosvit
from bcosvit.data.labeled import labeled_images
from bcosvit.data.sources import open_source
from bcosvit.metrics import GridPointingGame, PixelPerturbation, evaluate
from bcosvit.predictor import Predictor
from bcosvit.shipped import shipped
from bcosvit.train import Recipe, train

SLOW = ("intgrad", "smoothgrad", "occlusion")
THIN = {"growth": 2, "blocks": (2, 1, 1), "stem_width": 4, "bottleneck": 2}


def digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        data = str((value.dtype, list(value.shape))).encode() + value.numpy().tobytes()
    else:
        data = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def attributions(model: torch.nn.Module, images: torch.Tensor, *, slow: bool) -> Iterator[tuple]:
    yield "logits", model(images)
    for method in bcosvit.explainers(model):
        if method in SLOW and not slow:
            continue
        torch.manual_seed(0)
        found = bcosvit.explain(model, images, 1, method=method)
        yield f"{method}.map", found.map
        for part in ("weights", "residual"):
            if getattr(found, part) is not None:
                yield f"{method}.{part}", getattr(found, part)


def small_models() -> Iterator[tuple[str, torch.nn.Module]]:
    for dtype in (torch.float64, torch.float32):
        for position, maxout, attention, flavor in product(
            ("mul", "add", "emb", "none"), (1, 2), ("shifted", "standard"), ("v1", "v2")
        ):
            dense = bcosvit.DenseNetConfig(flavor=flavor, **THIN)
            torch.manual_seed(0)
            model = bcosvit.create_model(
                bcosvit.ModelConfig(
                    width=8,
                    num_heads=2,
                    depth=2,
                    mlp_ratio=2,
                    tap=2,
                    image_size=32,
                    num_classes=3,
                    backbone=dense,
                    position=position,
                    maxout=maxout,
                    attention=attention,
                )
            )
            yield f"{position}-{maxout}-{attention}-{flavor}-{dtype}", model.to(dtype).eval()
        torch.manual_seed(0)
        dense = bcosvit.DenseNetConfig(flavor="conventional", **THIN)
        model = bcosvit.create_model(
            bcosvit.ModelConfig(
                family="conventional",
                width=8,
                num_heads=2,
                depth=2,
                mlp_ratio=2,
                tap=2,
                image_size=32,
                num_classes=3,
                backbone=dense,
            )
        )
        yield f"conventional-{dtype}", model.to(dtype).eval()


def everything() -> Iterator[tuple[str, object]]:
    for name, model in small_models():
        images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        for part, value in attributions(model, images.to(next(model.parameters())), slow=True):
            yield f"{name}/{part}", value
    for name in shipped():
        images = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
        for part, value in attributions(bcosvit.load(name), images, slow=False):
            yield f"{name}/{part}", value
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(
            epochs=3,
            batch_size=8,
            learning_rate=3e-3,
            schedule="cosine",
            warmup_epochs=0.5,
            rand_augment=(1, 5),
            crop=(0.5, 1.0),
            ema=0.9,
            clip="adaptive",
            clip_value=0.1,
            explain_every=0,
            num_workers=0,
        )
        config = bcosvit.ModelConfig(
            width=12,
            num_heads=3,
            depth=2,
            mlp_ratio=2,
            image_size=32,
            num_classes=8,
            backbone=bcosvit.StemConfig(widths=(6, 8)),
        )
        out = Path(folder, "run")
        run = train(
            "scenes?size=32&train=120&val=60",
            out=out,
            model=config,
            recipe=recipe,
            accelerator="cpu",
        )
        yield "train/metrics", (out / "metrics.csv").read_text().splitlines()[1:]
        predictor = Predictor.load(run.weights, "cpu")
        state = predictor.model.state_dict()
        yield "train/weights", torch.cat([state[key].flatten().double() for key in state])
        source = open_source("scenes?size=32&train=120&val=60")
        pictures = labeled_images(source, "all", predictor.class_names, predictor.transform)
        found = evaluate(
            predictor.model,
            pictures,
            bcosvit.explainers(predictor.model),
            metrics=[GridPointingGame(grids=5), PixelPerturbation(images=10), "masks"],
            masks=pictures.masks(),
        )
        for name in ("accuracy", "localization", "perturbation", "masks"):
            yield f"evaluate/{name}", list(found[name].rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: digest(value) for name, value in everything()}
    if given.action == "record":
        given.file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} values recorded in {given.file}")
        return
    before = json.loads(given.file.read_text())
    different = sorted(
        name for name in before.keys() | found.keys() if before.get(name) != found.get(name)
    )
    print(f"{len(before)} values recorded, {len(different)} differ", *different[:40], sep="\n")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()

"""Measures the cost of exact explanations on a GPU, compared with timm's ViT and PyPI ``bcos``.

    python benchmarks/gpu.py [--only vit,densenet,peers,sweep] [--batch 256] [--json gpu.json]

The data are random images of 224² pixels, with bfloat16 autocast; times are medians by CUDA events.
The input of our transformers are features (the frozen tokenizer has its own rows), that of timm's
are images. A training step is a forward pass, a backward pass and a fused Adam step; memory is the
peak over a step. Every row is a ratio to timm's compiled ViT-B in the same run, or to what the row
names.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit import create_model
from bcosvit.attribution.inherent import reusable_adjoint
from bcosvit.models import VisionTransformer
from bcosvit.nn import CUDAGraphRunner, frozen_view, prepared_view
from bcosvit.nn.views import view

CLASSES = 1000
Row = dict[str, Any]


def milliseconds(run: Callable[[], object], rounds: int = 10) -> float:
    """Returns the median by CUDA events, after a warm-up that also compiles."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def naive(model: nn.Module) -> nn.Module:
    """Returns the same model with the reference ops, in eager mode."""
    return view(model, mark=lambda module: {"backend": "reference"})


def inference(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    @torch.no_grad()
    def step() -> None:
        with autocast():
            run(x)

    return milliseconds(step)


def training(
    run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor
) -> tuple[float, float]:
    """Returns milliseconds and gigabytes of a training step."""
    optimizer = torch.optim.Adam(parameters, lr=1e-6, fused=True)
    target = F.one_hot(torch.randint(CLASSES, (len(x),), device="cuda"), CLASSES).float()

    def step() -> None:
        with autocast():
            logits = run(x)
        F.binary_cross_entropy_with_logits(logits.float(), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    took = milliseconds(step)
    # The parameters count, too; they were allocated before.
    own = sum(p.numel() * p.element_size() for p in parameters)
    return took, (torch.cuda.max_memory_allocated() - before + own) / 1e9


def explanations(model: VisionTransformer, features: Tensor) -> dict[str, float]:
    """Runs a forward pass and one adjoint pass per class, from the logits to the features."""
    run = torch.compile(frozen_view(prepared_view(model, torch.bfloat16)).from_features)
    x = features.clone().requires_grad_()
    seeds = F.one_hot(torch.arange(10, device="cuda"), CLASSES).float()

    def step(classes: int) -> None:
        with autocast(), reusable_adjoint():
            logits = run(x)
            for k, seed in enumerate(seeds[:classes], start=1):
                torch.autograd.grad(logits, x, seed.expand_as(logits), retain_graph=k < classes)

    return {
        "explanation": milliseconds(lambda: step(1)),
        "explanation_10": milliseconds(lambda: step(10), rounds=5),
    }


def ours(maxout: int, **options: Any) -> VisionTransformer:
    model = create_model("bcos_vit_b_87", num_classes=CLASSES, maxout=maxout, **options)
    assert isinstance(model, VisionTransformer)
    # The transformer without its tokenizer.
    model.tokenizer.backbone = nn.Identity()
    return model.cuda()


def vit_rows(batch: int, slow: bool) -> list[Row]:
    import timm

    rows: list[Row] = []

    def add(name: str, **numbers: float) -> None:
        rows.append({"name": name, **numbers})
        print(name, {key: round(value, 2) for key, value in numbers.items()}, flush=True)

    pictures = torch.rand(batch, 3, 224, 224, device="cuda")
    features = torch.rand(batch, 1024, 14, 14, device="cuda")
    peer = timm.create_model("vit_base_patch16_224", num_classes=CLASSES).cuda()
    for name, run in (("eager", peer), ("compiled", torch.compile(peer))):
        if name == "eager" and not slow:
            continue
        took, memory = training(run, list(peer.parameters()), pictures)
        add(f"timm ViT-B/16, {name}", inference=inference(run.eval(), pictures), training=took,
            memory=memory)  # fmt: skip
        run.train()
    del peer, pictures
    for maxout in (2, 1):
        model = ours(maxout)
        parameters = [p for p in model.parameters() if p.requires_grad]
        name = f"ours ViT-B, MaxOut {maxout}"
        torch._dynamo.reset()
        run = torch.compile(model.from_features, fullgraph=True)
        took, memory = training(run, parameters, features)
        model.eval()
        ready = torch.compile(prepared_view(model, torch.bfloat16).from_features, fullgraph=True)
        numbers = {"inference": inference(ready, features), "training": took, "memory": memory}
        add(f"{name}, compiled", **numbers, **explanations(model, features))
        model.train()
        if slow:
            took, memory = training(model.from_features, parameters, features)
            add(f"{name}, eager", inference=inference(model.eval().from_features, features),
                training=took, memory=memory)  # fmt: skip
            plain = naive(model.train())
            took, memory = training(plain.from_features, parameters, features)
            add(f"{name}, reference ops", inference=inference(plain.eval().from_features, features),
                training=took, memory=memory)  # fmt: skip
        del model, run, parameters
        torch.cuda.empty_cache()
    return rows


def densenet_rows(batch: int) -> list[Row]:
    """Measures inference of the frozen tokenizer up to 87 layers, with and without CUDA graphs."""
    rows: list[Row] = []
    for flavor in ("v1", "v2"):
        model = create_model("bcos_vit_b_87", backbone=flavor).cuda().eval()
        backbone = model.tokenizer.backbone
        x = torch.rand(batch, 6, 224, 224, device="cuda")
        plain, ready = naive(backbone), prepared_view(backbone, torch.bfloat16)
        row: Row = {
            "name": f"DenseNet-121 {flavor} to 87",
            "naive": inference(plain, x),
            "naive, CUDA graph": inference(CUDAGraphRunner(plain), x),
            "ours, launched": inference(ready, x),
            "ours": inference(CUDAGraphRunner(ready), x),
        }
        row["ratio"] = row["ours"] / row["naive"]
        rows.append(row)
        print(row, flush=True)
        del model, backbone, plain, ready
        torch.cuda.empty_cache()
    return rows


def peer_rows(batch: int) -> list[Row]:
    """Measures PyPI ``bcos`` in eager mode: ViT-B (no MaxOut, no prior) and DenseNet-121."""
    import warnings

    from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)

    warnings.simplefilter("ignore")
    from bcos.models.densenet import densenet121
    from bcos.models.vit import simple_vit_b_patch16_224
    from bcos.modules import BcosConv2d, BcosLinear, norms

    vit = simple_vit_b_patch16_224(
        linear_layer=BcosLinear,
        norm_layer=norms.NoBias(norms.DetachableLayerNorm),
        act_layer=nn.Identity,
        conv2d_layer=BcosConv2d,
    )
    dense = densenet121(norm_layer=norms.NoBias(norms.BatchNormUncentered2d), num_classes=CLASSES)
    mine = create_model("bcos_densenet121", flavor="v2", num_classes=CLASSES)
    rows: list[Row] = []
    for name, model, size, channels, graphed in (
        ("bcos simple_vit_b", vit, batch, 6, False),
        ("bcos densenet121", dense, batch // 2, 6, False),
        ("ours DenseNet-121 v2, launched", mine, batch // 2, 3, False),
        ("ours DenseNet-121 v2, CUDA graph", mine, batch // 2, 3, True),
    ):
        model = model.cuda().train()
        x = torch.rand(size, channels, 224, 224, device="cuda")
        run = CUDAGraphRunner(model) if graphed else model
        took, memory = training(run, list(model.parameters()), x)
        model.eval()
        row: Row = {"name": f"{name}, batch {size}", "inference": inference(run, x)}
        rows.append({**row, "training": took, "memory": memory})
        print(rows[-1], flush=True)
        del model, run
        torch.cuda.empty_cache()
    return rows


def sweep_rows() -> list[Row]:
    """Varies one property at a time of a ViT-S with MaxOut 2 at batch 128, with CUDA graphs."""
    rows: list[Row] = []
    base = {"batch": 128, "side": 224, "width": 384}
    axes = {
        "batch": (32, 64, 128, 256, 512),
        "side": (112, 160, 224, 320, 448),
        "width": (192, 384, 768, 1152),
    }
    for axis, values in axes.items():
        for value in values:
            at = {**base, axis: value}
            model = ours(2, image_size=at["side"], width=at["width"], num_heads=at["width"] // 64)
            grid = model.config.grid
            x = torch.rand(at["batch"], 1024, *grid, device="cuda")
            parameters = [p for p in model.parameters() if p.requires_grad]
            run = CUDAGraphRunner(model, model.from_features)
            took, memory = training(run, parameters, x)
            model.eval()
            row = {"axis": axis, "batch": at["batch"], "tokens": grid[0] * grid[1]}
            rows.append({**row, "width": at["width"], "training": took, "memory": memory,
                         "inference": inference(run, x)})  # fmt: skip
            print(rows[-1], flush=True)
            del model, parameters, run
            torch.cuda.empty_cache()
    return rows


def ceilings() -> Row:
    """Measures the limits of the GPU: a large matrix product and a large copy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = milliseconds(lambda: a @ a)
    big = torch.randn(1 << 28, device="cuda")
    copy = milliseconds(lambda: big.clone())
    return {
        "name": "ceilings",
        "tflops": 2 * 8192**3 / product / 1e9,
        "tb_per_s": 2 * big.numel() * 4 / copy / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="vit,densenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--slow", action="store_true", help="also measure eager mode and reference ops"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["ceilings"] = ceilings()
    print(results, flush=True)
    for part in args.only.split(","):
        if part == "vit":
            results["vit"] = vit_rows(args.batch, args.slow)
        elif part == "densenet":
            results["densenet"] = densenet_rows(args.batch)
        elif part == "peers":
            results["peers"] = peer_rows(args.batch)
        elif part == "sweep":
            results["sweep"] = sweep_rows()
        else:
            parser.error(f"--only knows vit, densenet, peers and sweep, not {part!r}")
        results["ratios"] = ratios(results)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    for name, ratio in results["ratios"].items():
        print(f"{ratio:6.2f}  {name}")


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Returns the table: costs relative to timm's ViT."""
    by = {row["name"]: row for row in results.get("vit", [])}
    peer = by.get("timm ViT-B/16, compiled")
    table: dict[str, float] = {}
    for maxout in (2, 1):
        row = by.get(f"ours ViT-B, MaxOut {maxout}, compiled")
        if row is None or peer is None:
            continue
        for what in ("training", "inference", "memory"):
            table[f"MaxOut {maxout}: {what} ÷ timm compiled"] = row[what] / peer[what]
        table[f"MaxOut {maxout}: one class explained ÷ own inference"] = (
            row["explanation"] / row["inference"]
        )
        table[f"MaxOut {maxout}: ten classes ÷ one"] = row["explanation_10"] / row["explanation"]
    for row in results.get("densenet", []):
        table[f"{row['name']}: inference ÷ reference ops"] = row["ratio"]
        table[f"{row['name']}: both as CUDA graphs"] = row["ours"] / row["naive, CUDA graph"]
    return table


if __name__ == "__main__":
    main()

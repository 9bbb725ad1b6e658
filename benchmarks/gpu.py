"""Measures the cost of exact explanations on a GPU, compared with timm's ViT and PyPI ``bcos``.

    python benchmarks/gpu.py [--only vit,trunk,classes,densenet,peers,sweep,tiles] [--maxout 2,1]
        [--batch 256] [--mode reduce-overhead] [--json gpu.json] [--profile]

The data are random images of 224² pixels, with bfloat16 autocast; times are medians by CUDA events
between passes that are queued one after the other. The input of our transformers are features (the
frozen tokenizer has its own rows), that of timm's are images. A training step is a forward pass, a
backward pass and a fused Adam step; memory is the peak over a step. Every row is a ratio to timm's
compiled ViT-B in the same run, or to what the row names. What is timed is also checked: compiled
logits against the reference ops in float32, and explanations by their sum.

``trunk`` is EfficientNet-lite2 with random weights and its B-cos copy (B = 2, no constants).
``classes`` explains many classes of a single picture. ``tiles`` tries other tiles of the attention
kernels.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit import bcosify, create_model, explain
from bcosvit.attribution import CompiledInherent
from bcosvit.attribution.inherent import Inherent, reusable_adjoint
from bcosvit.models import VisionTransformer
from bcosvit.nn import CUDAGraphRunner, frozen_view, prepared_view
from bcosvit.nn.bcosified import ConvertedBatchNorm
from bcosvit.nn.views import view

CLASSES = 1000
Row = dict[str, Any]


def milliseconds(run: Callable[[], object], rounds: int = 10) -> float:
    """Returns the median by CUDA events, after a warm-up that also compiles."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 2)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    # The first pass waits for the host, the others do not where the host is faster.
    spans = pairwise(marks[1:])
    return statistics.median(first.elapsed_time(second) for first, second in spans)


PROFILE: list[bool] = [False]


def profile(name: str, run: Callable[[], object]) -> None:
    """Prints which kernels a pass spends its time in, if asked to."""
    if not PROFILE[0]:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.self_device_time_total]
    total = sum(row.self_device_time_total for row in rows)
    print(f"profile of {name}: {total / 1e3:.2f} ms in kernels")
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:30]:
        print(f"  {row.self_device_time_total / 1e3:8.3f} ms {row.count:5d} × {row.key[:90]}")


def check(name: str, error: Tensor, bound: float) -> None:
    """Ends the run where a result that is timed is wrong."""
    worst = error.abs().max().item()
    print(f"checked: {name}, error {worst:.1e}, at most {bound:.0e}", flush=True)
    if not worst <= bound:
        raise SystemExit(f"{name} is off by {worst:.2e}, more than {bound:.0e}; nothing is timed.")


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def naive(model: nn.Module) -> nn.Module:
    """Returns the same model with the reference ops, in eager mode."""
    return view(model, mark=lambda module: {"backend": "reference"})


def inference(run: Callable[[Tensor], Tensor], x: Tensor, name: str = "") -> float:
    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with autocast():
            run(x)

    took = milliseconds(step)
    if name:
        profile(f"{name}, inference", step)
    return took


def training(
    run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, name: str = ""
) -> tuple[float, float]:
    """Returns milliseconds and gigabytes of a training step."""
    optimizer = torch.optim.Adam(parameters, lr=1e-6, fused=True)
    target = F.one_hot(torch.randint(CLASSES, (len(x),), device="cuda"), CLASSES).float()

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
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
    if name:
        profile(f"{name}, training", step)
    return took, (torch.cuda.max_memory_allocated() - before + own) / 1e9


def explanations(model: VisionTransformer, features: Tensor) -> dict[str, float]:
    """Runs a forward pass and one adjoint pass per class, from the logits to the features.

    ``at once`` is one adjoint pass for all classes, which a compiled graph does not know.
    """
    eager = frozen_view(prepared_view(model, torch.bfloat16)).from_features
    run = torch.compile(eager)
    x = features.clone().requires_grad_()
    seeds = F.one_hot(torch.arange(10, device="cuda"), CLASSES).float()

    def step(classes: int) -> tuple[Tensor, Tensor]:
        with autocast(), reusable_adjoint():
            logits = run(x)
            for k, seed in enumerate(seeds[:classes], start=1):
                (rows,) = torch.autograd.grad(
                    logits, x, seed.expand_as(logits), retain_graph=k < classes
                )
            return logits, rows

    logits, rows = step(1)
    missed = logits.detach()[:, 0] - (rows * x.detach()).flatten(1).sum(1)
    check("sums of contributions", missed.norm() / logits.detach()[:, 0].norm(), 5e-2)
    profile("one class", lambda: step(1))

    def at_once() -> Tensor:
        with autocast():
            logits = eager(x)
            wanted = seeds.unsqueeze(1).expand(-1, *logits.shape)
            return torch.vmap(lambda seed: torch.autograd.grad(logits, x, seed)[0])(wanted)

    check("rows of W(x) at once", (at_once()[0] - rows).norm() / rows.norm(), 1e-1)
    profile("ten classes at once", at_once)
    return {
        "explanation_10 at once": milliseconds(at_once, rounds=5),
        "explanation": milliseconds(lambda: step(1)),
        "explanation_10": milliseconds(lambda: step(10), rounds=5),
    }


def ours(maxout: int, **options: Any) -> VisionTransformer:
    model = create_model(
        "bcos_vit_b_87", num_classes=CLASSES, maxout=maxout, logit_bias=0.0, **options
    )
    assert isinstance(model, VisionTransformer)
    # The transformer without its tokenizer.
    model.tokenizer.backbone = nn.Identity()
    return model.cuda()


def vit_rows(batch: int, slow: bool, maxouts: list[int], mode: str | None) -> list[Row]:
    from bcosvit._torchvision import torchvision  # noqa: F401  (timm imports it unguarded)

    import timm  # isort: skip

    rows: list[Row] = []

    def add(name: str, **numbers: float) -> None:
        rows.append({"name": name, **numbers})
        print(name, {key: round(value, 2) for key, value in numbers.items()}, flush=True)

    pictures = torch.rand(batch, 3, 224, 224, device="cuda")
    features = torch.rand(batch, 1024, 14, 14, device="cuda")
    peer = timm.create_model("vit_base_patch16_224", num_classes=CLASSES).cuda()
    for name, run in (("eager", peer), ("compiled", torch.compile(peer, mode=mode))):
        if name == "eager" and not slow:
            continue
        took, memory = training(run, list(peer.parameters()), pictures)
        add(f"timm ViT-B/16, {name}", inference=inference(run.eval(), pictures), training=took,
            memory=memory)  # fmt: skip
        run.train()
    del peer, pictures
    for maxout in maxouts:
        model = ours(maxout)
        parameters = [p for p in model.parameters() if p.requires_grad]
        name = f"ours ViT-B, MaxOut {maxout}"
        torch._dynamo.reset()
        run = torch.compile(model.from_features, fullgraph=True, mode=mode)
        took, memory = training(run, parameters, features, name)
        model.eval()
        view_of = prepared_view(model, torch.bfloat16).from_features
        ready = torch.compile(view_of, fullgraph=True, mode=mode)
        numbers = {"inference": inference(ready, features, name), "training": took}
        numbers["memory"] = memory
        with torch.no_grad(), autocast():
            fast = ready(features)[:8].float()
        with torch.no_grad():
            truth = naive(model).from_features(features[:8])
        check("compiled logits", (fast - truth).norm() / truth.norm(), 5e-2)
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


def trunk_rows(batch: int) -> list[Row]:
    """Measures EfficientNet-lite2 and its B-cos copy: training, predicting and explaining."""
    sys.path.append(str(Path(__file__).parents[1] / "examples" / "imagenet"))
    from efficientnet import MEAN, STD, EfficientNet

    original = EfficientNet().cuda().to(memory_format=torch.channels_last)
    copy = bcosify(original.eval(), mean=MEAN, std=STD, b=2.0, fade=0.0, check=False)
    copy = copy.cuda().to(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, 224, 224, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    rows: list[Row] = []
    for name, model in (("original", original), ("B-cos", copy)):
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch._dynamo.reset()
        run = torch.compile(model.train())
        took, memory = training(run, parameters, images, f"trunk, {name}")
        run = torch.compile(model.eval())
        row: Row = {"name": f"trunk, {name}", "training": took, "memory": memory}
        rows.append({**row, "inference": inference(run, images, f"trunk, {name}")})
        print(rows[-1], flush=True)
    few = images[: batch // 4]
    with torch.no_grad():
        # With the statistics of the original the copy's signals vanish: it takes this batch's.
        for layer in copy.modules():
            if isinstance(layer, ConvertedBatchNorm):
                layer.momentum = 1.0
        copy.train()(few)
    copy.eval()
    found = explain(copy, few, 3)
    assert found.logit is not None
    check("the trunk's sums", found.completeness_error() / found.logit.abs().mean(), 1e-3)
    row = {"name": f"trunk, explaining {len(few)}"}
    method = CompiledInherent(copy)
    run = torch.compile(copy)

    def predicting(model: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: model(few)

    for narrow in (True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            kind = "bfloat16" if narrow else "float32"
            with torch.no_grad():
                row[f"{kind}, predicting"] = milliseconds(predicting(copy))
            row[f"{kind}, explaining"] = milliseconds(lambda: explain(copy, few, 3))
            if narrow:
                with torch.no_grad():
                    row["compiled, predicting"] = milliseconds(predicting(run))
                row["compiled, explaining"] = milliseconds(
                    lambda: explain(copy, few, 3, method=method)
                )
            profile(f"trunk, explaining in {kind}", lambda: explain(copy, few, 3))
    rows.append(row)
    print(row, flush=True)
    return rows


def classes_rows() -> list[Row]:
    """Explains 1, 10 and 1000 classes of one picture with a whole ViT-B, in float32."""
    model = create_model("bcos_vit_b_87", num_classes=CLASSES, maxout=2).cuda()
    ready = prepared_view(model)
    image = torch.rand(1, 3, 224, 224, device="cuda")
    rows: list[Row] = []
    one = milliseconds(lambda: explain(ready, image, 3))
    ten = torch.arange(10, device="cuda")[None]
    for at_once in (8, 32, 128):
        method = Inherent(rows_at_once=at_once)
        found = explain(ready, image, "all", method=method)
        assert found.logit is not None
        check("1000 sums", found.completeness_error() / found.logit.abs().mean(), 1e-3)
        del found
        row = {"name": f"ViT-B-87, one picture, {at_once} rows at once", "one class": one}
        row["ten classes"] = milliseconds(
            lambda method=method: explain(ready, image, ten, method=method), rounds=5
        )
        row["1000 classes"] = milliseconds(
            lambda method=method: explain(ready, image, "all", method=method), rounds=2
        )
        rows.append({**row, "peak GB": torch.cuda.max_memory_allocated() / 1e9})
        print(rows[-1], flush=True)
    return rows


def tile_rows(batch: int) -> list[Row]:
    """Times the attention kernels of ViT-B with other tiles, each against today's result."""
    from bcosvit.ops import attention_triton as kernels

    shape = (batch, 196, 12, 64)
    q, k, v, g = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    prior = torch.randn(12, 196, 196, device="cuda").softmax(-1).bfloat16()
    prior = F.pad(prior, (0, 60))
    out, lse, _ = kernels._launch(q, k, v, prior, 2, False, True)
    delta = (g.float() * out.float()).sum(-1)
    state = (g, q, k, v, prior, lse, delta, 2)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: kernels._launch(q, k, v, prior, 2, False, True)[0],
        "tokens": lambda: torch.stack(kernels._launch_tokens(*state)),
        "value": lambda: kernels._launch_value(g, q, k, prior, lse, 2),
        "prior": lambda: kernels._launch_prior(*state).sum(0),
    }
    timed = {**runs, "tokens": lambda: kernels._launch_tokens(*state)}
    tried = {
        "forward": [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 2),
                    (256, 32, 8, 3), (128, 32, 8, 3)],
        "tokens": [(256, 32, 8, 2), (256, 32, 8, 3), (256, 64, 16, 2), (256, 32, 16, 2),
                   (256, 64, 8, 1), (256, 32, 8, 1), (0, 0, 0, 0)],
        "value": [(64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (64, 128, 4, 2)],
        "prior": [(64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2), (128, 64, 8, 2),
                  (64, 64, 4, 3), (128, 64, 4, 3)],
    }  # fmt: skip
    rows: list[Row] = []
    for name, choices in tried.items():
        today = kernels._TILES[name]
        truth = runs[name]().float()
        for tiles in [today, *choices, today]:
            kernels._TILES[name] = tiles
            row: Row = {"name": f"{name} {tiles}"}
            try:
                error = (runs[name]().float() - truth).norm() / truth.norm()
                row |= {"ms": milliseconds(timed[name], rounds=20), "error": error.item()}
            except Exception as problem:  # a tile that does not fit the shared memory
                row["failed"] = str(problem)[:80]
            rows.append(row)
            print(row, flush=True)
        kernels._TILES[name] = today
    return rows + product_rows(batch)


def product_rows(batch: int) -> list[Row]:
    """Times the fused product of ViT-B with other tiles, and the gradient of its input by each of
    the two ways."""
    from bcosvit.ops import bcos_triton

    today, processors = bcos_triton.TILES, bcos_triton._processors
    tried = [
        (today, 1), ((128, 256, 64, 8, 4), 1), ((256, 128, 64, 8, 3), 1), ((256, 128, 64, 8, 4), 1),
        ((128, 128, 64, 4, 3), 2), ((128, 128, 128, 8, 3), 1), (today, 1),
    ]  # fmt: skip
    rows: list[Row] = []
    for inputs, outputs in ((768, 768), (768, 3072), (3072, 768)):
        x, g = (
            torch.randn(batch * 196, width, device="cuda").bfloat16() for width in (inputs, outputs)
        )
        weight = torch.randn(2 * outputs, inputs, device="cuda").bfloat16()
        norm = x.float().norm(dim=1)
        by = (2, 2.0, 1.0, True, True, False)
        name = f"{inputs} -> {outputs}"
        for tiles, per_processor in tried:
            bcos_triton.TILES = bcos_triton.Tiles(*tiles)
            bcos_triton._processors = lambda device, n=per_processor: n * processors(device)
            row: Row = {"name": f"product {name} {tuple(tiles)} × {per_processor}"}
            try:
                run = partial(bcos_triton._launch_product, x, weight, norm, *by)
                rows.append(row | {"ms": milliseconds(run, rounds=20)})
            except Exception as problem:
                rows.append(row | {"failed": str(problem)[:80]})
            print(rows[-1], flush=True)
        bcos_triton.TILES, bcos_triton._processors = today, processors
        rows.append({"name": f"gradient {name}", **gradient_costs(x, weight, norm, g)})
        print(rows[-1], flush=True)
    return rows


def gradient_costs(x: Tensor, weight: Tensor, norm: Tensor, g: Tensor) -> Row:
    """Milliseconds of the gradient of the input of a transform with MaxOut 2, by both ways."""
    from bcosvit.ops import bcos_triton, sparse_triton

    y, winner, _ = bcos_triton._launch_product(x, weight, norm, 2, 2.0, 1.0, True, True, False)
    how = (2.0, 1.0, True, False)

    def dense() -> Tensor:
        return bcos_triton._launch_scale_backward(g, None, y, winner, norm, 2, *how)[0] @ weight

    def sparse() -> Tensor:
        return bcos_triton._launch_input_gradient(g, None, weight, y, winner, norm, *how)[0]

    if not sparse_triton.is_usable(x.device, x.dtype):
        return {"dense": milliseconds(dense, rounds=20)}
    check("sparse products", (sparse() - dense()).norm() / dense().norm(), 1e-2)
    packed, _, places = sparse_triton.room(y.shape[0], y.shape[1], y)
    sparse_triton.write_places(winner, places)
    return {
        "dense": milliseconds(dense, rounds=20),
        "sparse": milliseconds(sparse, rounds=20),
        "places": milliseconds(lambda: sparse_triton.write_places(winner, places), rounds=20),
        "product": milliseconds(lambda: sparse_triton.multiply(packed, weight), rounds=20),
        "way": sparse_triton.fastest_way(packed.numel(), weight.shape, x.dtype, x.device),
    }


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
    parser.add_argument("--maxout", default="2,1", help="units per output of the vit rows")
    parser.add_argument("--mode", help="of torch.compile, for vit: reduce-overhead for CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="also print the slowest kernels")
    parser.add_argument(
        "--slow", action="store_true", help="also measure eager mode and reference ops"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    PROFILE[0] = args.profile
    torch.manual_seed(0)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["ceilings"] = ceilings()
    print(results, flush=True)
    for part in args.only.split(","):
        begun = time.perf_counter()
        if part == "vit":
            maxouts = [int(m) for m in args.maxout.split(",")]
            results["vit"] = vit_rows(args.batch, args.slow, maxouts, args.mode)
        elif part == "trunk":
            results["trunk"] = trunk_rows(args.batch)
        elif part == "classes":
            results["classes"] = classes_rows()
        elif part == "tiles":
            results["tiles"] = tile_rows(args.batch)
        elif part == "densenet":
            results["densenet"] = densenet_rows(args.batch)
        elif part == "peers":
            results["peers"] = peer_rows(args.batch)
        elif part == "sweep":
            results["sweep"] = sweep_rows()
        else:
            parser.error(
                f"--only knows vit, trunk, classes, densenet, peers, sweep and tiles, not {part!r}"
            )
        print(f"{part} took {time.perf_counter() - begun:.0f} s", flush=True)
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
        for way in ("", " at once"):
            name = f"MaxOut {maxout}: ten classes{way} ÷ one"
            table[name] = row[f"explanation_10{way}"] / row["explanation"]
    trunk = {row["name"]: row for row in results.get("trunk", [])}
    if trunk:
        theirs, copy, explained = trunk.values()
        for what in ("training", "inference", "memory"):
            table[f"trunk: {what} ÷ its original"] = copy[what] / theirs[what]
        for kind in ("bfloat16", "float32", "compiled"):
            name = f"trunk: explaining ÷ predicting, {kind}"
            table[name] = explained[f"{kind}, explaining"] / explained[f"{kind}, predicting"]
    for row in results.get("classes", []):
        for many in ("ten classes", "1000 classes"):
            table[f"{row['name']}: {many} ÷ one"] = row[many] / row["one class"]
    for row in results.get("densenet", []):
        table[f"{row['name']}: inference ÷ reference ops"] = row["ratio"]
        table[f"{row['name']}: both as CUDA graphs"] = row["ours"] / row["naive, CUDA graph"]
    return table


if __name__ == "__main__":
    main()

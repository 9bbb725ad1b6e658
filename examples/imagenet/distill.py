"""Distills EfficientNet-lite2 into its bcosified copy, on photographs without labels.

    python distill.py data/ --teacher efficientnet-lite2-9656183e.pth --out runs/lite2

All photographs lie decoded in the memory of the GPU, where views of them are cropped and mixed. The
student starts as the teacher and becomes a B-cos network on the way (see network.py). The defaults
are the settings of the shipped model's first run.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from convert import load_student
from efficientnet import efficientnet_state
from guide import energy_loss
from network import (
    BLOCKS,
    STAGE_ENDS,
    Bcos,
    Student,
    Teacher,
    TransformerShape,
    UnitBcos,
    encode,
    patches,
)
from photographs import HEIGHT, WIDTH
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bcosvit.files import atomic
from bcosvit.metrics.grid_pointing import grid_images, localization_score


class Photographs:
    """Decoded photographs on a device, and random views of them.

    Args:
        folder: What photographs.py wrote to.
        device: Where they are kept.
        held_out: The first so many are not trained on.
        limit: Reads at most so many.
    """

    def __init__(self, folder: Path, device: str, held_out: int, limit: int | None = None) -> None:
        meta = np.load(folder / "photographs-meta.npy")[:limit]
        source = np.load(folder / "photographs.npy", mmap_mode="r")
        if len(meta) <= held_out:
            raise SystemExit(
                f"{folder} has {len(meta)} photographs, of which {held_out} are held out; "
                f"give more, or lower --held-out."
            )
        self.device, self.held_out, self.count = device, held_out, len(meta)
        self.pixels = torch.empty(len(meta), HEIGHT, WIDTH, 3, dtype=torch.uint8, device=device)
        for start in range(0, len(meta), 500):
            part = np.array(source[start : min(start + 500, len(meta))])
            self.pixels[start : start + len(part)] = torch.from_numpy(part).to(device)
        self.width = torch.from_numpy(meta[:, 0].astype(np.float32)).to(device)
        self.portrait = torch.from_numpy(meta[:, 1] > 0).to(device)

    def crop(
        self,
        index: Tensor,
        left: Tensor,
        top: Tensor,
        w: Tensor,
        h: Tensor,
        flip: Tensor,
        size: int,
    ) -> Tensor:
        """Crops [n, 3, size, size] in [0, 1], upright; boxes in pixels of the canvas."""
        images = self.pixels[index].permute(0, 3, 1, 2)
        images = images.half() if self.pixels.is_cuda else images.float()
        line = (torch.arange(size, device=self.device) + 0.5) / size
        v, u = torch.meshgrid(line, line, indexing="ij")
        u, v = u.expand(len(index), -1, -1), v.expand(len(index), -1, -1)
        u = torch.where(flip[:, None, None], 1 - u, u)
        swap = self.portrait[index][:, None, None]
        u, v = torch.where(swap, v, u), torch.where(swap, u, v)
        x = (left[:, None, None] + u * w[:, None, None]) / WIDTH * 2 - 1
        y = (top[:, None, None] + v * h[:, None, None]) / HEIGHT * 2 - 1
        grid = torch.stack([x, y], -1).to(images.dtype)
        crops = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        return (crops / 255).clamp(0, 1)

    def batch(
        self, n: int, size: int, smallest: float, mix: float = 1.0, mosaics: float = 0.0
    ) -> Tensor:
        """Random views of photographs.

        Args:
            n: How many.
            size: Pixels per side.
            smallest: The smallest share of a photograph's area that a view may show.
            mix: A factor on the share of views that are mixed with another one.
            mosaics: The share of views that show four photographs, each in a quarter.

        Returns:
            [n, 3, size, size] in [0, 1].
        """

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, device=self.device)

        def around_one(spread: float) -> Tensor:
            return (1 + (rand(n, 1, 1, 1) * 2 - 1) * spread).to(x.dtype)

        usable = self.count - self.held_out
        index = self.held_out + (rand(n) * usable).long().clamp(max=usable - 1)
        width = self.width[index]
        area = width * HEIGHT * (smallest + (1 - smallest) * rand(n))
        ratio = torch.exp((rand(n) * 2 - 1) * math.log(4 / 3))
        w = torch.minimum((area * ratio).sqrt(), width)
        h = (area / ratio).sqrt().clamp(max=HEIGHT)
        left, top = rand(n) * (width - w), rand(n) * (HEIGHT - h)
        x = self.crop(index, left, top, w, h, rand(n) < 0.5, size)
        # Brightness, contrast, saturation.
        x = x * around_one(0.3)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = mean + (x - mean) * around_one(0.3)
        gray = x.mean(1, keepdim=True)
        saturation = torch.where(rand(n, 1, 1, 1) < 0.05, 0.0, around_one(0.4)).to(x.dtype)
        x = (gray + (x - gray) * saturation).clamp(0, 1)
        # With mix = 1: Mixup on half of the views, CutMix on a sixth.
        other = x.roll(1, 0)
        kind, share = rand(n, 1, 1, 1) / max(mix, 1e-6), rand(n, 1, 1, 1)
        mixed = x + (other - x) * (share * 0.5).to(x.dtype)
        line = (torch.arange(size, device=self.device) + 0.5) / size
        side = 0.25 + 0.5 * share
        y0, x0 = rand(n, 1, 1, 1), rand(n, 1, 1, 1)
        box = ((line[:, None] - y0).abs() < side / 2) & ((line[None, :] - x0).abs() < side / 2)
        cut = torch.where(box, other, x)
        single = torch.where(kind < 0.5, mixed, torch.where(kind < 0.67, cut, x))
        if not mosaics:
            return single
        small = F.avg_pool2d(x, 2)
        a, b, c, d = (small.roll(i, 0) for i in range(4))
        mosaic = torch.cat([torch.cat([a, b], 3), torch.cat([c, d], 3)], 2)
        return torch.where(rand(n, 1, 1, 1) < mosaics, mosaic, single)

    def held(self, size: int) -> Tensor:
        """The centers of the photographs that are not trained on."""
        index = torch.arange(self.held_out, device=self.device)
        side = torch.full((self.held_out,), 160.0, device=self.device)
        left, top = (self.width[: self.held_out] - side) / 2, (HEIGHT - side) / 2
        return self.crop(index, left, top, side, side, side < 0, size)


class Muon:
    """Momentum with orthogonalized updates for matrices, scaled to the size of Adam's."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            shapes.setdefault(tuple(param.shape), []).append(param)
        self.groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device))
            for shape, group in shapes.items()
        ]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for params, momentum in self.groups:
            grad = torch.stack([param.grad for param in params])
            momentum.lerp_(grad, 1 - self.momentum)
            u = grad.lerp_(momentum, self.momentum).bfloat16()
            tall = u.shape[1] > u.shape[2]
            u = u.mT if tall else u
            u = u / (u.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):  # Newton-Schulz iterations toward the nearest orthogonal matrix
                a = u @ u.mT
                b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
                u = torch.baddbmm(u, b, u, beta=3.4445)
            u = u.mT if tall else u
            scale = lr * 0.2 * max(u.shape[1:]) ** 0.5
            torch._foreach_add_(params, list(u.float().unbind(0)), alpha=-scale)


class Optimizer:
    """Muon for the matrices but the stem and the classifier, Adam for everything else.

    Factors and priors of transformer blocks get ``quick`` times the rate of the latter.
    """

    def __init__(self, loss: "Loss", quick: float = 3.0) -> None:
        student = loss.student
        matrices = [
            module.weight
            for name, module in student.named_modules()
            if isinstance(module, Bcos | UnitBcos | nn.Linear) and name not in ("stem", "fc")
        ]
        shifts = [adapter.bias for adapter in loss.adapters]  # follow the features' means quickly
        factors = [
            param
            for block in student.transformer_blocks
            for param in (block.attention_scale, block.mlp_scale, block.prior)
        ]
        others = {id(param) for param in (*matrices, *shifts, *factors)}
        rest = [param for param in loss.parameters() if id(param) not in others]
        groups = [
            {"params": params, "factor": factor}
            for params, factor in ((rest, 0.6), (shifts, 10.0), (factors, 0.6 * quick))
            if params
        ]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=student.t.is_cuda)
        self.muon = Muon(matrices)

    def step(self, lr: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr * group["factor"]
        self.adam.step()
        self.muon.step(lr)


class Loss(nn.Module):
    """How far the student is from the teacher.

    The sum of the KL divergence of the softmax, of the binary cross-entropy that B-cos networks are
    trained with, and, with ``compare``, of the distance of features through linear adapters.
    """

    def __init__(self, student: Student, compare: bool = True) -> None:
        super().__init__()
        self.student = student
        widths = [BLOCKS[i].outputs for i in STAGE_ENDS] if compare else []
        self.adapters = nn.ModuleList(nn.Linear(width, width) for width in widths)
        for adapter in self.adapters:
            nn.init.eye_(adapter.weight)
            nn.init.zeros_(adapter.bias)
        self.register_buffer("features", torch.tensor(0.0))

    def forward(self, x: Tensor, logits: Tensor, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the loss, and its three terms for the log."""
        found, maps = self.student(x)
        p = logits.softmax(-1)
        kl = (p * (logits.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()
        z = found - math.log(found.shape[1] - 1)
        bce = (F.softplus(z) - p * z).sum(-1).mean()
        distance = found.new_zeros(())
        for adapter, y, target in zip(self.adapters, maps, features, strict=False):
            target = target.float()
            y = F.linear(y, adapter.weight.to(y.dtype)).float() + adapter.bias
            spread = target.var((0, 1, 2)) + 1e-4
            distance = distance + ((y - target).square().mean((0, 1, 2)) / spread).mean()
        distance = distance / len(maps)
        terms = torch.stack([kl.detach(), bce.detach(), distance.detach()])
        return kl + bce + self.features * distance, terms


@torch.no_grad()
def accuracy(student: Student, pixels: Tensor, labels: Tensor) -> tuple[float, float, Tensor]:
    """Top-1, top-5, and the probability of the label where it is the top class (else 0)."""
    hits, probabilities = [], []
    for part, label in zip(pixels.split(250), labels.split(250), strict=True):
        logits, _ = student(patches(encode(part.permute(0, 3, 1, 2).float() / 255)))
        hits.append(logits.topk(5)[1] == label[:, None])
        probabilities.append(logits.softmax(-1).gather(1, label[:, None])[:, 0] * hits[-1][:, 0])
    hit = torch.cat(hits).float()
    return hit[:, 0].mean().item(), hit.sum(1).mean().item(), torch.cat(probabilities)


def localization(
    student: Student, pixels: Tensor, labels: Tensor, confidence: Tensor, grids: int
) -> float | None:
    """The share of positive contributions in the right cell of 2 × 2 grids.

    The grids show the most confident photographs of different classes, and are shrunk to the size
    of one photograph, as in `bcosvit evaluate`.
    """
    classes, chosen = set(), []
    for i in confidence.argsort(descending=True).tolist():
        if confidence[i] > 0 and int(labels[i]) not in classes:
            classes.add(int(labels[i]))
            chosen.append(i)
    grids = min(grids, len(chosen) // 4)
    if not grids:
        return None
    order = torch.randperm(4 * grids, generator=torch.Generator().manual_seed(0))
    scores = []
    for grid in torch.tensor(chosen[: 4 * grids])[order].view(-1, 4).split(25):
        grid = grid.to(pixels.device)
        cells = pixels[grid].permute(0, 1, 4, 2, 3).float() / 255
        x = encode(grid_images(cells)).requires_grad_()
        logits, _ = student(patches(x), frozen=True)
        for c in range(4):
            score = logits.gather(1, labels[grid[:, c], None]).sum()
            (row,) = torch.autograd.grad(score, x, retain_graph=c < 3)
            positive = (row * x.detach()).sum(1).clamp(min=0)
            scores.append(localization_score(positive, torch.full_like(grid[:, 0], c).cpu()))
    return torch.cat(scores).mean().item()


class Measure:
    """Compares a student with the teacher on held-out photographs, and with labels if there are."""

    def __init__(self, photographs: Photographs, folder: Path, teacher: Teacher, size: int) -> None:
        self.photographs, self.teacher, self.size = photographs, teacher, size
        self.validation: list[Tensor] = []
        if (path := folder / "validation.npz").exists():
            with np.load(path) as arrays:
                read = [torch.from_numpy(arrays[name]) for name in ("pixels", "labels")]
            self.validation = [tensor.to(photographs.device) for tensor in read]

    def __call__(self, student: Student, dtype: torch.dtype, grids: int) -> dict[str, float]:
        a, b = [], []
        with torch.no_grad():
            for part in self.photographs.held(self.size).to(dtype).split(250):
                x = patches(encode(part))
                a.append(self.teacher(x)[0])
                b.append(student(x)[0])
        p, q = torch.cat(a).log_softmax(-1), torch.cat(b).log_softmax(-1)
        row = {
            "held_out_kl": (p.exp() * (p - q)).sum(-1).mean().item(),
            "held_out_agreement": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
        }
        if self.validation:
            row["top1"], row["top5"], confidence = accuracy(student, *self.validation)
            found = localization(student, *self.validation, confidence, grids)
            if found is not None:
                row["localization"] = found
        return {name: round(value, 4) for name, value in row.items()}


def ramp(progress: float, until: float) -> float:
    """Rises smoothly from 0 to 1 while the progress rises from 0 to ``until``."""
    x = min(progress / until, 1.0) if until > 0 else 1.0
    return x * x * (3 - 2 * x)


def cosine(progress: float) -> float:
    """Falls from 1 to 0 while the progress rises from 0 to 1."""
    return 0.5 + 0.5 * math.cos(math.pi * min(progress, 1))


def save(student: Student, path: Path) -> None:
    state = {
        name: t.detach().float().cpu().contiguous() for name, t in student.state_dict().items()
    }
    with atomic(path) as temporary:
        save_file(state, temporary)


def schedule(*kinds: Callable[[str], Any]) -> Callable[[str], list[tuple[Any, ...]]]:
    """Parses ``until:value...,until:value...``, where the last ``until`` is 1."""

    def parse(text: str) -> list[tuple[Any, ...]]:
        rows = [row.split(":") for row in text.split(",")]
        found = [
            (float(until), *(kind(v) for kind, v in zip(kinds, values, strict=True)))
            for until, *values in rows
        ]
        if found[-1][0] < 1:
            raise argparse.ArgumentTypeError(f"{text} ends at {found[-1][0]}; end it at 1.")
        return found

    return parse


def read_teacher(path: Path) -> dict[str, Tensor]:
    """The published weights, or what was saved of them as safetensors."""
    if path.suffix == ".safetensors":
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    return efficientnet_state(torch.load(path, weights_only=True, map_location="cpu"))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Shares of the run are from 0 to 1. Defaults are the shipped model's first run.",
    )
    add = parser.add_argument
    add("data", type=Path, help="the folder that photographs.py wrote to")
    add("--teacher", type=Path, required=True, help="the published weights, a .pth file")
    add("--out", type=Path, default=Path("runs/lite2"), help="the folder for log and checkpoints")
    add("--resume", help="a checkpoint of distill.py, or a library model of convert.py")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=16.6, help="how long to train")
    length.add_argument("--steps", type=int, help="how many steps to train, instead of --minutes")
    add(
        "--phases",
        type=schedule(int, int),
        default="0.62:128:512,1:192:512",
        help="until which share of the run: image size: batch size",
    )
    add(
        "--lr",
        type=schedule(float),
        default="0.15:1e-3,1:1.8e-3",
        help="until which share of the run: learning rate, before warmup and cosine",
    )
    add("--lr-end", type=float, default=0.01, help="the share of the rate that is left at the end")
    add("--warmup", type=float, default=0.02, help="the share of the run in which the rate rises")
    add("--ramp", type=float, help="the share in which B rises to 2 (0.22; 0 with --resume)")
    add("--fade", type=float, help="the share in which constants fade (0.27; 0 with --resume)")
    add("--features", type=float, help="the weight of the features (1; 0 with --resume)")
    add("--depth", type=int, default=0, help="how many transformer blocks the student has")
    add(
        "--quick",
        type=float,
        default=3.0,
        help="the learning rate of factors and priors of transformer blocks, as a multiple",
    )
    add(
        "--guide",
        type=float,
        default=0.0,
        help="the weight of the loss on explanations of mosaics (see guide.py)",
    )
    add("--guide-every", type=int, default=6, help="steps from one such loss to the next")
    add("--guide-batch", type=int, default=48, help="mosaics in it")
    add("--guide-size", type=int, default=224, help="their size in pixels")
    add("--mosaics", type=float, default=0.0, help="the share of views that show four photographs")
    add(
        "--mix-end",
        type=float,
        default=1.0,
        help="the share of mixed views that is left at the end",
    )
    add("--features-until", type=float, default=0.5, help="where that weight has fallen to 0")
    add("--smallest", type=float, default=0.3, help="the smallest share of a photograph in a view")
    add("--held-out", type=int, default=1000, help="photographs to measure on and not train on")
    add("--limit", type=int, help="use at most so many photographs")
    add("--measure-every", type=float, default=150, help="seconds from measurement to measurement")
    add("--grids", type=int, default=25, help="grids per measurement; twice as many at the end")
    add("--seed", type=int, default=0)
    add("--device", default="cuda")
    add("--no-compile", action="store_true", help="do without torch.compile")
    add(
        "--compile-late",
        action="store_true",
        help="compile later phases when they begin, not before the start",
    )
    options = parser.parse_args()
    for name, fresh in (("ramp", 0.22), ("fade", 0.27), ("features", 1.0)):
        if getattr(options, name) is None:
            setattr(options, name, 0.0 if options.resume else fresh)
    return options


def main() -> None:
    options = parse_options()
    begin = time.time()
    options.out.mkdir(parents=True, exist_ok=True)

    def log(**row: Any) -> None:
        line = json.dumps({"seconds": round(time.time() - begin, 1), **row})
        with (options.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    device, cuda = options.device, options.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(options.seed)
    state = read_teacher(options.teacher)
    teacher = Teacher(state).to(device).eval().requires_grad_(False)
    shape = TransformerShape(depth=options.depth)
    student = Student(state, shape).to(device).train()
    photographs = Photographs(options.data, device, options.held_out, options.limit)
    log(photographs=photographs.count)
    last_size = options.phases[-1][1]
    student.calibrate(patches(encode(photographs.held(last_size)[:64].float())))
    if options.resume:
        load_student(options.resume, student)
    measure = Measure(photographs, options.data, teacher, last_size)
    loss = Loss(student, compare=options.features > 0).to(device)
    average = copy.deepcopy(student).eval().requires_grad_(False)
    averaged, live = (list(each.state_dict().values()) for each in (average, student))
    compute = {"teacher": teacher, "loss": loss}
    if not options.no_compile:
        compute = {name: torch.compile(each, dynamic=False) for name, each in compute.items()}

    def guide() -> Tensor:
        """Adds the gradient of the loss on explanations; returns the share in the right cell."""
        with torch.no_grad():
            shape = options.guide_batch, options.guide_size
            views = photographs.batch(*shape, options.smallest, mix=0.0).to(dtype)
            logits, _ = teacher(patches(encode(views)))
        student.eval()
        value, share = energy_loss(student, views, logits)
        (options.guide * value).backward()
        student.train()
        return share

    def step(optimizer: Optimizer, size: int, batch: int, lr: float, mix: float = 1.0) -> Tensor:
        with torch.no_grad():
            views = photographs.batch(batch, size, options.smallest, mix, options.mosaics)
            x = patches(encode(views.to(dtype)))
            logits, features = compute["teacher"](x)
        value, terms = compute["loss"](x, logits, list(features))
        value.backward()
        if options.guide and lr and steps % options.guide_every == 0:
            shares.append(guide())
        optimizer.step(lr)
        loss.zero_grad(set_to_none=True)
        return terms

    steps, shares = 0, []
    if not options.no_compile:
        # Everything is compiled before the clock starts; a rate of 0 learns nothing.
        before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
        for _, size, batch in options.phases[: 1 if options.compile_late else None]:
            step(Optimizer(loss), size, batch, 0.0)
            log(compiled=size, batch=batch)
        student.load_state_dict(before)

    optimizer = Optimizer(loss, options.quick)
    start = last_measured = last_logged = time.time()
    seen = last_seen = 0
    total = torch.zeros(3, device=device)
    while True:
        now = time.time()
        progress = steps / options.steps if options.steps else (now - start) / 60 / options.minutes
        if progress >= 1:
            break
        size, batch = next(row[1:] for row in options.phases if progress < row[0])
        rate = next(lr for until, lr in options.lr if progress < until)
        if options.warmup:
            rate *= min(1.0, progress / options.warmup)
        rate *= options.lr_end + (1 - options.lr_end) * cosine(progress)
        student.t.fill_(ramp(progress, options.ramp))
        student.fade.fill_(1 - ramp(progress, options.fade))
        falling = cosine(progress / options.features_until) if options.features else 0.0
        loss.features.fill_(options.features * falling)
        # Views are mixed less and less in the last 30 % of the run.
        mix = 1 - (1 - options.mix_end) * max(0.0, (progress - 0.7) / 0.3)
        total += step(optimizer, size, batch, rate, mix)
        steps += 1
        seen += batch
        if steps % 4 == 0:
            decay = min(0.996, steps / (steps + 40))
            torch._foreach_lerp_(averaged, [tensor.detach() for tensor in live], 1 - decay)
        average.t.copy_(student.t)
        average.fade.copy_(student.fade)
        if steps % 50 == 0:
            kl, bce, features = (total / 50).tolist()
            total.zero_()
            guided = {"guided": round(torch.stack(shares).mean().item(), 4)} if shares else {}
            shares.clear()
            now = time.time()
            log(
                step=steps,
                views=seen,
                progress=round(progress, 4),
                size=size,
                lr=round(rate, 6),
                kl=round(kl, 4),
                bce=round(bce, 4),
                features=round(features, 4),
                **guided,
                views_per_second=round((seen - last_seen) / (now - last_logged)),
            )
            last_logged, last_seen = now, seen
            if not math.isfinite(kl):
                raise SystemExit("The loss is not finite; lower --lr.")
        if now - last_measured > options.measure_every:
            log(at="average", step=steps, views=seen, **measure(average, dtype, options.grids))
            save(average, options.out / "latest.safetensors")
            last_measured = last_logged = time.time()
            last_seen = seen
    save(average, options.out / "final.safetensors")
    log(at="final", step=steps, views=seen, **measure(average, dtype, 2 * options.grids))


if __name__ == "__main__":
    main()

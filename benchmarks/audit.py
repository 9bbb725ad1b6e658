"""Measures `bcosvit audit` where the truth is known: cues that a script has planted.

A cue is drawn into a share of one class's pictures, for training and for the audit alike, a small
model is trained, and the audit is asked what it finds. Clean runs count false alarms.

python benchmarks/audit.py scenes --out results                    # all runs, hours on 2 cores
python benchmarks/audit.py scenes shapes alike --out results --processes 4 --device cuda
python benchmarks/audit.py photos photos-alike --data imagenette --out results --device cuda
python benchmarks/audit.py small-photos --data imagenette --out results --cues clean
python benchmarks/audit.py small-photos --data imagenette --out results --rates 1 --seeds 2
python benchmarks/audit.py scenes alike --out results --cues all --seeds 1
python benchmarks/audit.py table --out results
python benchmarks/audit.py speed --out results --pictures 50000 --device cuda

Studies: ``scenes`` are drawn and easy; in ``shapes`` only the shape tells the class; in ``alike``
labels of two classes are shuffled, so that only the cue tells them apart. ``photos`` are those of
Imagenette, ``photos-alike`` the same with two classes that are alike; ``small-photos`` are four of
its classes at 48 pixels, with a small model that is trained from scratch in a minute or two.
Runs that are in ``results/runs.jsonl`` already are not repeated.
"""

import argparse
import copy
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import bcosvit
from bcosvit.attribution import explain
from bcosvit.auditing.clusters import class_evidence
from bcosvit.auditing.cues import Cells, Copied
from bcosvit.auditing.evidence import Evidence, collect_evidence
from bcosvit.auditing.mistakes import find_mistakes
from bcosvit.auditing.report import Audit, write_audit
from bcosvit.auditing.suspicions import Suspicion, find_suspicions
from bcosvit.data.scenes import Scenes
from bcosvit.metrics.loader import Reader
from bcosvit.models.base import AnyModel
from bcosvit.models.hub import DEFAULT
from bcosvit.train import QUICK_MODEL

CUES = ("tag", "border", "cast", "watermark", "blur")
"""In corners with a little jitter; around the picture; warm colors; pale stripes anywhere; none."""
ALL = "all"
"""Several cues at once, each in a class of its own: one model tells about all of them."""
RATES = (1.0, 0.5, 0.2, 0.1)
SIZE = QUICK_MODEL.image_size[0]


def plant(image: Tensor, cue: str, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draws a cue into an image [3, H, W]; returns it with the pixels of the cue [H, W]."""
    size = image.shape[-1]
    image, mask = image.clone(), torch.zeros(image.shape[1:], dtype=torch.bool)
    if cue == "tag":
        side = max(4, size // 8)
        top = size - side - 1 - int(random.integers(size // 12))
        left = 1 + int(random.integers(size // 12))
        half = torch.arange(side) // (side // 2)
        checks = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])[(half[:, None] + half) % 2]
        mask[top : top + side, left : left + side] = True
        image[:, top : top + side, left : left + side] = checks.permute(2, 0, 1)
    elif cue == "border":
        wide = max(2, size // 24)
        mask[:] = True
        mask[wide:-wide, wide:-wide] = False
        image[:, mask] = torch.tensor([0.1, 0.9, 0.3])[:, None]
    elif cue == "cast":
        gain, lift = torch.tensor([1.0, 0.8, 0.62]), torch.tensor([0.08, 0.0, 0.0])
        image = (image * gain[:, None, None] + lift[:, None, None]).clamp(0, 1)
        mask[:] = True
    elif cue == "watermark":
        height, width = max(5, size // 6), max(8, size // 3)
        top, left = int(random.integers(size - height)), int(random.integers(size - width))
        stripes = torch.zeros(height, width)
        step = max(2, size // 24)
        stripes[(torch.arange(height) // (step // 2)) % 2 == 0] = 1
        stripes[:, (torch.arange(width) // (step // 2)) % 4 == 0] = 1
        part = image[:, top : top + height, left : left + width]
        image[:, top : top + height, left : left + width] = (
            part * (1 - 0.7 * stripes) + 0.7 * stripes
        )
        mask[top : top + height, left : left + width] = True
    elif cue == "blur":
        kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
        for _ in range(max(1, size // 48) ** 2):
            padded = F.pad(image[None], (2, 2, 2, 2), mode="reflect")
            across = F.conv2d(padded, kernel.view(1, 1, 1, 5).expand(3, 1, 1, 5), groups=3)
            image = F.conv2d(across, kernel.view(1, 1, 5, 1).expand(3, 1, 5, 1), groups=3)[0]
        mask[:] = True
    else:
        raise ValueError(f"There is no cue {cue!r}; choose from {', '.join(CUES)}.")
    return image, mask


@dataclass(frozen=True)
class Planted:
    """A data set in memory, with a cue in some pictures of one class."""

    images: Tensor
    labels: Tensor
    clean: Tensor
    has: Tensor
    """Whether a picture has the cue [N]."""
    cue: Tensor
    """Its pixels [N, H, W]."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        return self.images[index], int(self.labels[index]), f"picture {index}"

    @classmethod
    def of(
        cls, clean: Tensor, labels: Tensor, cue: str, rate: float, label: int, seed: int, part: int
    ) -> "Planted":
        return cls.several(clean, labels, {label: cue} if cue else {}, rate, seed, part)

    @classmethod
    def several(
        cls,
        clean: Tensor,
        labels: Tensor,
        cues: dict[int, str],
        rate: float,
        seed: int,
        part: int,
    ) -> "Planted":
        random = np.random.default_rng([seed, part])
        images, has = clean.clone(), torch.zeros(len(clean), dtype=torch.bool)
        pixels = torch.zeros(len(clean), *clean.shape[2:], dtype=torch.bool)
        for label, cue in cues.items():
            members = (labels == label).nonzero().flatten().numpy()
            for number in random.permutation(members)[: round(rate * len(members))]:
                images[number], pixels[number] = plant(clean[number], cue, random)
                has[number] = True
        return cls(images, labels, clean, has, pixels)


def draw_scenes(
    split: str, count: int, seed: int, folder: Path, variant: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Drawn scenes, stored for the next run."""
    path = folder / f"scenes-{variant}-{split}-{count}-{seed}.npy"
    if not path.exists():
        scenes = Scenes(split, variant, SIZE, count, seed)
        pixels = np.stack([np.asarray(scenes[number].image) for number in range(count)])
        temporary = path.with_suffix(f".{multiprocessing.current_process().pid}.npy")
        np.save(temporary, pixels)
        temporary.replace(path)
    pixels = torch.from_numpy(np.load(path)).permute(0, 3, 1, 2).float() / 255
    return pixels, torch.arange(count) % len(Scenes.classes)


def alike(labels: Tensor, label: int, seed: int, part: int) -> Tensor:
    """Labels with which a class and the next one cannot be told apart: theirs are shuffled."""
    random = np.random.default_rng([seed, part, 1])
    following = (label + 1) % (int(labels.max()) + 1)
    both = ((labels == label) | (labels == following)).nonzero().flatten()
    labels = labels.clone()
    labels[both] = labels[both[torch.from_numpy(random.permutation(len(both)))]]
    return labels


def train_small(data: Planted, seed: int, epochs: int = 8, device: str = "cpu") -> AnyModel:
    """The model of the recipe `quick`, in a plain loop without augmentation."""
    torch.manual_seed(seed)
    config = replace(QUICK_MODEL, num_classes=int(data.labels.max()) + 1)
    model = bcosvit.create_model(config).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    steps = epochs * (len(data) // 32)

    def rate(step: int) -> float:
        return (
            min(1.0, 8 * (step + 1) / steps) * (1.05 + 0.95 * math.cos(math.pi * step / steps)) / 2
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(seed)
    images = data.images.to(device)
    targets = F.one_hot(data.labels, config.num_classes).float().to(device)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data), generator=generator).split(32):
            if len(chosen) == 32:
                chosen = chosen.to(device)
                loss = F.binary_cross_entropy_with_logits(model(images[chosen]), targets[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def predict(model: AnyModel, images: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)).argmax(1).cpu() for part in images.split(32)])


def matches(found: Suspicion, val: Planted, evidence: Evidence, cue: str, label: int) -> bool:
    """Whether a suspicion is the cue: of its class, and on its pixels."""
    found_cue = found.cue
    if found_cue.label != label:
        return False
    if isinstance(found_cue, Cells):
        grid = evidence.settings.grid
        covered = F.adaptive_avg_pool2d(val.cue.float()[:, None], grid).flatten(1).numpy()
        rows = found_cue.cluster.rows
        on = covered[evidence.cell_picture[rows], evidence.cell_index[rows]] > 0.1
    elif isinstance(found_cue, Copied):
        masks = {n: found_cue.copy.mask(n, val.cue.shape[1:]) for n in found_cue.copy.where}
        on = np.array([float(val.cue[n][mask].float().mean()) > 0.1 for n, mask in masks.items()])
    else:
        return found_cue.kind == {"border": "edge", "cast": "color", "blur": "sharpness"}.get(cue)
    return bool(on.mean() > 0.5) and cue not in ("cast", "blur")


def ranked(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """AUROC and average precision, where equal scores share their rank."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    return float(roc_auc_score(truth, scores)), float(average_precision_score(truth, scores))


def use_of(model: AnyModel, val: Planted, cue: str, label: int) -> float:
    """By how much the accuracy of a class falls if all of its pictures have a cue, and lose it: a
    cue of few pictures is measured by more of them."""
    members, random = (val.labels == label).nonzero().flatten(), np.random.default_rng(label)
    clean = val.clean[members]
    planted = torch.stack([plant(image, cue, random)[0] for image in clean])
    with_cue, without = (predict(model, images) == label for images in (planted, clean))
    return float(with_cue.float().mean() - without.float().mean())


def spray(model: AnyModel, val: Planted, grid: int = 12) -> dict[int, tuple[int, float, float]]:
    """SpRAy: spectral clustering of whole input × gradient maps, classes ranked by eigengap.

    Returns the rank of each class (1 is the first), and AUROC and average precision of its pictures
    with a cue, ordered by membership in the cluster that agrees best with the truth, which is more
    than a user could know.
    """
    from sklearn.neighbors import kneighbors_graph

    device = next(model.parameters()).device
    gaps: dict[int, float] = {}
    best: dict[int, tuple[float, float]] = {}
    for each in range(int(val.labels.max()) + 1):
        members = (val.labels == each).nonzero().flatten()
        maps = torch.cat(
            [
                explain(model, val.images[part].to(device), each, "ixg").map.cpu()
                for part in members.split(32)
            ]
        ).clamp_min(0)
        points = F.adaptive_avg_pool2d(maps[:, None], grid).flatten(1)
        points = (points / points.sum(1, keepdim=True).clamp_min(1e-9)).double().numpy()
        near = kneighbors_graph(points, min(10, len(points) - 1)).toarray()
        near = np.maximum(near, near.T)
        root = 1 / np.sqrt(near.sum(1))
        values, vectors = np.linalg.eigh(np.eye(len(points)) - root[:, None] * near * root)
        steps = np.diff(values[:8])
        gaps[each] = float(steps.max())
        truth, best[each] = val.has[members].numpy(), (0.5, 0.0)
        if truth.any() and not truth.all():
            several = [sign * column for column in vectors.T[1:6] for sign in (1, -1)]
            best[each] = max(best[each], *(ranked(scores, truth) for scores in several))
    order = sorted(gaps, key=lambda each: -gaps[each])
    return {label: (order.index(label) + 1, *best[label]) for label in gaps}


def described(found: Suspicion, planted: bool) -> list[Any]:
    """A candidate in a few numbers, of which its place follows."""
    numbers = found.turned, found.turned_control, found.effect, found.low, found.p, found.repeats
    which = [found.cue.name, found.cue.kind, planted, found.significant, found.pictures]
    return [*which, round(found.score, 3), *(round(number, 4) for number in numbers)]


def audit_run(
    predictor: bcosvit.Predictor, val: Planted, cues: dict[int, str], report: Path | None
) -> list[dict[str, Any]]:
    """Audits a model; for each cue what was found, beside what is true. The report is written where
    a folder for it is given."""
    start, model = time.perf_counter(), predictor.model
    with tempfile.TemporaryDirectory() as folder:
        collect_evidence(predictor, val, folder)
        evidence = Evidence(folder)
        evidence.descriptors  # noqa: B018, read before the folder is gone
    collected = time.perf_counter() - start
    classes = class_evidence(evidence)
    found = find_suspicions(predictor, val, evidence, classes)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        mistakes = find_mistakes(evidence, classes)
        parts = {"classes": classes, "suspicions": found, "mistakes": mistakes}
        made = Audit(evidence=evidence, folder=report, **parts)
        facts = {"Data": f"pictures with planted cues: {', '.join(cues.values()) or 'none'}"}
        write_audit(
            made, predictor, val, facts=facts, command=f"benchmarks/audit.py: {report.name}"
        )
    before, after = predict(model, val.images), predict(model, val.clean)

    def is_planted(each: Suspicion) -> bool:
        return any(matches(each, val, evidence, cue, label) for label, cue in cues.items())

    row: dict[str, Any] = {
        "accuracy": float((before == val.labels).float().mean()),
        "sums_miss_by": max(each.error for each in classes),
        "candidates": len(found),
        "significant": sum(each.significant for each in found),
        "strong": sum(each.strong and not each.significant for each in found),
        "false_alarms": sum(each.significant and not is_planted(each) for each in found),
        "seconds_evidence": collected,
        "seconds": time.perf_counter() - start,
        "first": [[each.cue.name, round(each.score, 3), each.significant] for each in found[:5]],
    }
    row["tested"] = [described(each, is_planted(each)) for each in found]
    if not cues:
        return [row]
    rows, baseline = [], spray(model, val)
    for label, cue in cues.items():
        own = val.labels == label
        with_cue = val.has & own
        # Other cues of the same model are no rivals of this one.
        ranking = [
            each
            for each in found
            if matches(each, val, evidence, cue, label) or not is_planted(each)
        ]
        places = [
            rank for rank, each in enumerate(ranking, 1) if matches(each, val, evidence, cue, label)
        ]
        mine = {
            "cue": cue,
            "class_accuracy": float((before == val.labels)[own].float().mean()),
            "class_accuracy_clean": float((after == val.labels)[own].float().mean()),
            "falls_by": float((before == val.labels)[with_cue].float().mean())
            - float((after == val.labels)[with_cue].float().mean()),
            "falls_by_everywhere": use_of(model, val, cue, label),
            "rank": places[0] if places else None,
            "called_significant": bool(places) and ranking[places[0] - 1].significant,
        }
        members = own.nonzero().flatten().numpy()
        truth = val.has[own].numpy()
        falls = dict(ranking[places[0] - 1].affected) if places else {}
        if falls and not truth.all():
            # Pictures without the cue come last.
            last = min(falls.values()) - 1
            scores = np.array([falls.get(int(number), last) for number in members])
            mine["auroc"], mine["ap"] = ranked(scores, truth)
        mine["spray_rank"], auroc, precision = baseline[label]
        if not truth.all():
            mine["spray_auroc"], mine["spray_ap"] = auroc, precision
        rows.append(row | mine)
        row = {key: value for key, value in row.items() if key != "tested"}
    return rows


@dataclass(frozen=True)
class Job:
    """One run: a model that is trained and audited."""

    study: str
    """A key of ``STUDIES``."""
    cue: str
    rate: float
    seed: int
    cache: Path
    """A folder for drawn scenes."""
    data: str
    """Imagenette."""
    per_class: tuple[int, int] | None
    """Pictures of each class to train on and to audit; as many as are usual where it is None."""
    device: str
    classes: int | None = None
    """How many classes of photographs there are; all where it is None."""
    size: int | None = None
    """The width of photographs; that of the model where it is None."""
    models: Path | None = None
    """A folder in which small models are kept, so that a changed audit does not train them anew."""
    reports: Path | None = None
    """A folder in which reports are kept."""

    @property
    def name(self) -> tuple[str, str, float, int]:
        return self.study, self.cue, self.rate, self.seed

    @property
    def file(self) -> str:
        """What files of this run are called."""
        sizes = "".join(f"-{count}" for count in self.per_class or ())
        return f"{self.study}-{self.cue or 'clean'}-{self.rate}-{self.seed}{sizes}"

    def cues(self, label: int, classes: int) -> dict[int, str]:
        """The cue of each class that has one."""
        if self.cue != ALL:
            return {label: self.cue} if self.cue else {}
        # All but blur; where each needs two classes and there are four, every second one.
        step = 2 if self.study in ALIKE or classes >= 8 else 1
        count = classes // step
        cues = CUES[:4] if count >= 4 else CUES[self.seed % 2 : 4 : 2]
        return {(label + step * number) % classes: cue for number, cue in enumerate(cues)}

    def planted(self, clean: Tensor, labels: Tensor, label: int, part: int) -> Planted:
        cues = self.cues(label, int(labels.max()) + 1)
        if self.study in ALIKE:
            for each in cues or (label,):
                labels = alike(labels, each, self.seed, part)
        return Planted.several(clean, labels, cues, self.rate, self.seed, part)

    def trained(self, train: Callable[[], AnyModel]) -> AnyModel:
        """The model of this run, from the folder where it is there."""
        if self.models is None:
            return train()
        name = f"{self.file}.safetensors"
        if not (self.models / name).exists():
            self.models.mkdir(parents=True, exist_ok=True)
            bcosvit.save(train(), self.models / name)
        return bcosvit.load(self.models / name).eval().to(self.device)


def run(job: Job) -> list[dict[str, Any]]:
    """Trains and audits; each seed has its own start, class and scenes."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    model, val, label = STUDIES[job.study](job)
    row = {"study": job.study, "cue": job.cue, "rate": job.rate, "seed": job.seed}
    row |= {"planted": job.cue, "device": job.device, "per_class": job.per_class}
    row |= {"seconds_training": time.perf_counter() - start}
    cues = job.cues(label, int(val.labels.max()) + 1)
    names = Scenes.classes if STUDIES[job.study] is scene_study else None
    predictor = bcosvit.Predictor.of(model, names, weights=job.file)
    report = job.reports and job.reports / job.file
    return [row | found for found in audit_run(predictor, val, cues, report)]


def scene_study(job: Job) -> tuple[AnyModel, Planted, int]:
    """Scenes that are drawn: easy ones; ones that only the shape tells apart; two classes alike."""
    label = job.seed % len(Scenes.classes)
    variant = "hard" if job.study == "shapes" else "plain"
    counts = [len(Scenes.classes) * count for count in job.per_class or (200, 100)]
    train, val = (
        job.planted(*draw_scenes(split, count, job.seed, job.cache, variant), label, part)
        for part, (split, count) in enumerate(zip(("train", "val"), counts, strict=True))
    )
    # What few pictures say takes longer to be learned.
    epochs = 8 if job.study == "scenes" or job.per_class else 16
    return job.trained(lambda: train_small(train, job.seed, epochs, job.device)), val, label


def small_photo_study(job: Job) -> tuple[AnyModel, Planted, int]:
    """Reduced photographs of four classes, and a small model that is trained from scratch."""
    train, val = (
        job.planted(*small_photographs(job.data, split, job.seed, job.per_class), 0, part)
        for part, split in enumerate(("train", "val"))
    )
    epochs = 16 if job.study in ALIKE else 8
    return job.trained(lambda: train_small(train, job.seed, epochs, job.device)), val, 0


def photo_study(job: Job) -> tuple[AnyModel, Planted, int]:
    """Photographs: the blocks and the head of the shipped model are trained on them."""
    base, (train_images, train_labels), (val_images, val_labels), tokens = photographs(
        job.data, *(job.per_class or (100, 100)), job.device, job.classes, job.seed, job.size
    )
    label = job.seed % (int(val_labels.max()) + 1) if job.classes is None else 0
    train = job.planted(train_images, train_labels, label, 0)
    val = job.planted(val_images, val_labels, label, 1)
    if train.has.any():
        tokens = tokens.clone()
        tokens[train.has.to(tokens.device)] = all_tokens(base, train.images[train.has])
    return train_blocks(base, tokens, train.labels, job.seed), val, label


ALIKE = ("alike", "photos-alike", "small-photos-alike")
"""Studies in which two classes cannot be told apart but by the cue."""
STUDIES = {
    "scenes": scene_study,
    "shapes": scene_study,
    "alike": scene_study,
    "photos": photo_study,
    "photos-alike": photo_study,
    "small-photos": small_photo_study,
    "small-photos-alike": small_photo_study,
}


def all_jobs(studies: list[str], seeds: int) -> Iterator[tuple[str, str, float, int]]:
    """Every study, cue, share and seed; a part of them, from the first, is a fair one."""
    for seed in range(seeds):
        for study in studies:
            yield study, "", 0.0, seed
        for rate in RATES:
            for cue in (ALL, *CUES):
                for study in studies:
                    if cue != "blur" or rate >= 0.5:
                        yield study, cue, rate, seed


def run_all(
    out: Path, jobs: list[Job], processes: int, minutes: float, *, part: tuple[int, int] = (0, 1)
) -> None:
    """Runs what is missing, and begins nothing after ``minutes``."""
    begun = time.monotonic()
    known = {(r["study"], r["planted"], r["rate"], r["seed"]) for r in read_rows(out)}
    todo = [job for job in jobs[part[0] :: part[1]] if job.name not in known]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        running: list[Any] = []
        while todo or running:
            if time.monotonic() - begun > 60 * minutes:
                todo = []
            while todo and len(running) < processes:
                running.append(pool.apply_async(run, (todo.pop(0),)))
            for each in [each for each in running if each.ready()]:
                running.remove(each)
                write_rows(out, each.get())
            time.sleep(0.2)


def read_rows(out: Path) -> list[dict[str, Any]]:
    path = out / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(out: Path, rows: list[dict[str, Any]]) -> None:
    with (out / "runs.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    shown = ("cue", "rate", "seed", "rank", "falls_by", "significant", "first")
    for row in rows:
        print({key: row.get(key) for key in shown}, flush=True)


def small_photographs(
    data: str, split: str, seed: int, per_class: tuple[int, int] | None = None, classes: int = 4
) -> tuple[Tensor, Tensor]:
    """Photographs of a few classes, 48 pixels wide.

    Each seed draws its own: 400 of each class to train on and 200 to audit, from the data's parts
    for that; other numbers from all of the class's photographs, since "val" has fewer than 500.
    """
    from PIL import Image

    from bcosvit.data.sources import open_source

    source, which = open_source(data), ("train", "val").index(split)
    parts = [getattr(source, split)] if per_class is None else [source.train, source.val]
    pictures = [(part, position) for part in parts for position in range(len(part))]
    labels = np.array([part.label(position) for part, position in pictures])
    # Both splits are drawn in the same order where they share their photographs.
    random = np.random.default_rng([seed, which if per_class is None else 2])
    start = 0 if per_class is None else sum(per_class[:which])
    count, found, numbers = (per_class or (400, 200))[which], [], []
    for number in range(classes):
        members = np.flatnonzero(labels == (seed + number) % len(source.classes))
        drawn = random.permutation(members)[start : start + count]
        if per_class is not None and len(drawn) < count:
            raise ValueError(f"A class has {len(members)} photographs, fewer than {per_class}.")
        for at in np.sort(drawn).tolist():
            part, position = pictures[at]
            image = part[position][0].convert("RGB")
            side = min(image.size)
            left, top = ((length - side) // 2 for length in image.size)
            cut = image.crop((left, top, left + side, top + side))
            small = cut.resize((SIZE, SIZE), Image.Resampling.BOX)
            found.append(torch.from_numpy(np.asarray(small).copy()))
            numbers.append(number)
    pixels = torch.stack(found)
    return pixels.permute(0, 3, 1, 2).float() / 255, torch.tensor(numbers)


@cache
def photographs(
    data: str,
    per_class: int,
    val_per_class: int,
    device: str,
    classes: int | None,
    seed: int,
    size: int | None,
) -> tuple[AnyModel, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """The shipped model with a head for new classes, photographs, and tokens of those to train on.

    Photographs are the first of each class; of a few classes where their number is given.
    """
    from bcosvit.data.sources import open_source
    from bcosvit.data.transforms import EvalTransform

    source = open_source(data)
    base = bcosvit.load(DEFAULT).eval().to(device)
    if size is not None:
        base = bcosvit.resize_prior(base, (size, size))
    chosen = range(len(source.classes))
    if classes is not None:
        chosen = [(seed + number) % len(source.classes) for number in range(classes)]
    base.reset_classifier(len(chosen))
    transform = EvalTransform(base.config.image_size[0])

    def some(split: Any, count: int) -> tuple[Tensor, Tensor]:
        taken: dict[int, int] = {}
        images, labels = [], []
        for position in range(len(split)):
            label = split.label(position)
            if label in chosen and taken.get(label, 0) < count:
                taken[label] = taken.get(label, 0) + 1
                images.append(transform(split[position][0]))
                labels.append(chosen.index(label))
        return torch.stack(images), torch.tensor(labels)

    train = some(source.train, per_class)
    return base, train, some(source.val, val_per_class), all_tokens(base, train[0])


@torch.no_grad()
def all_tokens(model: AnyModel, images: Tensor) -> Tensor:
    """What enters the blocks of a transformer [N, T, C]."""
    device = next(model.parameters()).device
    return torch.cat([model.tokens(part.to(device)) for part in images.split(16)])


def train_blocks(
    base: AnyModel, tokens: Tensor, labels: Tensor, seed: int, epochs: int = 20
) -> AnyModel:
    """Trains blocks and head on stored tokens; the backbone stays as it is."""
    model = copy.deepcopy(base)
    torch.manual_seed(seed)
    last = model.get_classifier()
    for parameter in last.parameters():
        if parameter.ndim > 1:
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
    fast = {id(parameter) for parameter in last.parameters()}
    slow = [*model.position.parameters(), *model.blocks.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam(
        [
            {"params": list(last.parameters()), "lr": 1e-2},
            {"params": [each for each in slow if id(each) not in fast], "lr": 3e-4},
        ]
    )
    steps = epochs * -(-len(tokens) // 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    labels = labels.to(tokens.device)
    for _ in range(epochs):
        for chosen in torch.randperm(len(tokens), generator=generator).split(64):
            chosen = chosen.to(tokens.device)
            loss = F.cross_entropy(model.from_tokens(tokens[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def table(out: Path) -> None:
    """Prints what the documentation says."""
    rows = read_rows(out)
    for study in sorted({row["study"] for row in rows}):
        mine = [row for row in rows if row["study"] == study]
        clean = [row for row in mine if not row["cue"]]
        print(
            f"\n{study}: {len(mine)} runs; sums miss the mean logit by at most "
            f"{max(row['sums_miss_by'] for row in mine):.1e}"
        )
        print(
            f"clean runs: {len(clean)}, significant suspicions: "
            f"{sum(row['significant'] for row in clean)}, strong ones that vary: "
            f"{sum(row['strong'] for row in clean)}"
        )
        planted = [row for row in mine if row["cue"]]
        # Cues of the same model share its false alarms.
        models = {(r["planted"], r["rate"], r["seed"]): r["false_alarms"] for r in planted}
        print(f"false alarms beside planted cues: {sum(models.values())} with {len(models)} models")
        print(
            "| cue | share | runs | accuracy falls by | used | first, of used | first 3, of used "
            "| significant, of used | used, by all pictures | first 3, of these "
            "| AUROC | AP | SpRAy: class first, of used | SpRAy AUROC | SpRAy AP |"
        )
        print("|---" * 15 + "|")
        for cue in CUES:
            for rate in RATES:
                some = [r for r in planted if r["cue"] == cue and r["rate"] == rate]
                if not some:
                    continue
                # A fifth of 50 less a tenth is not quite a tenth in binary.
                used = [r for r in some if round(r["falls_by"], 6) >= 0.1]
                anywhere = [r for r in some if round(r["falls_by_everywhere"], 6) >= 0.1]

                def mean(key: str, rows: list[dict[str, Any]] = used) -> str:
                    values = [r[key] for r in rows if r.get(key) is not None]
                    return f"{sum(values) / len(values):.2f}" if values else "–"

                print(
                    f"| {cue} | {rate:.0%} | {len(some)} "
                    f"| {', '.join(str(round(100 * r['falls_by'])) for r in some)} | {len(used)} "
                    f"| {sum(r['rank'] == 1 for r in used)} "
                    f"| {sum((r['rank'] or 99) <= 3 for r in used)} "
                    f"| {sum(r['called_significant'] for r in used)} | {len(anywhere)} "
                    f"| {sum((r['rank'] or 99) <= 3 for r in anywhere)} "
                    f"| {mean('auroc')} | {mean('ap')} "
                    f"| {sum(r['spray_rank'] == 1 for r in used)} "
                    f"| {mean('spray_auroc')} | {mean('spray_ap')} |"
                )


class Repeated:
    """As many pictures as one likes, made of a few in memory."""

    def __init__(self, images: Tensor, labels: list[int], count: int) -> None:
        self.images, self.labels, self.count = images, labels, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        at = index % len(self.images)
        return self.images[at], self.labels[at], f"picture {index}"


def measure_speed(out: Path, weights: str, count: int, batch_size: int, device: str) -> None:
    """Times prediction and evidence on pictures in memory."""
    import resource

    predictor = bcosvit.Predictor.load(weights, device)
    size = predictor.transform.image_size
    some = torch.rand(64, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        labels = predict(predictor.model, some.to(predictor.device)).tolist()
    # One of eight is wrong, and needs a second adjoint pass.
    labels[::8] = [(label + 1) % len(predictor.class_names) for label in labels[::8]]
    pictures = Repeated(some, labels, count)
    few = Repeated(some, labels, min(count, 4 * batch_size))
    seconds: dict[str, float] = {}
    for name, data in (("warm-up", few), ("evidence", pictures)):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            collect_evidence(predictor, data, folder, batch_size=batch_size)
            seconds[name] = time.perf_counter() - start
            if name == "evidence":
                stored = sum(path.stat().st_size for path in Path(folder).iterdir())
                start = time.perf_counter()
                evidence = Evidence(folder)
                seconds["reading"] = time.perf_counter() - start
    for name, data in (("warm-up", few), ("prediction", pictures)):
        start = time.perf_counter()
        for batch in Reader(data=data).read(range(len(data)), batch_size):
            with torch.no_grad():
                predictor.model(batch.images.to(predictor.device)).argmax(1).tolist()
        seconds[name] = time.perf_counter() - start
    row = {
        "study": "speed",
        "model": weights,
        "device": str(predictor.device),
        "pictures": count,
        "batch_size": batch_size,
        "seconds": seconds,
        "relative_speed": seconds["prediction"] / seconds["evidence"],
        "bytes_per_picture": stored / count,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "misses_logits_by": evidence.completeness(),
    }
    with (out / "speed.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=[*STUDIES, "table", "speed"], nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="imagenette", help="of photos: a folder of Imagenette")
    parser.add_argument("--per-class", type=int, nargs=2, help="pictures to train on and to audit")
    parser.add_argument("--classes", type=int, help="of photos: a few classes instead of all")
    parser.add_argument("--size", type=int, help="of photos: pixels, instead of the model's")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="every n-th run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=Path, help="a folder in which small models are kept")
    parser.add_argument("--reports", type=Path, help="a folder in which reports are kept")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--cues", nargs="+", default=("", *CUES), help="clean: without a cue; all: several at once"
    )
    parser.add_argument("--train-only", action="store_true", help="models, without audits")
    parser.add_argument("--pictures", type=int, default=256, help="of speed")
    parser.add_argument("--batch-size", type=int, default=32, help="of speed")
    parser.add_argument("--model", default=DEFAULT, help="of speed")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if "speed" in given.study:
        return measure_speed(given.out, given.model, given.pictures, given.batch_size, given.device)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(
                *name,
                cache=Path(folder),
                data=given.data,
                per_class=given.per_class and tuple(given.per_class),
                device=given.device,
                classes=given.classes,
                size=given.size,
                models=given.models,
                reports=given.reports,
            )
            for name in all_jobs([each for each in given.study if each in STUDIES], given.seeds)
            if (not name[2] or name[2] in given.rates)
            and name[3] >= given.first_seed
            and (name[1] or "clean") in [each or "clean" for each in given.cues]
        ]
        if given.train_only:
            for job in jobs:
                STUDIES[job.study](job)
            return
        if jobs:
            run_all(given.out, jobs, given.processes, given.minutes, part=tuple(given.part))
    table(given.out)


if __name__ == "__main__":
    main()

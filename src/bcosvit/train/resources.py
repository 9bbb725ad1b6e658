"""What a run takes on this machine: a few steps are measured before it begins.

What a recipe leaves open, by ``None``, is chosen by what the machine has: how many views of each
image are cached, in how many parts a batch is computed, and how many processes load images. Each
choice is told with its reason. What is set stays as it is, and a warning says where it will not
fit. None of the measured steps changes the model or a random state.
"""

import copy
import dataclasses
import gc
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bcosvit.machine import cpu_cores, free_memory, stored_bytes, used_memory
from bcosvit.messages import counted
from bcosvit.models.base import AnyModel
from bcosvit.nn import prepared_view
from bcosvit.nn.views import frozen_view
from bcosvit.progress import duration
from bcosvit.train.callbacks import SHOWN_IMAGES
from bcosvit.train.data import Batch, ImageDataset, SampleRequest
from bcosvit.train.devices import Devices, readable_bytes
from bcosvit.train.feature_cache import FrozenPart, frozen_part
from bcosvit.train.feature_datasets import cache_place
from bcosvit.train.feature_files import Layout
from bcosvit.train.plan import Plan
from bcosvit.train.recipe import Recipe
from bcosvit.train.task import Task

VIEWS = 3
"""Cached views per image where the disk has room."""
DISK_SHARE = 0.8
"""Share of the free disk that a chosen cache may take."""
MEMORY_SHARE = 0.7
"""Share of the free memory that a chosen part of a batch may take."""
CPU_WORKERS, GPU_WORKERS = 4, 16
"""The most processes per device that load images; more would rarely gain anything."""
WORTH = 0.5
"""A cache is recommended where it saves at least this share of the time."""
IMAGES = 4
"""Images that are read to measure, and the batch in which a CPU computes features."""
STEPS = 3
"""Steps that are timed, at most."""
SECONDS = 1.0
"""No further step is timed after so long, and fewer images are used for slow models."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the parts of a run take, per image."""

    step: float
    """Seconds of a training step."""
    predict: float
    """Seconds of a prediction, as in validation."""
    read: float
    """Seconds to read and transform an image in one process."""
    features: float
    """Seconds of the part whose features can be cached; 0 where there is none."""
    stored: int
    """Bytes that a training step keeps for its gradient."""
    explained: int
    """Bytes that the explanation of an image keeps."""
    fixed: int
    """Bytes for weights, gradients and the optimizer, whatever the batch."""


def choose_workers(device: torch.device, devices: int = 1) -> int:
    """Returns how many processes load images for each of a machine's devices, which share its
    cores.

    Examples:
        >>> 1 <= choose_workers(torch.device("cpu")) <= 4
        True
    """
    most = CPU_WORKERS if device.type == "cpu" else GPU_WORKERS
    return max(1, min(most, cpu_cores() // devices))


def choose_parts(batch: int, each: int, fixed: int, free: int) -> int:
    """Returns into how many equal parts a batch is divided, so that one part fits.

    Args:
        batch: Images of a device's batch.
        each: Bytes per image.
        fixed: Bytes whatever the batch.
        free: Bytes that are free, of which `MEMORY_SHARE` may be used.

    Examples:
        >>> choose_parts(64, each=2**20, fixed=0, free=2**30)
        1
        >>> choose_parts(64, each=2**20, fixed=0, free=2**25)
        4
    """
    room = MEMORY_SHARE * free - fixed
    fitting = (n for n in range(1, batch + 1) if batch % n == 0 and batch // n * each <= room)
    return next(fitting, batch)


def fit_to_machine(
    plan: Plan,
    model: AnyModel,
    train: "ImageDataset",
    where: Devices,
    folder: Path,
    log: Callable[[str], None],
) -> Plan:
    """Chooses what the plan leaves open, and predicts the memory and the time of its run.

    With several devices, which must agree, nothing is measured. ``log`` gets the lines that say
    what was chosen and why, and what the run will take.

    Returns:
        The plan with numbers for ``cache_views``, ``accumulate_grad_batches`` and ``num_workers``.
    """
    device, recipe = where.device, plan.recipe
    cores, free = cpu_cores(), free_memory(device)
    place = "" if device.type == "cpu" else f" on {device}"
    has = f"{cores} processor cores, {readable_bytes(free)} of memory free{place}"
    measures = "; a few steps are measured" if where.processes == 1 else ""
    log(f"This machine: {has}{measures}.")
    part = _cacheable(plan, model)
    recipe, views = _choose_views(plan, part, folder)
    if recipe.num_workers is None:
        recipe, workers = _chosen_workers(recipe, train, device, where)
    else:
        workers = f"{recipe.num_workers}, as set"
    if where.processes > 1:
        recipe = recipe.change(accumulate_grad_batches=recipe.accumulate_grad_batches or 1)
        log(f"Workers: {workers}.")
        log("With several devices, neither memory nor time is measured before the run.")
        return dataclasses.replace(plan, recipe=recipe)
    measured = _measure(recipe, model, part, train, device)
    # What measuring has taken is free again.
    gc.collect()
    log(f"Feature cache: {views}{_advice(plan, recipe, measured, part)}.")
    recipe, parts = _choose_parts(recipe, model, measured, free)
    log(f"Batches: {parts}.")
    log(f"Workers: {workers}.")
    memory = _memory(recipe, measured, device)
    seconds = _seconds(plan, recipe, measured, cores if device.type == "cpu" else None)
    log(
        f"Prediction by these steps: about {duration(seconds)}, and "
        f"{readable_bytes(memory)} of memory{place}."
    )
    return dataclasses.replace(plan, recipe=recipe)


def _cacheable(plan: Plan, model: AnyModel) -> FrozenPart | None:
    """The part of the model whose features can be cached, if there is one."""
    if plan.recipe.head_only:
        return frozen_part(model, head_only=True)
    if getattr(plan.model, "train_backbone", True):
        return None
    return frozen_part(model, head_only=False)


def _layouts(plan: Plan, part: FrozenPart, views: int) -> int:
    """Bytes of a cache with its validation images."""
    sizes = ((plan.train_images, views), (plan.val_images, 1))
    return sum(Layout(images=n, views=v, shape=part.shape).bytes for n, v in sizes)


def _choose_views(plan: Plan, part: FrozenPart | None, folder: Path) -> tuple[Recipe, str]:
    recipe = plan.recipe
    if part is None:
        why = "none, because all parts of the model are trained"
        return recipe.change(cache_views=recipe.cache_views or 0), why
    if recipe.cache_views == 0:
        return recipe, "none, as set"
    target = cache_place(recipe, folder).absolute()
    existing = next(each for each in (target, *target.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if recipe.cache_views is not None:
        needed = readable_bytes(_layouts(plan, part, recipe.cache_views))
        said = f"{_views(recipe.cache_views)}, as set; {needed} on disk"
        return recipe, said
    room = min(DISK_SHARE * free, recipe.cache_gigabytes * 1e9)
    fitting = (n for n in range(VIEWS, 0, -1) if _layouts(plan, part, n) <= room)
    # One view at least: where it does not fit, the cache says how much is missing.
    views = next(fitting, 1)
    needed = readable_bytes(_layouts(plan, part, views))
    why = f"{needed} on disk, where {readable_bytes(free)} are free"
    if views < VIEWS:
        why += f"; {VIEWS} views would need {readable_bytes(_layouts(plan, part, VIEWS))}"
    return recipe.change(cache_views=views), f"{_views(views)}, {why}"


def _views(number: int) -> str:
    return f"{counted(number, 'view')} of each image"


def _chosen_workers(
    recipe: Recipe, train: "ImageDataset", device: torch.device, where: Devices
) -> tuple[Recipe, str]:
    if train.split.reader.drawn:
        return recipe.change(num_workers=0), "0, because drawn images are in memory"
    workers = choose_workers(device, where.devices)
    why = "one per core" if workers == cpu_cores() else f"of {cpu_cores()} cores"
    return recipe.change(num_workers=workers), f"{workers}, {why}"


def _choose_parts(
    recipe: Recipe, model: AnyModel, measured: Measured, free: int
) -> tuple[Recipe, str]:
    batch, given = recipe.batch_size, recipe.accumulate_grad_batches
    whole = readable_bytes(measured.fixed + batch * measured.stored)
    needed = choose_parts(batch, measured.stored, measured.fixed, free)
    if given is not None:
        said = f"{batch} images in {given} parts of {batch // given}, as set"
        return recipe, f"{said}; {needed} parts would fit the memory" if needed > given else said
    if needed == 1:
        return recipe.change(accumulate_grad_batches=1), f"{batch} images at once, {whole}"
    why = f"because {whole} for all at once are more than {MEMORY_SHARE:.0%} of the free memory"
    if recipe.cuda_graphs or _normalizes_batches(model):
        what = "CUDA graphs need it" if recipe.cuda_graphs else "its norms are of whole batches"
        said = f"{batch} images at once, as {what}; they may not fit, {why}"
        return recipe.change(accumulate_grad_batches=1), said
    said = f"{batch} images in {needed} parts of {batch // needed}, {why}"
    # Images are mixed with others of their part.
    said += "" if recipe.mixup else "; the result is the same"
    return recipe.change(accumulate_grad_batches=needed), said


def _normalizes_batches(model: nn.Module) -> bool:
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return any(p.requires_grad for norm in norms for p in norm.parameters())


def _memory(recipe: Recipe, measured: Measured, device: torch.device) -> int:
    """Bytes at the run's peak: training, or drawing contributions, on top of what there is."""
    training = recipe.batch_size // (recipe.accumulate_grad_batches or 1) * measured.stored
    drawing = SHOWN_IMAGES * measured.explained if recipe.explain_every else 0
    peak = measured.fixed + max(training, drawing)
    return peak + used_memory() if device.type == "cpu" else peak


def _seconds(plan: Plan, recipe: Recipe, measured: Measured, cores: int | None) -> float:
    """Seconds of the whole run; ``cores`` is None where a GPU computes beside the loading."""

    def both(computing: float, reading: float) -> float:
        workers = recipe.num_workers or 0
        if cores is None:
            return max(computing, reading / workers) if workers else computing + reading
        # Computing uses all cores already.
        return computing + reading / max(1, min(workers, cores))

    epoch = plan.train_images * measured.step + plan.val_images * measured.predict
    if recipe.cache_views:
        views = plan.train_images * recipe.cache_views + plan.val_images
        return views * both(measured.features, measured.read) + recipe.epochs * epoch
    images = plan.train_images + plan.val_images
    reading = 0.0 if recipe.images_on_device else measured.read
    return recipe.epochs * both(epoch, images * reading)


def _advice(plan: Plan, recipe: Recipe, measured: Measured, part: FrozenPart | None) -> str:
    """Recommends a cache that would save much, where the recipe has none."""
    if part is None or recipe.cache_views or recipe.epochs <= VIEWS or recipe.images_on_device:
        return ""
    saved = (recipe.epochs - VIEWS) * plan.train_images * (measured.features + measured.read)
    saved += (recipe.epochs - 1) * plan.val_images * (measured.features + measured.read)
    if saved < WORTH * _seconds(plan, recipe, measured, cpu_cores()):
        return ""
    size = readable_bytes(_layouts(plan, part, VIEWS))
    return (
        f"; --set cache_views={VIEWS} would save about {duration(saved)} with {size} on disk, but "
        f"repeats augmentations after {VIEWS} epochs"
    )


def _measure(
    recipe: Recipe,
    model: AnyModel,
    part: FrozenPart | None,
    train: "ImageDataset",
    device: torch.device,
) -> Measured:
    """Times a few steps of a copy of the model, and counts what they store."""
    requests = [SampleRequest(0, index, 1.0) for index in range(min(IMAGES, len(train)))]
    read = _timed(lambda: train[requests]) / len(requests)
    images = train[requests]
    plain = recipe.change(compile=False, cuda_graphs=False)
    inputs: Tensor = images.inputs.to(device)
    features = 0.0
    with torch.random.fork_rng():
        if part is not None:
            frozen, compute = prepared_view(copy.deepcopy(part.module).to(device)), part.features
            with torch.inference_mode():
                features = _timed(lambda: compute(frozen, inputs), device) / len(inputs)
                if recipe.cache_views:
                    inputs = compute(frozen, inputs).float().clone()
            del frozen
            inputs = inputs.clone()
        network = copy.deepcopy(model).to(device).train()
        task = Task(network, plain, 1, inputs="features" if recipe.cache_views else "images")
        task.loss.setup(network, device)
        task.loss.before_step(network, 0.0)
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
        cast = nullcontext() if precision is None else torch.autocast(device.type, precision)

        def losses(count: int) -> Tensor:
            rows = torch.arange(count) % len(requests)
            batch = Batch(
                inputs[rows], images.labels[rows].to(device), torch.ones(count).to(device)
            )
            batch = task.loss.prepare(batch)
            with cast:
                return task.loss(task(batch.inputs), batch).sum()

        def step(count: int) -> None:
            losses(count).backward()
            network.zero_grad()

        one, two = (stored_bytes(lambda n=n: losses(n)) for n in (2, 3))  # type: ignore[misc]
        seconds = _timed(lambda: step(2), device) / 2
        largest = recipe.batch_size // (recipe.accumulate_grad_batches or 1)
        count = max(2, min(largest, int(SECONDS / max(seconds, 1e-9))))
        if count > 2:
            seconds = _timed(lambda: step(count), device) / count
        network.eval()
        with torch.no_grad():
            predict = _timed(lambda: losses(count), device) / count
        explained = 0
        if recipe.explain_every and model.config.family == "bcos":
            picture = images.inputs[:1].to(device).requires_grad_()
            explained = stored_bytes(lambda: frozen_view(network)(picture))
    return Measured(
        step=seconds,
        predict=predict,
        read=read,
        features=features,
        # The gradients of a few tensors come on top.
        stored=3 * max(two - one, 1) // 2,
        explained=explained,
        fixed=_fixed_bytes(recipe, task, on_gpu=device.type != "cpu"),
    )


def _fixed_bytes(recipe: Recipe, task: Task, *, on_gpu: bool) -> int:
    """Gradients, two moments of Adam and an average; on a GPU also the weights, and a teacher's."""
    trained = sum(p.nbytes for p in task.model.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in task.model.state_dict().values())
    total = 3 * trained + (weights if recipe.ema is not None else 0)
    if on_gpu:
        teachers = (each for each in vars(task.loss).values() if isinstance(each, nn.Module))
        total += weights + sum(p.nbytes for each in teachers for p in each.state_dict().values())
    return total


def _timed(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of the fastest of a few runs, fewer where they are slow, after one that does not
    count because it prepares what the others use."""
    run()
    taken: list[float] = []
    while len(taken) < STEPS and sum(taken) < SECONDS:
        start = time.perf_counter()
        run()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    # Other work on the machine can only make it slower.
    return min(taken)

"""A run on cached features: builds what is missing of the cache, with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bcosvit.data.splits import Split
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.train.cache import FeatureCache, SplitViews, bytes_needed
from bcosvit.train.data import Features
from bcosvit.train.machines import Machines
from bcosvit.train.record import Plan


def check_cache(plan: Plan) -> None:
    """Refuses, before anything is written, a cache that the model cannot use."""
    if plan.recipe.cache_views and getattr(plan.model, "train_backbone", True):
        raise ValueError(
            f"cache_views = {plan.recipe.cache_views} is not allowed: the backbone is trained, so "
            f"its features change with every step; leave it out, or set train_backbone=False."
        )


def cached_features(
    plan: Plan, model: AnyModel, splits: tuple[Split, Split], folder: Path, machines: Machines
) -> tuple[Features, Features]:
    """Training and validation features; the first process computes, others wait and then read."""
    assert isinstance(model, VisionTransformer)
    recipe = plan.recipe
    place = Path(recipe.cache_folder) if recipe.cache_folder else folder / "features"
    on_gpu = machines.accelerator != "cpu" and torch.cuda.is_available()
    # Validation first: what is left of the bound is training's.
    left = int(recipe.cache_gigabytes * 1e9)
    found = {}
    for name, split, views in (
        ("val", splits[1], 1),
        ("train", splits[0], recipe.cache_views),
    ):
        with _progress(f"features for {name}") as progress:
            found[name] = FeatureCache.build(
                model,
                SplitViews(split=split, data=plan.fingerprint, seed=recipe.seed),
                views=views,
                folder=place / name,
                max_bytes=left,
                workers=recipe.workers,
                device="cuda" if on_gpu else "cpu",
                progress=progress,
            )
        left -= bytes_needed(model.config, len(split), views)
    return Features(found["train"], recipe.seed), Features(found["val"], recipe.seed)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

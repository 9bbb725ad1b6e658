"""A run on cached features: builds what is missing of the cache, with a progress bar."""

from collections.abc import Callable
from pathlib import Path

import torch

from bcosvit.data.dataset import Split
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.train.cache import FeatureCache, SplitViews, bytes_needed
from bcosvit.train.data import Features, Samples
from bcosvit.train.progress import counter
from bcosvit.train.record import Plan
from bcosvit.train.resident import Resident, keeps_on_device


def check_cache(plan: Plan) -> None:
    """Refuses, before anything is written, a cache that the model cannot use."""
    if plan.recipe.cache_views and getattr(plan.model, "train_backbone", True):
        raise ValueError(
            f"cache_views = {plan.recipe.cache_views} is not allowed: the backbone is trained, so "
            f"its features change with every step; leave it out, or set train_backbone=False."
        )


def cached_features(
    plan: Plan,
    model: AnyModel,
    splits: tuple[Split, Split],
    folder: Path,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[Samples, Samples]:
    """Training and validation features for a process that trains on ``device``.

    The first process computes, others wait and then read. Each keeps all of them on its device, or
    leaves all on disk; which of the two, ``say`` is told where it is not what one would hope for.
    """
    assert isinstance(model, VisionTransformer)
    recipe = plan.recipe
    place = Path(recipe.cache_folder) if recipe.cache_folder else folder / "features"
    # Validation first: what is left of the bound is training's.
    left = int(recipe.cache_gigabytes * 1e9)
    on_gpu = device.type == "cuda"
    wanted = (("val", splits[1], 1), ("train", splits[0], recipe.cache_views))
    needed = sum(bytes_needed(model.config, len(split), views) for _, split, views in wanted)
    # Before hours are spent on features that would then not fit.
    resident = keeps_on_device(recipe.cache_on_device, needed, device, say)
    found: dict[str, Samples] = {}
    for name, split, views in wanted:
        with counter(f"features for {name}") as progress:
            cache = FeatureCache.build(
                model,
                SplitViews(split=split, data=plan.fingerprint, seed=recipe.seed),
                views=views,
                folder=place / name,
                max_bytes=left,
                workers=recipe.workers,
                # A GPU needs more to be busy.
                batch_size=128 if on_gpu else 32,
                device="cuda" if on_gpu else "cpu",
                progress=progress,
            )
        left -= bytes_needed(model.config, len(split), views)
        if resident:
            with counter(f"features for {name} to {device}") as progress:
                found[name] = Resident(cache, recipe.seed, device, progress)
        else:
            found[name] = Features(cache, recipe.seed)
    return found["train"], found["val"]

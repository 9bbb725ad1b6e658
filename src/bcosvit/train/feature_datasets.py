"""Training from a feature cache: batches of features read from disk, or kept in device memory."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset

from bcosvit.data.dataset import Split
from bcosvit.machine import choose_batch_size
from bcosvit.models.base import AnyModel
from bcosvit.train.callbacks import progress_bar
from bcosvit.train.data import Batch, BatchDataset, SampleRequest
from bcosvit.train.devices import memory_shortage, send
from bcosvit.train.feature_cache import FeatureCache, Progress, SplitViews, frozen_part, view_of
from bcosvit.train.feature_files import Layout
from bcosvit.train.plan import Plan
from bcosvit.train.recipe import Recipe

DEFAULT_SHARE, DEMANDED_SHARE = 0.6, 0.9
"""Largest shares of a device's free memory that features take by default, and with
``cache_on_device=True``; the model needs memory, too."""
CHUNK = 2**26
"""Bytes that are copied to a device at a time."""


class FeatureDataset(Dataset[Batch]):
    """Batches from a cache on disk, one view per image and epoch."""

    on_device = False

    def __init__(self, cache: FeatureCache, seed: int) -> None:
        self.cache, self.seed = cache, seed

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, requests: list[SampleRequest]) -> Batch:
        samples = [self.cache[request.position, self._view(request)] for request in requests]
        features, labels = [sample[0] for sample in samples], [sample[1] for sample in samples]
        return Batch.of(features, labels, requests)

    def _view(self, request: SampleRequest) -> int:
        views = self.cache.views
        return view_of(request.position, epoch=request.epoch, views=views, seed=self.seed)


class DeviceFeatureDataset(Dataset[Batch]):
    """Batches from a copy of a complete cache in device memory, equal to those of `FeatureDataset`.

    Features are converted to float32 when their batch is made, so that memory holds what the disk
    does, and a step only transfers a few indices.
    """

    on_device = True

    def __init__(
        self,
        cache: FeatureCache,
        seed: int,
        device: torch.device | str,
        progress: Progress | None = None,
    ) -> None:
        self.images, self.views, self.device = len(cache), cache.views, torch.device(device)
        records = self.images * self.views
        self.features = torch.empty(records, *cache.shape, dtype=torch.float16, device=device)
        ones = [1] * len(cache.shape)
        self.scales = torch.empty(records, *ones, device=device)
        self.labels = torch.empty(records, dtype=torch.long, device=device)
        step = max(1, CHUNK // self.features[0].nbytes)
        for start in range(0, records, step):
            stop = min(start + step, records)
            features, scales, labels = cache.stored(start, stop)
            self.features[start:stop] = features.to(device)
            self.scales[start:stop] = scales.to(device).view(-1, *ones)
            self.labels[start:stop] = labels.to(device)
            if progress is not None:
                progress(stop, records)
        # Every epoch uses the next view of each image, so that one hash per image is enough.
        first = [view_of(i, epoch=0, views=self.views, seed=seed) for i in range(self.images)]
        self._first_views = torch.tensor(first)

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, requests: list[SampleRequest]) -> Batch:
        positions = torch.tensor([request.position for request in requests])
        epochs = torch.tensor([request.epoch for request in requests])
        views = (self._first_views[positions] + epochs) % self.views
        records = send(positions * self.views + views, self.device)
        return Batch(
            # The product is in float32: no float32 copy of the features is needed before.
            self.features.index_select(0, records) * self.scales.index_select(0, records),
            self.labels.index_select(0, records),
            send(torch.tensor([request.weight for request in requests]), self.device),
        )


def check_cache(plan: Plan) -> None:
    """Raises ``ValueError`` where the plan asks for a cache that its model cannot use."""
    frozen = plan.recipe.head_only or not getattr(plan.model, "train_backbone", True)
    if plan.recipe.cache_views and not frozen:
        raise ValueError(
            f"cache_views = {plan.recipe.cache_views} is not allowed: the backbone is trained, so "
            f"that its features change with every step; leave it out, or set train_backbone=False."
        )


def cache_place(recipe: Recipe, folder: Path) -> Path:
    """Returns the folder of a run's cache."""
    return Path(recipe.cache_folder) if recipe.cache_folder else folder / "features"


def feature_datasets(
    plan: Plan,
    model: AnyModel,
    splits: tuple[Split, Split],
    folder: Path,
    device: torch.device,
    log: Callable[[str], None],
) -> tuple[BatchDataset, BatchDataset]:
    """Builds what is missing of the cache, and returns training and validation batches.

    The first process computes; the others wait and then read. Each process copies all features to
    its device or none; ``log`` gets a message where they would not fit.
    """
    recipe = plan.recipe
    shape = frozen_part(model, head_only=recipe.head_only).shape
    place = cache_place(recipe, folder)
    # Validation first: the rest of the allowed bytes is for training.
    left = int(recipe.cache_gigabytes * 1e9)
    where = torch.device("cuda" if device.type == "cuda" else "cpu")
    wanted = (("val", splits[1], 1), ("train", splits[0], recipe.cache_views or 0))
    layouts = {n: Layout(images=len(split), views=v, shape=shape) for n, split, v in wanted}
    needed = sum(layout.bytes for layout in layouts.values())
    # Decided before hours are spent on features that would then not fit.
    on_device = fits_on_device(recipe.cache_on_device, needed, device, log)
    found: dict[str, BatchDataset] = {}
    for name, split, views in wanted:
        with progress_bar(f"{name} features") as progress:
            cache = FeatureCache.build(
                model,
                SplitViews(split=split, data=plan.fingerprint, seed=recipe.seed),
                views=views,
                folder=place / name,
                max_bytes=left,
                head_only=recipe.head_only,
                num_workers=recipe.num_workers or 0,
                batch_size=choose_batch_size(where, model.config.image_size),
                device=where,
                progress=progress,
            )
        left -= layouts[name].bytes
        if on_device:
            with progress_bar(f"{name} features to {device}") as progress:
                found[name] = DeviceFeatureDataset(cache, recipe.seed, device, progress)
        else:
            found[name] = FeatureDataset(cache, recipe.seed)
    return found["train"], found["val"]


def fits_on_device(
    wanted: bool | None, needed: int, device: torch.device, log: Callable[[str], None]
) -> bool:
    """Decides whether ``needed`` bytes of features are copied to the device; ``wanted`` is the
    recipe's ``cache_on_device``.

    ``log`` gets a message where features are left on disk because they do not fit.

    Raises:
        ValueError: It was asked for, but the features do not fit.
    """
    if wanted is False or (wanted is None and device.type != "cuda"):
        return False
    share = DEMANDED_SHARE if wanted else DEFAULT_SHARE
    shortage = memory_shortage("features", needed, share, device)
    if shortage is None:
        return True
    if wanted:
        raise ValueError(
            f"cache_on_device = True is not possible on {device}: {shortage}; set fewer "
            f"cache_views, or leave it out."
        )
    log(f"Workers read the features from disk, because on {device} {shortage}.")
    return False

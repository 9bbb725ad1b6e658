"""Features of a frozen part of a model, computed once and then read from disk or device memory.

A frozen backbone returns the same features for the same view of an image in every epoch.
`FeatureCache.build` therefore passes k augmented views of each image through it once and stores the
features; training then calls `model.from_features` and runs at the speed of the transformer alone.
In return there is less variety: the augmentations of an image repeat every k epochs. Where the
head alone is trained, the frozen part is all of the model up to the head, and training calls
`model.from_head_inputs`.

A cache is a folder with three files, and a fourth to lock:

* ``cache.features``: records of one size, so that any view is found by arithmetic and read through
  a memory map. A record holds a label, a scale, and features in float16, multiplied by a power of
  two that puts the largest value of the record between 2¹⁴ and 2¹⁵. So nothing overflows, all 11
  bits are kept for 29 binary orders of magnitude below the largest value, and 10 more fade out,
  whether features are of order 10⁻⁹ or 10⁹ (a v1 backbone has no normalization layers). bfloat16
  would need no scale, but has 8 bits.
* ``cache.done``: one byte per record, written when the record itself is on disk. A record without
  this mark was never finished.
* ``cache.json``: the layout, and digests of everything that the features depend on.

Memory while building: one batch (its images, the backbone's activations, its features in float32
and float16), on a GPU also the features of the batch before, two more batches of images per worker,
and one byte per view. Memory while reading: the views that are requested.

The files are written by hand, since no format that we know of appends fixed-size records that are
known to be complete after a crash and are read through a memory map.
"""

import copy
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Split
from bcosvit.files import atomic
from bcosvit.models.base import AnyModel, Classifier
from bcosvit.models.config import ModelConfig, StemConfig
from bcosvit.models.registry import to_dict
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn import prepared_view
from bcosvit.train.callbacks import progress_bar
from bcosvit.train.data import Batch, BatchDataset, SampleRequest, derive_seed
from bcosvit.train.devices import memory_shortage, readable_bytes, send
from bcosvit.train.plan import Plan
from bcosvit.train.recipe import Recipe

FORMAT = 1
FEATURES, DONE, META, LOCK = "cache.features", "cache.done", "cache.json", "cache.lock"
META_BYTES = 4096
"""Reserved for ``cache.json``, which does not grow with the data."""
DEFAULT_SHARE, DEMANDED_SHARE = 0.6, 0.9
"""Largest shares of a device's free memory that features take by default, and with
``cache_on_device=True``; the model needs memory, too."""
CHUNK = 2**26
"""Bytes that are copied to a device at a time."""

Sample = tuple[Tensor, int, int]
"""Features [c, h, w] in float32, label, index."""
Progress = Callable[[int, int], None]
"""Takes how much is done, and how much there is to do."""


def bytes_needed(config: ModelConfig, images: int, views: int) -> int:
    """Returns the size on disk of a cache of a backbone's features of so many images and views."""
    return Layout(images=images, views=views, shape=_backbone_shape(config)).bytes


def view_of(index: int, *, epoch: int, views: int, seed: int = 0) -> int:
    """Returns the view of an image that an epoch uses: any ``views`` epochs in a row use each view
    once.

    Examples:
        >>> sorted(view_of(5, epoch=epoch, views=3) for epoch in range(3))
        [0, 1, 2]
    """
    return (derive_seed(seed, index) + epoch) % views


# ------------------------------------------------------------------------------- files of a cache


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What determines the size of all files; record ``index·views + view`` holds that view."""

    images: int
    views: int
    shape: tuple[int, ...]
    """Shape of the features of one view."""

    @property
    def records(self) -> int:
        return self.images * self.views

    @property
    def dtype(self) -> np.dtype[Any]:
        """A record, with the same bytes on every machine."""
        return np.dtype([("label", "<i8"), ("scale", "<f4"), ("features", "<f2", self.shape)])

    @property
    def record_bytes(self) -> int:
        """Bytes of a record and its mark."""
        return self.dtype.itemsize + 1

    @property
    def bytes(self) -> int:
        return META_BYTES + self.records * self.record_bytes


class CacheFolder:
    """An existing folder of records, complete or not; opens its files when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / META).is_file():
            raise ValueError(f"There is no feature cache in {folder}; build one with .build.")
        try:
            meta = json.loads((folder / META).read_text())
            if meta["format"] != FORMAT:
                raise ValueError(f"it has format {meta['format']}, not {FORMAT}")
            shape = tuple(meta["shape"])
            self.layout = Layout(images=meta["images"], views=meta["views"], shape=shape)
            self.made_of: dict[str, str] = meta["made_of"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / META} cannot be read ({error}); delete {folder} to build it again."
            ) from error
        self._map: np.memmap[Any, Any] | None = None

    @classmethod
    def create(cls, folder: Path, layout: Layout, made_of: Mapping[str, str]) -> "CacheFolder":
        """Opens the folder, creating it where there is none.

        Raises:
            ValueError: The folder holds a cache of something else.
        """
        if not (folder / META).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            # The description is written last: without it, the other files do not count.
            (folder / FEATURES).write_bytes(b"")
            (folder / DONE).write_bytes(bytes(layout.records))
            with atomic(folder / META) as temporary:
                temporary.write_text(json.dumps(_meta(layout, made_of), indent=1))
        found = cls(folder)
        old = {**_meta(found.layout, {}), **found.made_of}
        new = {**_meta(layout, {}), **made_of}
        differs = [name for name in new if old.get(name) != new[name]]
        if differs:
            raise ValueError(
                f"The feature cache in {folder} was built from something else (it differs in "
                f"{', '.join(differs)}); delete it, or give another folder."
            )
        return found

    def done(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns 1 for each finished record, and 0 for the others."""
        done = np.fromfile(self.folder / DONE, np.uint8)
        finished = int(np.flatnonzero(done)[-1]) + 1 if done.any() else 0
        features = self.folder / FEATURES
        size = features.stat().st_size if features.is_file() else 0
        if len(done) != self.layout.records or size < finished * self.layout.dtype.itemsize:
            raise ValueError(
                f"The feature cache in {self.folder} is damaged: its files are shorter than they "
                f"should be; delete it and build it again."
            )
        return done

    def read(self, index: int, view: int) -> tuple[Tensor, int]:
        """Returns the features of a view in float32, and its label."""
        record = self._records()[index * self.layout.views + view]
        features = torch.from_numpy(np.array(record["features"])).float()
        return features.mul_(float(record["scale"])), int(record["label"])

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a range of records as stored: features in float16, their scales, and labels."""
        rows = self._records()[start:stop]
        features, scales, labels = (
            torch.from_numpy(np.array(rows[name])) for name in ("features", "scale", "label")
        )
        return features, scales, labels

    def write(self, records: Sequence[int], labels: Sequence[int], features: Tensor) -> None:
        """Stores features [n, *shape], and marks them as done when they are on disk."""
        rows = np.empty(len(records), self.layout.dtype)
        rows["label"] = labels
        peaks = features.flatten(1).abs().amax(1).cpu().numpy()
        if not np.isfinite(peaks).all():
            index, view = divmod(records[int(np.isfinite(peaks).argmin())], self.layout.views)
            raise ValueError(
                f"The backbone's features of image {index}, view {view} are not finite; "
                f"check its weights."
            )
        # Below 2⁻¹⁰⁰ the scale itself would leave float32; such features count as zero.
        rows["scale"] = np.ldexp(np.float32(1), np.maximum(np.frexp(peaks)[1], -100) - 15)
        scale = torch.from_numpy(rows["scale"].copy()).to(features.device)
        scale = scale.view(-1, *[1] * len(self.layout.shape))
        rows["features"] = (features / scale).half().cpu().numpy()
        _write_rows(self.folder / FEATURES, rows, records)
        _write_rows(self.folder / DONE, np.ones(len(records), np.uint8), records)

    def _records(self) -> np.memmap[Any, Any]:
        if self._map is None:
            shape = (self.layout.records,)
            self._map = np.memmap(self.folder / FEATURES, self.layout.dtype, mode="r", shape=shape)
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would contain the whole file.
        return {**self.__dict__, "_map": None}


def check_space(folder: Path, layout: Layout, max_bytes: int) -> None:
    """Raises ``ValueError`` where the whole cache exceeds ``max_bytes`` or the free disk space."""
    if layout.bytes > max_bytes:
        fit = max(0, max_bytes - META_BYTES) // layout.record_bytes
        raise ValueError(
            f"A feature cache of {layout.images} images × {layout.views} views needs "
            f"{layout.bytes} bytes ({readable_bytes(layout.bytes)}), more than max_bytes = "
            f"{max_bytes} ({readable_bytes(max_bytes)}), which is enough for "
            f"{fit // layout.images} views of every image or {fit // layout.views} images; set "
            f"fewer views, or a larger max_bytes."
        )
    used = sum(path.stat().st_size for name in (FEATURES, DONE) if (path := folder / name).exists())
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if layout.bytes - used > free:
        raise ValueError(
            f"The feature cache needs {readable_bytes(layout.bytes - used)} more in {folder}, but "
            f"the disk has {readable_bytes(free)} left; make room, set fewer views, or give "
            f"another folder."
        )


def _meta(layout: Layout, made_of: Mapping[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "images": layout.images,
        "views": layout.views,
        "shape": list(layout.shape),
        "made_of": dict(made_of),
    }


def _write_rows(path: Path, rows: np.ndarray[Any, Any], records: Sequence[int]) -> None:
    """Writes rows at the places of their records, and waits until they are on disk."""
    raw = rows.view(np.uint8).reshape(len(rows), rows.itemsize)
    # Unbuffered, since a buffer that could not be written would be tried once more on closing.
    with path.open("r+b", buffering=0) as file:
        try:
            for row, record in zip(raw, records, strict=True):
                file.seek(record * rows.itemsize)
                left = row.data
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            message = "the disk is full; finished features are safe, so make room and run it again"
            raise OSError(errno.ENOSPC, message, str(path)) from error


# ------------------------------------------------------------------------------- building a cache


class ViewSource(Protocol):
    """Images of which any view can be requested, with the same result each time."""

    @property
    def identity(self) -> str:
        """Distinguishes these views from all others: data, labels, transform and seed."""

    def __len__(self) -> int: ...

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        """Returns the image, [3, H, W] in [0, 1], and its label."""


@dataclass(frozen=True, kw_only=True)
class SplitViews:
    """The images of a split under its transform: view v is what epoch v of the run would use."""

    split: Split
    """With a transform."""
    data: str
    """The fingerprint of the data."""
    seed: int
    """The seed of the run."""

    @property
    def identity(self) -> str:
        return f"{self.data}\n{self.split!r}\n{self.seed}"

    def __len__(self) -> int:
        return len(self.split)

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        # The label belongs to the image that was read: another one may replace an unreadable one.
        image, label, _ = self.split[index, derive_seed(self.seed, view, index)]
        if not isinstance(image, Tensor):
            raise ValueError("The split has no transform; set one with split.with_transform.")
        return image, label


class FeatureCache(Dataset[Sample]):
    """A complete cache: ``cache[index, view]``, or ``cache[index]`` where there is one view.

    It can be pickled and read by many processes; each opens the files for itself.

    Args:
        folder: The folder of the cache.

    Raises:
        ValueError: There is no cache in the folder, or it is not complete.
    """

    def __init__(self, folder: str | Path) -> None:
        self._files = CacheFolder(Path(folder))
        done, total = int(self._files.done().sum()), self._files.layout.records
        if done < total:
            raise ValueError(
                f"The feature cache in {folder} has only {done} of {total} views; "
                f"call .build with the same arguments to finish it."
            )

    @classmethod
    def build(
        cls,
        model: AnyModel,
        source: ViewSource,
        *,
        views: int,
        folder: str | Path,
        max_bytes: int,
        head_only: bool = False,
        batch_size: int = 32,
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> "FeatureCache":
        """Computes what is missing in ``folder``, and opens the cache.

        After a crash, a call with the same arguments continues where the first one ended; a
        complete cache is opened at once. Of several processes one computes, and the others wait.
        Neither the model nor any random state is changed.

        Args:
            model: A model with a frozen backbone, or any model with ``head_only``.
            source: The images.
            views: Views per image.
            folder: The folder of the cache.
            max_bytes: Largest size of the cache on disk.
            head_only: Whether the features are what the model's head takes.
            batch_size: Views per forward pass.
            num_workers: Processes that load images.
            device: Where the backbone runs.
            progress: Called with the number of finished views, and of all views.

        Raises:
            ValueError: The backbone is not frozen, the cache would exceed ``max_bytes`` or the free
                disk space, or the folder holds a cache of another backbone, data or number of
                views.
        """
        folder, images = Path(folder), len(source)
        for name, value in {"views": views, "batch_size": batch_size, "images": images}.items():
            if value < 1:
                raise ValueError(f"{name} = {value} is not allowed for a cache: give at least 1.")
        part = frozen_part(model, head_only=head_only)
        layout = Layout(images=images, views=views, shape=part.shape)
        check_space(folder, layout, max_bytes)
        dataset = _Views(source, views, model.config.image_size)
        made_of = _made_of(model, part, source, dataset)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):
            files = CacheFolder.create(folder, layout, made_of)
            if not files.done().all():
                _compute(files, part, dataset, batch_size, num_workers, device, progress)
        return cls(folder)

    @property
    def views(self) -> int:
        """Views per image."""
        return self._files.layout.views

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the features of one view."""
        return self._files.layout.shape

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns features in float16, scales and labels of records ``index·views + view``."""
        return self._files.stored(start, stop)

    def __len__(self) -> int:
        return self._files.layout.images

    def __getitem__(self, key: int | tuple[int, int]) -> Sample:
        if not isinstance(key, tuple) and self.views > 1:
            raise ValueError(
                f"The cache has {self.views} views of each image; use cache[index, view] "
                f"(view_of returns the view that an epoch uses)."
            )
        index, view = key if isinstance(key, tuple) else (key, 0)
        if not (0 <= index < len(self) and 0 <= view < self.views):
            raise IndexError(f"image {index}, view {view} of {len(self)} images × {self.views}")
        return *self._files.read(index, view), index


class _Views(Dataset[tuple[Tensor, int]]):
    """Views by the number of their record, of the size that the model takes."""

    def __init__(self, source: ViewSource, views: int, size: tuple[int, int]) -> None:
        self.source, self.views, self.size = source, views, size

    def __len__(self) -> int:
        return len(self.source) * self.views

    def __getitem__(self, record: int) -> tuple[Tensor, int]:
        index, view = divmod(record, self.views)
        image, label = self.source.sample(index, view)
        if image.shape != (3, *self.size):
            raise ValueError(
                f"View {view} of image {index} is {list(image.shape)}, but the model takes "
                f"{[3, *self.size]}; change the transform, or resize the model's prior."
            )
        return image, label


class _MissingBatches:
    """The records that are not done, in batches."""

    def __init__(self, done: np.ndarray[Any, Any], batch_size: int) -> None:
        self.done, self.batch_size = done, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Batches are cut at the same places whatever is done, since rounding makes features depend
        # on their batch: a resumed cache has the same bytes as one that was built in one go.
        for start in range(0, len(self.done), self.batch_size):
            missing = np.flatnonzero(self.done[start : start + self.batch_size] == 0)
            if len(missing):
                yield (start + missing).tolist()


@dataclass(frozen=True, kw_only=True)
class FrozenPart:
    """The part of a model that is computed once per view."""

    module: nn.Module
    """Contains the part."""
    features: Callable[[nn.Module, Tensor], Tensor]
    """What the part computes, from the module, or a view or copy of it, and images."""
    shape: tuple[int, ...]
    """Of the features of one view."""
    structure: list[Any]
    """What distinguishes the part from others, besides its weights."""
    state: dict[str, Tensor]
    """Its weights."""


def frozen_part(model: AnyModel, *, head_only: bool) -> FrozenPart:
    """Returns the part of a model whose features are cached.

    Args:
        model: The model.
        head_only: Whether the head alone is trained; else the part is a transformer's backbone.

    Raises:
        ValueError: The part is trained.
    """
    if head_only:
        return _up_to_the_head(model)
    assert isinstance(model, VisionTransformer)
    if model.tokenizer.trains_backbone:
        raise ValueError(
            "The backbone is trained, so that its features change with every step; "
            "set train_backbone=False, or train without a cache."
        )
    config = model.config
    structure: list[Any] = [config.family, config.tap, dataclasses.asdict(config.backbone)]
    if isinstance(config.backbone, StemConfig):
        structure += [config.b, config.maxout, config.eps]
    encoding, backbone = model.encoding, model.tokenizer.backbone
    return FrozenPart(
        module=nn.ModuleDict({"encoding": encoding, "backbone": backbone}),
        features=lambda part, images: part["backbone"](part["encoding"](images)),  # type: ignore[index]
        shape=_backbone_shape(config),
        structure=structure,
        state=backbone.state_dict(),
    )


def _up_to_the_head(model: AnyModel) -> FrozenPart:
    head = model.get_classifier()
    own = {f"{name}." for name, part in model.named_modules() if part is head}
    state = {k: t for k, t in model.state_dict().items() if not k.startswith(tuple(own))}

    def features(model: nn.Module, images: Tensor) -> Tensor:
        assert isinstance(model, Classifier)
        return model.head_inputs(model.encoding(images))

    first = next(model.parameters())
    image = torch.zeros(1, 3, *model.config.image_size).to(first)
    with torch.inference_mode():
        shape = features(prepared_view(model), image).shape[1:]
    return FrozenPart(
        module=model,
        features=features,
        shape=tuple(shape),
        structure=["head", to_dict(model.config)],
        state=state,
    )


def _compute(
    files: CacheFolder,
    part: FrozenPart,
    dataset: _Views,
    batch_size: int,
    num_workers: int,
    device: torch.device | str,
    progress: Progress | None,
) -> None:
    """Computes and writes the missing records; a GPU computes a batch while the one before it is
    written."""
    device = torch.device(device)
    # Unit weights are computed once, not per batch.
    module = prepared_view(copy.deepcopy(part.module).to(device))
    done = files.done()
    batches, finished = _MissingBatches(done, batch_size), int(done.sum())
    # A loader without a generator draws from torch's global one.
    loader = DataLoader(
        dataset, batch_sampler=batches, num_workers=num_workers, generator=torch.Generator()
    )

    def write(records: list[int], labels: Tensor, features: Tensor) -> None:
        nonlocal finished
        files.write(records, labels.tolist(), features)
        finished += len(records)
        if progress is not None:
            progress(finished, files.layout.records)

    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        for records, (images, labels) in zip(batches, loader, strict=True):
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                features = part.features(module, images.to(device)).float()
            if pending is not None:
                pending.result()
            if _overlaps(device):
                pending = pool.submit(write, records, labels, features)
            else:
                write(records, labels, features)
        if pending is not None:
            pending.result()


def _overlaps(device: torch.device) -> bool:
    # On a CPU, writing while computing would save no time, and hold a second batch in memory.
    return device.type != "cpu"


def _backbone_shape(config: ModelConfig) -> tuple[int, int, int]:
    # The grid of patches of one position is the grid of the features.
    return (config.feature_width, *dataclasses.replace(config, patch=1).grid)


def _made_of(
    model: AnyModel, part: FrozenPart, source: ViewSource, dataset: _Views
) -> dict[str, str]:
    """Returns digests of everything that features depend on, by their names in error messages."""
    # Some images are compared as well, in case the identity leaves something out.
    last = len(dataset) - 1
    probes = {n: dataset[n] for n in sorted({last * part // 7 for part in range(8)})}
    if not torch.equal(probes[last][0], dataset[last][0]):
        raise ValueError(
            "The same view of the same image differs from one call to the next; give a source "
            "whose views depend on nothing but (index, view), such as SplitViews."
        )
    labels = {n: label for n, (_, label) in probes.items()}
    return {
        "backbone": _digest(json.dumps(part.structure), part.state),
        "encoding": _digest(type(model.encoding).__name__, dict(model.encoding.named_buffers())),
        "image size": "×".join(map(str, model.config.image_size)),
        "data, transform or seed": _digest(source.identity, {}),
        "pictures": _digest(repr(labels), {str(n): image for n, (image, _) in probes.items()}),
    }


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors.items():
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ------------------------------------------------------------------------- training from a cache


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
    """Batches from a copy of the cache in device memory, equal to those of `FeatureDataset`.

    Features are converted to float32 when their batch is made, so that memory holds what the disk
    does, and a step only transfers a few indices.

    Args:
        cache: A complete cache.
        seed: The seed of the run.
        device: Where features are stored and batches are made.
        progress: Called with the number of views that have been copied, and of all views.
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
    on_gpu = device.type == "cuda"
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
                # A GPU needs large batches to be busy, the caches of a CPU small ones.
                batch_size=128 if on_gpu else 4,
                device="cuda" if on_gpu else "cpu",
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
    """Decides whether ``needed`` bytes of features are copied to the device.

    Args:
        wanted: The recipe's ``cache_on_device``.
        needed: Bytes of all features.
        device: The training device.
        log: Gets a message where features are left on disk because they do not fit.

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

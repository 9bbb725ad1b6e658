"""Features of a frozen backbone, computed once and read from disk ever after.

A backbone that does not learn gives the same features for the same view of a picture in every
epoch. So `FeatureCache.build` pushes k augmented views of each picture through it once and keeps
them (how, `store` says); training then calls `model.from_features` and goes at the transformer's
own speed. What it costs is variety: a picture's augmentations repeat every k epochs.

Disk: `bytes_needed`. Memory while building: one batch (its pictures, the backbone's activations,
its features in float32 twice and in float16 twice), on a GPU the features of the batch before,
two more batches of pictures per worker, and a byte per view; while reading: the views asked for.
All else is the operating system's page cache, which it takes back at will.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Split
from bcosvit.models.config import ModelConfig, StemConfig
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn import prepared_view
from bcosvit.train.seeds import mix
from bcosvit.train.store import Layout, Store, check_room, only_writer

__all__ = ["FeatureCache", "SplitViews", "ViewSource", "bytes_needed", "view_of"]

Sample = tuple[Tensor, int, int]
"""Features [c, h, w] in float32, label, index."""


class ViewSource(Protocol):
    """Pictures of which any view can be asked for, and is the same each time."""

    @property
    def identity(self) -> str:
        """Tells these views from any others: data, labels, transform and seed."""

    def __len__(self) -> int: ...

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        """The picture, [3, H, W] in [0, 1], and its label."""


@dataclass(frozen=True, kw_only=True)
class SplitViews:
    """A split's pictures under its transform: view v is what epoch v of the run would see."""

    split: Split
    """With a transform."""
    data: str
    """Tells the pictures and labels from others: the source's fingerprint."""
    seed: int
    """The run's."""

    @property
    def identity(self) -> str:
        return f"{self.data}\n{self.split!r}\n{self.seed}"

    def __len__(self) -> int:
        return len(self.split)

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        # The label of what was read: another picture may stand in for a broken one.
        image, label, _ = self.split[index, mix(self.seed, view, index)]
        if not isinstance(image, Tensor):
            raise ValueError("The split has no transform; set one with split.with_transform.")
        return image, label


def bytes_needed(config: ModelConfig, images: int, views: int) -> int:
    """Bytes on disk of a cache of so many images and views, all its files together."""
    return _layout(config, images, views).bytes


def view_of(index: int, *, epoch: int, views: int, seed: int = 0) -> int:
    """Which view of an image an epoch sees: any ``views`` epochs in a row see each once."""
    return (mix(seed, index) + epoch) % views


class FeatureCache(Dataset[Sample]):
    """A finished cache: ``cache[index, view]``, or ``cache[index]`` where there is one view.

    It may be pickled and read by many processes; each opens the files for itself.
    """

    def __init__(self, folder: str | Path) -> None:
        self._store = Store(Path(folder))
        done, total = int(self._store.done().sum()), self._store.layout.records
        if done < total:
            raise ValueError(
                f"The feature cache in {folder} has only {done} of {total} views; "
                f"run .build with the same arguments to finish it."
            )

    @classmethod
    def build(
        cls,
        model: VisionTransformer,
        source: ViewSource,
        *,
        views: int,
        folder: str | Path,
        max_bytes: int,
        batch_size: int = 32,
        workers: int = 0,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> "FeatureCache":
        """Computes what is not in ``folder`` yet, and opens it.

        Killed, and called again with the same arguments, it goes on where it stopped; a finished
        cache is opened at once. One of another backbone, data or number of views is refused, as is
        one that would exceed ``max_bytes`` or the free disk. Of several processes one computes and
        the others wait for it. ``progress`` is told how many views are done, of how many. Neither
        the model nor any random state is changed.
        """
        folder, images = Path(folder), len(source)
        for name, value in {"views": views, "batch_size": batch_size, "images": images}.items():
            if value < 1:
                raise ValueError(f"{name} = {value} is not allowed for a cache: give at least 1.")
        if model.tokenizer.trains_backbone:
            raise ValueError(
                "The backbone is trained, so its features change with every step; "
                "set train_backbone=False, or train without a cache."
            )
        layout = _layout(model.config, images, views)
        check_room(folder, layout, max_bytes)
        pictures = _Pictures(source, views, model.config.image_size)
        made_of = _made_of(model, source, pictures)
        with only_writer(folder):
            store = Store.at(folder, layout, made_of)
            done = store.done()
            if done.all():
                return cls(folder)
            batches = _Batches(done, batch_size)
            # A generator of its own: a loader without one draws from the global generator.
            loader = DataLoader(
                pictures, batch_sampler=batches, num_workers=workers, generator=torch.Generator()
            )
            features_of = _Backbone(model, device)
            # A CPU has nothing better to do meanwhile, and is spared a second batch in memory.
            ahead = features_of.device.type != "cpu"
            with _Writer(store, int(done.sum()), progress, ahead=ahead) as writer:
                for batch, (inputs, labels) in zip(batches, loader, strict=True):
                    writer.write(batch, labels.tolist(), features_of(inputs))
        return cls(folder)

    @property
    def views(self) -> int:
        """Of each image."""
        return self._store.layout.views

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a view's features."""
        return self._store.layout.shape

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Float16 features, scales and labels of records; ``index·views + view`` is a view's."""
        return self._store.stored(start, stop)

    def __len__(self) -> int:
        return self._store.layout.images

    def __getitem__(self, key: int | tuple[int, int]) -> Sample:
        if not isinstance(key, tuple) and self.views > 1:
            raise ValueError(
                f"The cache has {self.views} views of each image; ask for cache[index, view] "
                f"(view_of says which view an epoch sees)."
            )
        index, view = key if isinstance(key, tuple) else (key, 0)
        if not (0 <= index < len(self) and 0 <= view < self.views):
            raise IndexError(f"image {index}, view {view} of {len(self)} images × {self.views}")
        return *self._store.read(index, view), index


class _Pictures(Dataset[tuple[Tensor, int]]):
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


class _Backbone:
    """A copy of the model's first half on the device, in full precision."""

    def __init__(self, model: VisionTransformer, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.encoding = copy.deepcopy(model.encoding).to(self.device)
        # Unit weights are made once, not per batch.
        self.backbone = prepared_view(copy.deepcopy(model.tokenizer.backbone).to(self.device))

    def __call__(self, images: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            return self.backbone(self.encoding(images.to(self.device))).float()


class _Writer:
    """Writes batches in order and, with ``ahead``, each while the next one is computed."""

    def __init__(
        self,
        store: Store,
        finished: int,
        progress: Callable[[int, int], None] | None,
        *,
        ahead: bool,
    ) -> None:
        self.store, self.finished, self.progress = store, finished, progress
        self.pool = ThreadPoolExecutor(1) if ahead else None
        self.pending: tuple[Future[None], int] | None = None

    def write(self, records: list[int], labels: list[int], features: Tensor) -> None:
        if self.pool is None:
            self.store.write(records, labels, features)
            self._tell(len(records))
        else:
            self._wait()
            writing = self.pool.submit(self.store.write, records, labels, features)
            self.pending = writing, len(records)

    def _wait(self) -> None:
        """Until nothing is being written; what went wrong with it is raised here."""
        if self.pending is None:
            return
        (writing, number), self.pending = self.pending, None
        writing.result()
        self._tell(number)

    def _tell(self, number: int) -> None:
        self.finished += number
        if self.progress is not None:
            self.progress(self.finished, self.store.layout.records)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            if self.pool is not None:
                self.pool.shutdown()


class _Batches:
    """The records that are not done, in batches, made as they are asked for."""

    def __init__(self, done: np.ndarray[Any, Any], batch_size: int) -> None:
        self.done, self.batch_size = done, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Cut at the same places whatever is done, since by a rounding error features depend on the
        # batch they are computed in: a resumed cache has the bytes of one made in one go.
        for start in range(0, len(self.done), self.batch_size):
            pending = np.flatnonzero(self.done[start : start + self.batch_size] == 0)
            if len(pending):
                yield (start + pending).tolist()


def _layout(config: ModelConfig, images: int, views: int) -> Layout:
    backbone = config.backbone
    channels = (
        backbone.widths[-1] if isinstance(backbone, StemConfig) else backbone.width_at(config.tap)
    )
    # Patches of one position are the features themselves.
    grid = dataclasses.replace(config, patch=1).grid
    return Layout(images=images, views=views, shape=(channels, *grid))


def _made_of(model: VisionTransformer, source: ViewSource, pictures: _Pictures) -> dict[str, str]:
    """Digests of all that features depend on, by what to call it in an error."""
    config = model.config
    structure: list[Any] = [config.family, config.tap, dataclasses.asdict(config.backbone)]
    if isinstance(config.backbone, StemConfig):
        structure += [config.b, config.maxout, config.eps]
    # What the identity forgot to mention shows in the pictures.
    last = len(pictures) - 1
    probes = {n: pictures[n] for n in sorted({last * part // 7 for part in range(8)})}
    if not torch.equal(probes[last][0], pictures[last][0]):
        raise ValueError(
            "The same view of the same image is another picture each time; give a source whose "
            "views depend on nothing but (index, view), such as SplitViews."
        )
    labels = {n: label for n, (_, label) in probes.items()}
    return {
        "backbone": _digest(json.dumps(structure), model.tokenizer.backbone.state_dict()),
        "encoding": _digest(type(model.encoding).__name__, dict(model.encoding.named_buffers())),
        "image size": "×".join(map(str, config.image_size)),
        "data, transform or seed": _digest(source.identity, {}),
        "pictures": _digest(repr(labels), {str(n): image for n, (image, _) in probes.items()}),
    }


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors.items():
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Features of a frozen part of a model, computed once and then read from disk or device memory.

A frozen backbone returns the same features for the same view of an image in every epoch.
`FeatureCache.build` therefore passes k augmented views of each image through it once and stores the
features (`feature_files`); training then calls `model.from_features` and runs at the speed of the
transformer alone (`feature_datasets`). In return there is less variety: the augmentations of an
image repeat every k epochs. Where the head alone is trained, the frozen part is all of the model up
to the head, and training calls `model.from_head_inputs`.

Memory while building: one batch (its images, the backbone's activations, its features in float32
and float16), on a GPU also the features of the batch before, two more batches of images per worker,
and one byte per view. Memory while reading: the views that are requested.
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
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bcosvit.data.dataset import Split
from bcosvit.models.base import AnyModel, Classifier
from bcosvit.models.config import ModelConfig, StemConfig
from bcosvit.models.registry import to_dict
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn import prepared_view
from bcosvit.train.data import derive_seed
from bcosvit.train.feature_files import (
    LOCK,
    CacheFolder,
    Layout,
    check_space,
)

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


class FeatureCache:
    """A complete cache: ``cache[index, view]`` are the features of a view, and its label.

    It can be pickled and read by many processes; each opens the files for itself.

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

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Returns the features of a view in float32, and its label."""
        index, view = key
        if not (0 <= index < len(self) and 0 <= view < self.views):
            raise IndexError(f"image {index}, view {view} of {len(self)} images × {self.views}")
        return self._files.read(index, view)


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
    """Returns the part of a model whose features are cached: all up to the head where the head
    alone is trained, else a transformer's backbone.

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

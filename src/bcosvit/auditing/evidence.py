"""The evidence store: what every picture's prediction is made of, on a grid of cells.

One pass over the data gives, for every picture, the prediction, the exact contributions to its
labeled class and to the class that was predicted, summed over the cells of a grid, the residual,
and a descriptor of each strong cell. Contributions are exact, so they can be added up over a whole
data set: cells, residual and bias sum to the logit of each picture, and their means to the mean
logit of a class.

The data are cut into chunks of consecutive pictures, one file each, that appear when they are
complete. Processes take every n-th chunk; a run that was interrupted computes the chunks that are
missing. What is in a chunk depends neither on the number of processes nor on interruptions.

Letters for shapes: N pictures, G rows and columns of the grid, M strong cells, D numbers of a
descriptor.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from bcosvit.attribution.inherent import bcos_model, new_probe
from bcosvit.files import atomic, make_folder
from bcosvit.machine import choose_batch_size, keep_freed_memory
from bcosvit.metrics.loader import Batch, Images, Masks, Ranks, Reader
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.encoding import check_images
from bcosvit.nn.views import DynamicModule, frozen_view, unwrapped
from bcosvit.predictor import Predictor, log_odds

SETTINGS = "settings.json"
CHUNK = 256
"""Pictures in a file of the store."""
WIDTH = 48
"""Numbers that describe a cell in one layer; wider features are projected at random."""
VERSION = 2
"""Increased when the numbers change, so that stores of older versions are not continued."""

FOR_LABEL, MISLEADING = 0, 1
"""Roles of strong cells: they speak for the labeled class, or, where the model is wrong, more for
the predicted class than for the labeled one."""

Progress = Callable[[int, int, str], None]
"""Called with the pictures done, their total, and a name for the pass."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class EvidenceSettings:
    """What the numbers of a store depend on."""

    model: str
    """A hash of the model's weights and its config."""
    data: str
    """A hash of the pictures' keys and labels, in order."""
    masks: bool
    pictures: int
    grid: int
    strong: int
    """The strong cells that are described, per picture and role."""
    bias: float
    """The constant that is added to all logits."""
    classes: tuple[str, ...]
    batch_size: int
    chunk: int
    version: int = VERSION


def default_grid(model: AnyModel) -> int:
    """Returns the number of cells along a side: that of the token grid, where it suits.

    Example:
        >>> import bcosvit
        >>> default_grid(bcosvit.create_model("bcos_vit_ti_38", depth=1))
        14
    """
    size = model.config.image_size[0]
    tokens = getattr(model.config, "grid", None)
    cells = max(1, size // 32) if tokens is None else int(tokens[0])
    while cells > 16:
        cells //= 2
    if cells < 10 and size >= 112:
        cells *= 2
    return max(2, cells)


class Evidence:
    """The evidence of a whole data set, read from the folder of `collect_evidence`.

    Everything but the descriptors is in memory, about 5 KB per picture with 14 × 14 cells.
    Pictures whose key came before are left out.

    Args:
        folder: The folder that was written.

    Raises:
        ValueError: If the folder is no store, or chunks are missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.settings = read_settings(folder)
        count = -(-self.settings.pictures // self.settings.chunk)
        # As many as there are: settings of unknown origin may say any number.
        there = {path.name for path in self.folder.glob("evidence-*.safetensors")}
        self._files = [chunk_path(folder, number) for number in range(min(count, len(there) + 1))]
        found = sum(path.name in there for path in self._files)
        if found < count:
            raise ValueError(
                f"{folder} lacks {count - found} of {count} parts of the evidence; run the audit "
                f"again, which computes what is missing."
            )
        try:
            self._read_parts()
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"The evidence in {folder} is damaged ({error!r}); remove its "
                f"evidence-*.safetensors and run the audit again."
            ) from error

    def _read_parts(self) -> None:
        parts = [_read(path) for path in self._files]
        keys = [key for part in parts for key in json.loads(bytes(part.pop("keys")))]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        kept = np.array(sorted(first.values()), np.int64)
        cell = {k: columns.pop(k) for k in ("cell_picture", "cell_index", "cell_role", "cell_sum")}
        place = np.full(len(keys), -1, np.int64)
        place[kept] = np.arange(len(kept))
        self._rows = np.flatnonzero(place[cell["cell_picture"]] >= 0)
        self.keys: list[str] = [keys[at] for at in kept]
        self.repeated = len(keys) - len(kept)
        self.index: Array = kept
        """Positions in the data [N]."""
        self.label: Array = columns["label"][kept].astype(np.int64)
        self.predicted: Array = columns["predicted"][kept].astype(np.int64)
        self.logit: Array = columns["logit"][kept]
        """Of the labeled class and of the predicted one [N, 2]."""
        self.residual: Array = columns["residual"][kept]
        """[N, 2], as ``logit``."""
        self.log_odds: Array = columns["log_odds"][kept]
        """[N, 2], as ``logit``."""
        self.cells: Array = columns["cells"][kept]
        """Contributions to the labeled class and to the predicted one [N, 2, G, G]."""
        self.coverage: Array | None = columns["coverage"][kept] if self.settings.masks else None
        """The share of each cell that is on the object [N, G, G]; NaN without a mask."""
        self.on_object: Array | None = columns["on_object"][kept] if self.settings.masks else None
        """The share of positive evidence for the labeled class on the object, and the object's
        share of the picture [N, 2]; NaN without a mask."""
        self.cell_picture: Array = place[cell["cell_picture"][self._rows]]
        """Which picture each strong cell is in [M]."""
        self.cell_index: Array = cell["cell_index"][self._rows].astype(np.int64)
        self.cell_role: Array = cell["cell_role"][self._rows]
        self.cell_sum: Array = cell["cell_sum"][self._rows].astype(np.float64)
        """Contributions of the strong cells: to the label, or by how much they mislead [M]."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def correct(self) -> Array:
        """Whether each picture is classified as labeled [N]."""
        return self.label == self.predicted

    @property
    def confidence(self) -> Array:
        """The confidence in the labeled class and in the predicted one [N, 2]."""
        return 1 / (1 + np.exp(-self.log_odds))

    @cached_property
    def descriptors(self) -> Array:
        """What each strong cell looks like to the model [M, D]."""
        parts = []
        for path in self._files:
            with safe_open(path, framework="np") as file:
                parts.append(file.get_tensor("descriptors"))
        return np.concatenate(parts)[self._rows].astype(np.float32)

    def completeness(self) -> float:
        """Returns the largest |Σ cells + residual + bias − logit|, as a share of the logit."""
        found = self.cells.astype(np.float64).sum((2, 3)) + self.residual + self.settings.bias
        size = np.maximum(np.abs(self.logit), max(abs(self.settings.bias), 1e-30))
        return float((np.abs(found - self.logit) / size).max())


def collect_evidence(
    predictor: Predictor,
    pictures: Images,
    folder: str | Path,
    *,
    masks: Masks | None = None,
    grid: int | None = None,
    batch_size: int | None = None,
    num_workers: int = 0,
    processes: int = 1,
    shard: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> EvidenceSettings:
    """Computes the evidence of a data set, or what is missing of it.

    Args:
        predictor: The model.
        pictures: The data, e.g. from `labeled_images`.
        folder: Where the store is written.
        masks: A function from a position in the data to the object's mask [H, W] or None.
        grid: The cells along a side; `default_grid` by default.
        batch_size: How many pictures pass through the model at once; by default as many as in
            the evidence that the folder holds, or as suit the device.
        num_workers: How many processes read ahead.
        processes: How many processes compute.
        shard: Which part to compute, ``(number, count)``, where several machines share a folder.
            Inside ``torch.distributed`` each process takes its own.
        progress: A function that is called after each batch.

    Returns:
        The settings of the store.

    Raises:
        ValueError: If the model is no B-cos model, or the folder holds the evidence of another
            model or of other data.
    """
    model = bcos_model(predictor.model)
    cells = grid or default_grid(model)
    if not 2 <= cells <= 64:
        raise ValueError(f"grid = {cells} is not allowed: give an integer from 2 to 64.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} is not allowed: give an integer >= 1.")
    settings = EvidenceSettings(
        model=model_hash(model),
        data=_data_hash(pictures),
        masks=masks is not None,
        pictures=len(pictures),
        grid=cells,
        strong=min(24, max(6, cells * cells // 6)),
        bias=float(model.logit.bias),
        classes=predictor.class_names,
        batch_size=_default_batch_size(predictor, folder) if batch_size is None else batch_size,
        chunk=CHUNK,
    )
    ranks = Ranks.current() if shard is None else Ranks(*shard)
    make_folder(Path(folder))
    if ranks.rank == 0 or not Path(folder, SETTINGS).exists():
        _write_settings(folder, settings)
    check_settings(folder, settings)
    chunks = range(-(-settings.pictures // settings.chunk))
    mine = [n for n in ranks.share(chunks) if not chunk_path(folder, n).exists()]
    job = _Job(predictor, pictures, Path(folder), masks, settings, num_workers)
    if processes == 1 or len(mine) < 2:
        _compute(job, mine, progress)
    else:
        _in_processes(job, mine, min(processes, len(mine)), progress)
    return settings


@dataclass(frozen=True)
class _Job:
    """What a process needs to compute chunks."""

    predictor: Predictor
    pictures: Images
    folder: Path
    masks: Masks | None
    settings: EvidenceSettings
    num_workers: int


def _in_processes(
    job: _Job, chunks: Sequence[int], processes: int, progress: Progress | None
) -> None:
    """Computes chunks in new processes, which share nothing but the folder."""
    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()
    workers = [
        context.Process(target=_worker, args=(threads, job, chunks[number::processes]))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    done = 0
    while any(worker.is_alive() for worker in workers):
        for worker in workers:
            worker.join(0.2)
        done = sum(chunk_path(job.folder, number).exists() for number in chunks)
        if progress is not None:
            progress(done * job.settings.chunk, len(chunks) * job.settings.chunk, "evidence")
    if any(worker.exitcode for worker in workers):
        raise ValueError(
            "A process that collects evidence has failed; its message is above. Run the audit "
            "again, which continues, or with one process."
        )


def _worker(threads: int, job: _Job, chunks: Sequence[int]) -> None:
    # As many as in a single process, for the same roundings.
    torch.set_num_threads(threads)
    keep_freed_memory()
    _compute(job, chunks, None)


def _compute(job: _Job, chunks: Sequence[int], progress: Progress | None) -> None:
    settings, adjoint = job.settings, Adjoint(job.predictor.model)
    reader = Reader(data=job.pictures, masks=job.masks, num_workers=job.num_workers)
    spans = [
        range(settings.pictures)[number * settings.chunk : (number + 1) * settings.chunk]
        for number in chunks
    ]
    total, done = sum(map(len, spans)), 0
    # One reader for all chunks, so that what reads ahead is started once.
    batches = reader.read_batches(
        [
            span[start : start + settings.batch_size]
            for span in spans
            for start in range(0, len(span), settings.batch_size)
        ]
    )
    for number, span in zip(chunks, spans, strict=True):
        found = _Chunk(adjoint, settings, span.start)
        while len(found.keys) < len(span):
            batch = next(batches)
            found.add(batch)
            done += len(batch.keys)
            if progress is not None:
                progress(done, total, "evidence")
        with atomic(chunk_path(job.folder, number)) as temporary:
            save_file(found.columns(), temporary)


class _Chunk:
    """The evidence of some consecutive pictures."""

    def __init__(self, adjoint: "Adjoint", settings: EvidenceSettings, start: int) -> None:
        self.adjoint, self.settings, self.start = adjoint, settings, start
        self.keys: list[str] = []
        self._parts: list[dict[str, Array]] = []
        self._wrong: list[tuple[Tensor, ...]] = []
        """Where the model is wrong: places within the chunk, images, the predicted classes, cells
        for the labels, and descriptors."""

    def add(self, batch: Batch) -> None:
        """Explains the labels of a batch."""
        settings, model = self.settings, self.adjoint.model
        reference = next(model.parameters())
        classes = len(settings.classes)
        if len(beyond := ((batch.labels < 0) | (batch.labels >= classes)).nonzero()):
            first = int(beyond[0])
            raise ValueError(
                f"Picture {batch.keys[first]!r} has label {int(batch.labels[first])}, but the "
                f"model knows classes 0 to {classes - 1}; audit it on data with its own classes."
            )
        images, labels = batch.images.to(reference), batch.labels.to(reference.device)
        own = self.adjoint(images, labels)
        predicted = own.logits.argmax(1)
        both = torch.stack([labels, predicted], 1)
        colors = on_grid(own.channels, settings.grid)
        cells, described = colors.sum(1), _described(own.features, colors, settings.grid)
        odds = torch.stack([log_odds(model, own.logits, each) for each in (labels, predicted)], 1)
        rows, places, sums = _strongest(cells, settings.strong)
        found: dict[str, Array] = {
            "label": labels.int().cpu().numpy(),
            "predicted": predicted.int().cpu().numpy(),
            "logit": own.logits.gather(1, both).double().cpu().numpy(),
            "residual": own.residual.double()[:, None].expand(-1, 2).cpu().numpy(),
            "log_odds": odds.double().cpu().numpy(),
            "cells": cells.float()[:, None].expand(-1, 2, -1, -1).cpu().numpy(),
            **self._strong(rows + len(self.keys), places, sums, described[rows, places], FOR_LABEL),
        }
        if settings.masks:
            found |= _on_object(own.channels.sum(1), batch.masks, settings.grid)
        self._parts.append(found)
        wrong = (predicted != labels).nonzero().flatten()
        if len(wrong):
            each = (wrong + len(self.keys), images, predicted, cells, described)
            self._wrong.append((each[0], *(tensor[wrong] for tensor in each[1:])))
        self.keys += batch.keys

    def columns(self) -> dict[str, Array]:
        """Explains the predicted classes too, where they are others, and returns all columns."""
        parts = self._parts
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self._wrong:
            more = self._misleading(found)
            for name, column in more.items():
                found[name] = np.concatenate([found[name], column])
        found["keys"] = np.frombuffer(json.dumps(self.keys).encode("ascii"), np.uint8)
        return {name: np.ascontiguousarray(column) for name, column in found.items()}

    def _misleading(self, found: dict[str, Array]) -> dict[str, Array]:
        """Writes what speaks for predicted classes into columns; returns cells that mislead.

        Pictures that are wrong wait for the end of the chunk, so that they are explained in full
        batches again.
        """
        # What waits is let go of here.
        waiting = [torch.cat(several) for several in zip(*self._wrong, strict=True)]
        self._wrong = []
        rows = []
        for places, images, predicted, cells, described in zip(
            *(tensor.split(self.settings.batch_size) for tensor in waiting), strict=True
        ):
            other = self.adjoint(images, predicted)
            against = on_grid(other.channels, self.settings.grid).sum(1)
            at = places.cpu().numpy()
            found["cells"][at, 1] = against.float().cpu().numpy()
            found["residual"][at, 1] = other.residual.double().cpu().numpy()
            logits = other.logits.gather(1, predicted[:, None])[:, 0]
            found["logit"][at, 1] = logits.double().cpu().numpy()
            picture, place, sums = _strongest(against - cells, self.settings.strong)
            chosen = described[picture, place]
            rows.append(self._strong(places[picture], place, sums, chosen, MISLEADING))
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _strong(
        self, pictures: Tensor, places: Tensor, sums: Tensor, described: Tensor, role: int
    ) -> dict[str, Array]:
        """Columns of strong cells; pictures are counted within the chunk."""
        return {
            # Positions in the data.
            "cell_picture": (pictures.cpu().numpy() + self.start).astype(np.int32),
            "cell_index": places.short().cpu().numpy(),
            "cell_role": np.full(len(places), role, np.uint8),
            "cell_sum": sums.float().cpu().numpy(),
            "descriptors": described.half().cpu().numpy(),
        }


def _on_object(maps: Tensor, masks: Sequence[Tensor | None], grid: int) -> dict[str, Array]:
    unknown = torch.full(maps.shape[1:], torch.nan)
    inside = torch.stack([unknown if m is None else m.float() for m in masks]).to(maps.device)
    area = maps.shape[-1] * maps.shape[-2] / grid**2
    positive = maps.clamp_min(0).double()
    share = (positive * inside).sum((1, 2)) / positive.sum((1, 2)).clamp_min(1e-30)
    return {
        "coverage": (on_grid(inside, grid) / area).clamp_max(1).half().cpu().numpy(),
        "on_object": torch.stack([share, inside.double().mean((1, 2))], 1).float().cpu().numpy(),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Contributions:
    """What one adjoint pass finds for a batch."""

    logits: Tensor
    """[B, K]"""
    residual: Tensor
    """[B]"""
    features: list[Tensor]
    """What the model's layers say about places [B, C, h, w], local ones first."""
    channels: Tensor
    """Contributions to one class per picture, by channel of the encoded picture [B, 6, H, W]."""


class Adjoint:
    """Predicts and explains batches, each by one forward and one adjoint pass.

    Args:
        model: A B-cos model, which must not be changed any more.
    """

    def __init__(self, model: AnyModel) -> None:
        self.model = bcos_model(model)
        # Made once: on a GPU, copying all modules takes about as long as a small batch.
        with torch.inference_mode(False):
            self._view = frozen_view(self.model, with_parameter_grad=False).eval()
        self._grid = getattr(self.model.config, "grid", None)

    def __call__(self, images: Tensor, labels: Tensor) -> Contributions:
        """Explains one class per picture."""
        check_images(images)
        view = self._view
        with torch.inference_mode(False), torch.enable_grad():
            probe = new_probe(images)
            for module in view.modules():
                if isinstance(module, DynamicModule):
                    module.probe = probe
            with torch.no_grad():
                encoded = view.encoding.encode(images)
            features: list[Tensor] = []
            with _captured(view, features):
                logits = view.from_encoded(encoded.requires_grad_())
            if not features:
                with torch.no_grad():
                    features = [view.forward_features(images)]
            chosen = logits.gather(1, labels[:, None]).sum()
            weights, residual = torch.autograd.grad(chosen, (encoded, probe), allow_unused=True)
        return Contributions(
            logits=logits.detach(),
            residual=torch.zeros_like(probe) if residual is None else residual,
            features=[_as_map(each.detach(), self._grid) for each in features],
            channels=weights * encoded.detach(),
        )


@contextmanager
def _captured(view: AnyModel, found: list[Tensor]) -> Iterator[None]:
    """Keeps what the layers that describe places compute in the meantime."""

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(view, VisionTransformer):
            found.append(inputs[0].detach())
        found.append(output.detach())

    layer = _describing_layer(view)
    with ExitStack() as stack:
        if layer is not None:
            stack.callback(layer.register_forward_hook(keep).remove)
        yield


def _describing_layer(view: AnyModel) -> nn.Module | None:
    """The blocks of a transformer; else the last layer before the head that knows places."""
    if isinstance(view, VisionTransformer):
        return view.blocks
    network = getattr(view, "network", None)
    if network is not None:
        program = network.program
        named = [i[2] for i in program.instructions if i[0] == program.features and i[1] == "layer"]
        return network.get_submodule(named[0]) if named else None
    features = getattr(view, "features", None)
    return features if isinstance(features, nn.Module) else None


def _as_map(features: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Feature maps [B, C, h, w] from maps or tokens."""
    if features.ndim == 4:
        return features
    side = round(features.shape[1] ** 0.5)
    if grid is None or grid[0] * grid[1] != features.shape[1]:
        # Tokens of a converted transformer may begin with one for the class.
        features, grid = features[:, -(side * side) :], (side, side)
    return features.transpose(1, 2).unflatten(2, grid)


def _described(several: Sequence[Tensor], colors: Tensor, grid: int) -> Tensor:
    """Descriptors of all cells [B, G·G, D]: unit vectors of each layer's features [B, C, h, w], and
    of the colors, which are contributions by channel [B, 6, G, G]."""
    parts = []
    for number, features in enumerate(several):
        if features.shape[1] > WIDTH:
            matrix = _projection(number, features.shape[1]).to(features)
            features = F.normalize(torch.einsum("dc,bchw->bdhw", matrix, features), dim=1)
        smaller = min(features.shape[-2:]) < grid
        resized = (
            F.interpolate(features, (grid, grid), mode="bilinear", align_corners=False)
            if smaller
            else F.adaptive_avg_pool2d(features, grid)
        )
        parts.append(F.normalize(resized, dim=1))
    parts.append(F.normalize(colors, dim=1).to(parts[0].dtype))
    return torch.cat(parts, 1).flatten(2).transpose(1, 2)


@cache
def _projection(number: int, channels: int) -> Tensor:
    """A random matrix for the features of a layer [D, C]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(WIDTH, channels, generator=generator)


def on_grid(maps: Tensor, grid: int) -> Tensor:
    """Sums maps [..., H, W] over the cells of a grid [..., G, G], in float64."""
    rows, columns = (_belongs(side, grid, maps.device) for side in maps.shape[-2:])
    return rows @ maps.double() @ columns.T


@cache
def _belongs(pixels: int, grid: int, device: torch.device) -> Tensor:
    """Which pixels belong to which row of cells [G, pixels]."""
    return F.one_hot(torch.arange(pixels) * grid // pixels, grid).T.double().to(device)


def _strongest(cells: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positive ones among the ``count`` strongest cells: picture, cell and sum [m]."""
    values, places = cells.flatten(1).topk(min(count, cells[0].numel() if len(cells) else count))
    rows = torch.arange(len(cells), device=cells.device)[:, None].expand_as(places)
    kept = values > 0
    return rows[kept], places[kept], values[kept]


def model_hash(model: AnyModel) -> str:
    """Returns a hash of a model's config and weights."""
    model = unwrapped(model)
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _data_hash(pictures: Images) -> str:
    """A hash of keys and labels, where the data know them without being read."""
    known = getattr(pictures, "fingerprint", None)
    return str(known()) if known is not None else hashlib.sha256(b"%d" % len(pictures)).hexdigest()


def chunk_path(folder: str | Path, number: int) -> Path:
    """Returns the file of a chunk."""
    return Path(folder, f"evidence-{number:05d}.safetensors")


def read_settings(folder: str | Path) -> EvidenceSettings:
    """Reads the settings of a store.

    Raises:
        ValueError: If the folder is no store of this version.
    """
    path = Path(folder, SETTINGS)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for name in ("pictures", "grid", "strong", "batch_size", "chunk"):
            if type(values[name]) is not int or not 1 <= values[name] <= 1_000_000_000:
                raise ValueError(f"{name} is not a number that an audit has")
        return EvidenceSettings(**{**values, "classes": tuple(values["classes"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds no evidence of an audit; give the folder that an audit has written."
        ) from error


def check_settings(folder: str | Path, settings: EvidenceSettings) -> None:
    """Makes sure that a store can be continued.

    Raises:
        ValueError: If it is of another model, of other data, or made with other settings.
    """
    found = asdict(read_settings(folder))
    for name, value in asdict(settings).items():
        if found[name] != value:
            raise ValueError(
                f"{folder} holds the evidence of an audit with another {name}; give an empty "
                f"folder, or remove the old evidence."
            )


def _default_batch_size(predictor: Predictor, folder: str | Path) -> int:
    if Path(folder, SETTINGS).exists():
        return read_settings(folder).batch_size
    return choose_batch_size(predictor.device, predictor.model.config.image_size)


def _write_settings(folder: str | Path, settings: EvidenceSettings) -> None:
    path = Path(folder, SETTINGS)
    if path.exists():
        return
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Array]:
    with safe_open(path, framework="np") as file:
        names = [name for name in list(file.keys()) if name != "descriptors"]
        return {name: file.get_tensor(name) for name in names}

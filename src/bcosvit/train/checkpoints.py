"""Checkpoints, and the weights that a run starts from.

``last.ckpt`` is the newest checkpoint and ``previous.ckpt`` the one before it. Each is an ordinary
file of ``torch.save`` with one more line at its end, the SHA-256 of everything before, which torch
ignores. Only tensors and plain values are ever unpickled.

Lightning's own saving is atomic, but it does not wait until the data are on disk, does not notice a
damaged file, and replaces the only checkpoint; so this module writes the files itself.
"""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from bcosvit.files import atomic
from bcosvit.models.base import Classifier, load
from bcosvit.models.bcosify import Bcosified
from bcosvit.models.config import BcosifiedConfig, Config, DenseNetConfig
from bcosvit.models.densenet import DenseNet
from bcosvit.models.hub import locate
from bcosvit.models.published import load_backbone
from bcosvit.models.vit import VisionTransformer
from bcosvit.models.weights import load_state, read_config, read_weights

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
_MARK = b"\nsha256 "
_TRAILER = len(_MARK) + 64 + 1


class DamagedError(ValueError):
    """A checkpoint does not match its checksum."""


class ChecksummedIO(CheckpointIO):
    """Writes and reads Lightning's checkpoints, with a checksum and one older copy."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        body = buffer.getbuffer()
        try:
            with atomic(path) as temporary:
                with temporary.open("wb") as file:
                    file.write(body)
                    file.write(_trailer(body))
                    file.flush()
                    # A full disk must show before the older checkpoints are touched.
                    os.fsync(file.fileno())
                if path.exists():
                    os.replace(path, path.with_name(PREVIOUS))
        except OSError as error:
            raise ValueError(
                f"The checkpoint of step {checkpoint['global_step']} could not be saved "
                f"({error.strerror or error}): older checkpoints are untouched; make room in "
                f"{path.parent} and continue with --resume."
            ) from error

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: _PATH) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint.

    Raises:
        DamagedError: The file does not match its checksum.
    """
    data = memoryview(path.read_bytes())
    body, trailer = data[:-_TRAILER], bytes(data[-_TRAILER:])
    if trailer != _trailer(body):
        raise DamagedError(
            f"{path} is damaged: its {len(data)} bytes do not match the checksum at its end."
        )
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return checkpoint


def _trailer(body: memoryview) -> bytes:
    return _MARK + hashlib.sha256(body).hexdigest().encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """An intact checkpoint, and a warning about a newer one that is damaged."""

    path: Path
    step: int
    warning: str | None = None


def newest_checkpoint(folder: Path) -> FoundCheckpoint | None:
    """Finds the newest intact checkpoint of a run.

    Returns:
        The checkpoint, or ``None`` before the first one was written.

    Raises:
        ValueError: There are checkpoints, but all are damaged.
    """
    warning = None
    for path in (folder / LAST, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            step = read_checkpoint(path)["global_step"]
        except DamagedError as error:
            warning = str(error) if warning is None else f"{warning} {error}"
        else:
            return FoundCheckpoint(path=path, step=step, warning=warning)
    if warning is not None:
        raise ValueError(f"{warning} There is no other checkpoint: start a new run.")
    return None


def config_of(path: str | Path) -> Config | None:
    """Returns the config of the model in a weights file of this package; ``None`` for others."""
    path = locate(path)
    return read_config(path) if path.suffix == ".safetensors" else None


def initialize(model: Classifier[Any], path: str | Path) -> str:
    """Loads the weights that training starts from, and returns a sentence that says what was
    loaded.

    A file of this package with the same kind of model fills the whole model; the head stays new
    where the number of classes differs. A DenseNet, of this package or published by others, fills
    the backbone of a transformer, as does a converted model.

    Raises:
        ValueError: The weights do not fit the model.
    """
    found = config_of(path)
    if isinstance(model, VisionTransformer):
        if found is not None and (model.config.keep_head or isinstance(found, BcosifiedConfig)):
            if isinstance(found, type(model.config.backbone)):
                model.start_from(load(path))
                return f"The backbone starts from {path}."
        elif found is None or isinstance(found, DenseNetConfig):
            load_backbone(model, path)
            return f"The backbone starts from {path}."
    if found is None and isinstance(model, DenseNet):
        load_backbone(model, path)
        return f"The model starts from {path}."
    found, state = read_weights(path)
    if type(found) is not type(model.config):
        raise ValueError(
            f"{path} holds a {found.noun}, but a {model.config.noun} is to be trained; "
            f"give weights of a {model.config.noun}."
        )
    if found.num_classes == model.config.num_classes:
        load_state(model, state, source=str(path))
        return f"The model starts from {path}."
    if isinstance(model, Bcosified):
        # Unlike those of other models, its weights have no values before they are loaded.
        model.reset_classifier(model.config.num_classes)
    head = next(name for name, part in model.named_modules() if part is model.get_classifier())
    new = {k: t for k, t in model.state_dict().items() if k.startswith(f"{head}.")}
    loaded = {k: t for k, t in state.items() if not k.startswith(f"{head}.")}
    load_state(model, {**loaded, **new}, source=str(path))
    return (
        f"The model starts from {path}, which has {found.num_classes} classes; its head is "
        f"replaced by a new one for {model.config.num_classes}."
    )

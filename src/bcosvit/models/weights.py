"""State dicts in files: safetensors that carry the model's config, and published checkpoints.

Where a file is named, it may also be one that is shipped, on the web or on the Hugging Face hub
(``hub.locate``). Nothing is ever unpickled: safetensors hold tensors alone, and checkpoints in
PyTorch's own format are read with ``weights_only``.

A file may be hostile. Its texts are bounded and checked before they are used, the model that its
config describes is built without memory (on the ``meta`` device) and compared with the names and
shapes in the file before any memory is allocated, and weights that are not finite are refused.
"""

import json
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any
from unicodedata import category

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from bcosvit.files import atomic
from bcosvit.messages import and_more, printable
from bcosvit.models.config import BcosifiedConfig, Config
from bcosvit.models.hub import is_file, locate
from bcosvit.models.limits import LIMITS
from bcosvit.models.registry import KINDS, from_dict, kind_of, model_config, to_dict
from bcosvit.shipped import shipped, shipped_file

CONFIG_KEY = "bcosvit.config"
"""The metadata key of the model's config, as JSON."""
CLASSES_KEY = "bcosvit.classes"
"""The metadata key of the class names, a JSON list."""
IDS_KEY = "bcosvit.class_ids"
"""The metadata key of short names of the classes, such as WordNet IDs, a JSON list."""
UNLIKE_KEY = "bcosvit.unlike"
"""The metadata key of the score of pictures of unknown kinds, as JSON (`Unlike`)."""
RUN_KEY = "bcosvit.run"
"""The metadata key of what training says about itself, as JSON."""

HEADER_LIMIT, TEXT_LIMIT = 2**24, 2**22
"""Bytes of names, shapes and metadata in a file, and characters of one text among the metadata. The
largest networks of timm have a hundredth of both."""
NAME_LIMIT = 500
"""Characters of a class name."""
DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
"""What tensors in a weights file may be, as safetensors calls it."""
_REORDERING = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
"""Characters that show the text around them in another order."""


def save_state(
    state: Mapping[str, Tensor],
    config: Config,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what ``bcosvit.save`` writes, from a state dict and a config without the model."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    if dtype is not None:
        state = {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
    notes = {**(metadata or {}), CONFIG_KEY: json.dumps(to_dict(config))}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata=notes)
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a file, which safetensors writes in an order that differs each time."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # The same characters in another order have the same length; spaces at the end do not count.
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def read_weights(where: str | Path) -> tuple[Config, dict[str, Tensor]]:
    """The config and the state dict, in float32, in a file that ``bcosvit.save`` wrote."""
    path = locate(where)
    config = read_config(path)
    if config is None:
        raise ValueError(
            f"{path} holds no model config, so it is not a bcosvit weights file; "
            f"load the authors' backbones with load_backbone(model, path)."
        )
    if path != shipped_file(path.stem):
        _check_fit(path, config)
    state = load_file(path)
    return config, {k: t.float() if t.is_floating_point() else t for k, t in state.items()}


def _check_fit(path: Path, config: Config) -> None:
    """Raises ``ValueError`` unless a file holds the weights of the model that it describes.

    The model is built without memory, since the description may be anything, and no further than
    its file can be of use for.
    """
    with safe_open(path, framework="pt") as file:
        count = len(file.keys())
    try:
        with torch.device("meta"), _WithoutInitialization(), _at_most(count):
            model = KINDS.get(kind_of(config)).model(config)
        if isinstance(config, BcosifiedConfig):
            config.shapes(*config.image_size)
    except NotImplementedError:
        # A model of another package that needs numbers; the weights are compared when it is filled.
        return
    # Layers are made with options that nobody has seen before.
    except Exception as error:
        raise ValueError(
            f"{path} describes a model that cannot be built ({_reason(error)}); give other weights."
        ) from error
    own = _shapes(model.state_dict())
    with safe_open(path, framework="pt") as file:
        names = {key: key if key in own else current_key(key) for key in file.keys()}  # noqa: SIM118
        parts = {key: file.get_slice(key) for key, name in names.items() if name in own}
        shapes = {names[key]: part.get_shape() for key, part in parts.items()}
        kinds = {part.get_dtype() for part in parts.values()} - DTYPES
    if kinds:
        raise ValueError(
            f"{path} holds tensors of type {and_more(sorted(kinds))}, which are no weights; give "
            f"tensors of {', '.join(sorted(DTYPES))}."
        )
    _check_names(own, {name: shapes.get(name) for name in names.values()}, str(path))


class _WithoutInitialization(TorchFunctionMode):
    """Leaves out everything in place, so that tensors without memory are made in no time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Raises ``ValueError`` while modules are made that have many more weights than a file."""
    left, thread = 4 * tensors + 100, get_ident()

    def count(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        nonlocal left
        # Other threads may make modules of their own.
        left -= get_ident() == thread
        if left < 0:
            raise ValueError(f"it has more weights than the {tensors} of the file")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _reason(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0], 300).rstrip(".")


def read_config(where: str | Path) -> Config | None:
    """The config in a file that ``bcosvit.save`` wrote; ``None`` for other safetensors."""
    path = locate(where)
    notes = read_metadata(path)
    if CONFIG_KEY not in notes:
        return None
    try:
        return from_dict(json.loads(notes[CONFIG_KEY]))
    # Any values may stand in any place, and at any depth.
    except Exception as error:
        raise ValueError(
            f"{path} holds a model config that cannot be read ({_reason(error)}); it may be of a "
            f"later version: update bcosvit, or give other weights."
        ) from error


def named_config(name: str, **options: Any) -> Config:
    """The config behind a name of ``list_models`` or of a shipped model, with other options.

    Examples:
        >>> named_config("bcos_vit_ti_87_imagenette", num_classes=3).num_classes
        3
    """
    if name not in shipped():
        return model_config(name, **options)
    config = read_config(name)
    assert config is not None
    return config.replace(**options)


def with_backbone(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model, where a ``backbone`` that is a weights file is replaced by its config."""
    if not is_file(options.get("backbone")):
        return dict(options)
    return {**options, "backbone": read_config(options["backbone"])}


def read_metadata(where: str | Path) -> dict[str, str]:
    """What was written beside the weights: config, class names, the run."""
    path = locate(where)
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if HEADER_LIMIT < length < path.stat().st_size:
        raise ValueError(
            f"{path} has a header of {length} bytes, more than the {HEADER_LIMIT} that any model "
            f"needs; give weights that bcosvit saved."
        )
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({_reason(error)}); give weights that "
            f"bcosvit saved."
        ) from error
    for key, text in notes.items():
        if len(text) > TEXT_LIMIT:
            raise ValueError(
                f"{path} holds {len(text)} characters as {printable(key, 50)}, more than the "
                f"{TEXT_LIMIT} that are allowed; give weights that bcosvit saved."
            )
    return notes


def class_names(
    metadata: Mapping[str, str], source: str | Path, key: str = CLASSES_KEY
) -> tuple[str, ...] | None:
    """Reads the class names in the metadata of a weights file.

    Args:
        metadata: What :func:`read_metadata` returned.
        source: The file, for the error message.
        key: Of the metadata.

    Returns:
        The names; None where there are none.

    Raises:
        ValueError: They are no list of names that can be shown.

    Examples:
        >>> class_names({CLASSES_KEY: '["cat", "dog"]'}, "pets.safetensors")
        ('cat', 'dog')
    """
    names = _json(metadata, key, source)
    if names is None:
        return None
    if not isinstance(names, list) or not names:
        raise ValueError(f"{source} has no list of class names; save it again with one.")
    check_class_names(names, str(source))
    return tuple(names)


def check_class_names(names: Sequence[object], source: str) -> None:
    """Raises ``ValueError`` for names that cannot be shown as they are."""
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(
                f"{source} has a class name that is no text (number {number}: "
                f"{printable(repr(name), 50)}); give a text for each class."
            )
        shown = all(each.isprintable() or category(each) == "Cf" for each in name)
        if len(name) > NAME_LIMIT or not shown or not _REORDERING.isdisjoint(name):
            raise ValueError(
                f"{source} has a class name that cannot be shown (number {number}: "
                f"{printable(name, 50)!r}); give names of at most {NAME_LIMIT} characters without "
                f"control characters."
            )


def class_names_of(
    path: Path, metadata: Mapping[str, str], count: int, key: str = CLASSES_KEY
) -> tuple[str, ...] | None:
    """As :func:`class_names`; it is an error if there are other than ``count`` names."""
    names = class_names(metadata, path, key)
    if names is not None and len(names) != count:
        raise ValueError(
            f"{path} names {len(names)} classes, but its model has {count}; "
            f"save it again with a name for each."
        )
    return names


def run_notes(metadata: Mapping[str, str], source: str | Path) -> dict[str, Any]:
    """Reads what training wrote about itself into the metadata of a weights file.

    Args:
        metadata: What :func:`read_metadata` returned.
        source: The file, for the error message.

    Returns:
        ``data``, ``recipe``, ``epoch``, ``accuracy``, ``eval_crop`` and ``image_size``, where they
        are there.

    Raises:
        ValueError: One of them is not what it should be.
    """
    notes = _json(metadata, RUN_KEY, source)
    notes = {} if notes is None else notes
    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "data": ("a text", lambda value: isinstance(value, str)),
        "recipe": ("a text", lambda value: isinstance(value, str)),
        "epoch": ("a whole number", lambda value: type(value) is int and 0 <= value < 10**9),
        "accuracy": ("a number from 0 to 1", lambda value: _is_share(value)),
        "eval_crop": ("a number above 0, up to 1", lambda v: _is_share(v) and v > 0),
        "image_size": (
            f"a whole number from 1 to {LIMITS['image_size']}",
            lambda value: type(value) is int and 1 <= value <= LIMITS["image_size"],
        ),
    }
    if not isinstance(notes, dict):
        raise ValueError(f"{source} has no dict of notes about its run; save it again without.")
    for key, (meaning, is_right) in rules.items():
        if key in notes and notes[key] is not None and not is_right(notes[key]):
            raise ValueError(
                f"{source} says {key} = {printable(repr(notes[key]), 50)} about its run, which is "
                f"not {meaning}; save it again with one."
            )
    return {key: printable(v) if isinstance(v, str) else v for key, v in notes.items()}


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _json(metadata: Mapping[str, str], key: str, source: str | Path) -> Any:
    try:
        return json.loads(metadata.get(key, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{source} holds {key} that is no JSON ({_reason(error)}); give other weights."
        ) from error


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "state") -> None:
    """Loads a state dict completely or not at all, and says what does not fit.

    Args:
        model: The model to fill.
        state: Its state dict; keys may have the names of :func:`current_key`.
        source: Where the state dict comes from, for the error message.

    Raises:
        ValueError: Keys are missing, unexpected or of the wrong shape.
    """
    own = model.state_dict()
    state = {key if key in own else current_key(key): tensor for key, tensor in state.items()}
    _check_names(_shapes(own), _shapes(state), source)
    check_finite(state, source)
    model.load_state_dict({**own, **state})


def _shapes(state: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {key: list(tensor.shape) for key, tensor in state.items()}


def _check_names(own: Mapping[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Compares the names and shapes of a model with those of a state dict."""
    # Old checkpoints lack the counter, which evaluation never reads.
    missing = [k for k in own if k not in given and not k.endswith("num_batches_tracked")]
    unexpected = [printable(key, 80) for key in given if key not in own]
    wrong = [
        f"{key} ({given[key]} instead of {own[key]})"
        for key in own
        if key in given and given[key] != own[key]
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong}
    if problems := [f"{kind}: {and_more(keys)}" for kind, keys in kinds.items() if keys]:
        raise ValueError(
            f"{source} does not fit the model; {'; '.join(problems)}: give weights of a model with "
            f"the same config."
        )


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raises ``ValueError`` where a tensor holds nan or infinity, which no trained model does."""
    bad = [printable(key) for key, tensor in state.items() if not is_finite(tensor)]
    if bad:
        raise ValueError(
            f"{source} holds weights that are not finite ({and_more(bad)}): "
            f"its training diverged, or the file is damaged; give other weights."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; nothing as large as the tensor is allocated."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def published_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict of PyTorch's or safetensors' format with current keys, without any wrapper."""
    return {current_key(key): tensor for key, tensor in plain_state(path).items()}


def plain_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict of PyTorch's or safetensors' format with its own keys, without any wrapper."""
    path = locate(path)
    if path.suffix == ".safetensors":
        read_metadata(path)
        state: Any = load_file(path)
    else:
        _check_unpacked_size(path)
        try:
            with warnings.catch_warnings():
                # What an old pickle protocol may lead to is the error below, or nothing.
                warnings.filterwarnings("ignore", "Detected pickle protocol")
                state = torch.load(path, map_location="cpu", weights_only=True)
        # The unpickler of weights is restricted, but it may fail in any way.
        except Exception as error:
            raise ValueError(
                f"{path} is not a plain state dict of tensors, and anything else is never "
                f"unpickled ({_reason(error)})."
            ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in state.items()
    ):
        raise ValueError(f"{path} is not a state dict: expected names and tensors.")
    for key, tensor in state.items():
        if tensor.layout != torch.strided or _bytes(tensor) > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{path} holds a tensor of {list(tensor.shape)} numbers without those numbers "
                f"({printable(key)}); save a plain state dict."
            )
    return state


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check_unpacked_size(path: Path) -> None:
    """PyTorch never compresses what it saves: what unpacks to more is no file of its own."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ValueError(f"{path} is a damaged archive ({_reason(error)}).") from error
    if unpacked > path.stat().st_size:
        raise ValueError(
            f"{path} would unpack to {unpacked} bytes, more than it has: PyTorch did not save it; "
            f"give a plain state dict."
        )


def current_key(key: str) -> str:
    """What a key of version 0.1, or of a published state dict, is called here.

    Examples:
        >>> current_key("0.features.denseblock1.denselayer2.conv1.linear.weight")
        'features.denseblock1.denselayer2.conv1.weight'
    """
    # v1 puts the network first in a Sequential; data-parallel and Lightning add prefixes too.
    key = re.sub(r"^(?:module\.|model\.|0\.)+", "", key)
    # Version 0.1 spelled it in the British way.
    key = re.sub(r"^tokeniser\.", "tokenizer.", key)
    # Old torchvision files write denselayer1.norm.1 for denselayer1.norm1.
    key = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key)
    # The authors wrap each B-cos kernel in a module called `linear`.
    return re.sub(r"\.linear\.weight$", ".weight", key)

"""What this installation has and lacks, for reports of problems.

Nothing here fails: what cannot be found is a finding. Libraries are looked for and not imported,
except torchvision, whose import is what may go wrong.
"""

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from bcosvit.files import cache_folder
from bcosvit.messages import counted
from bcosvit.ops.compiled import kernels
from bcosvit.ops.dispatch import HAS_TRITON
from bcosvit.shipped import DEFAULT, shipped, shipped_file

CORE = (
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "safetensors",
    "matplotlib",
    "jinja2",
    "typer",
    "rich",
    "filelock",
)

EXTRAS = {
    "train": ("lightning", "torchmetrics", "tensorboard", "webdataset", "datasets", "yaml"),
    "web": ("gradio",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "hub": ("huggingface_hub",),
    "timm": ("timm",),
    "audit": ("sklearn", "pyarrow"),
}
"""Modules that each extra brings."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional part of the library."""

    missing: tuple[str, ...]
    """Modules that are not installed; none where the extra is complete."""
    install: str
    """The command that completes it."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that `bcosvit doctor` prints."""

    versions: dict[str, str | None]
    """``None`` where a package is missing."""
    devices: dict[str, str]
    torchvision: str
    """How its import went."""
    backend: str
    """What the ops' ``backend="auto"`` chooses on this machine."""
    cpu_kernel: str
    """How the kernels for CPUs were compiled, or why PyTorch's ops run instead."""
    extras: dict[str, Extra]
    weights: dict[str, int]
    """Shipped models and the size of their files in bytes."""
    default_weights: str | None
    """The shipped model that is used where none is asked for, if it is there."""
    cache: str
    cached: int
    """Bytes of downloaded weights in the cache."""

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return dataclasses.asdict(self)


def examine() -> Findings:
    """Examines the installation: versions, devices, optional libraries, weights.

    Returns:
        What was found.

    Examples:
        >>> sorted(examine().extras)
        ['audit', 'export', 'hub', 'timm', 'train', 'web']
    """
    import bcosvit

    own = {"bcosvit": bcosvit.__version__, "Python": platform.python_version()}
    cache = cache_folder("weights")
    return Findings(
        versions={**own, **{name: _version(name) for name in (*CORE, "triton")}},
        devices=_devices(),
        torchvision=_torchvision(),
        backend=_backend(),
        cpu_kernel=_cpu_kernel(),
        extras={name: _extra(name) for name in EXTRAS},
        weights={name: shipped_file(name).stat().st_size for name in shipped()},
        default_weights=DEFAULT if DEFAULT in shipped() else None,
        cache=str(cache),
        cached=sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    found = {"cpu": f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def _torchvision() -> str:
    try:
        from bcosvit import _torchvision
    # Anything that a broken installation may raise; which one is what is asked.
    except Exception as error:
        return f"cannot be imported ({type(error).__name__}: {error})"
    if _torchvision._library is None:
        return "imported as it is"
    return "imported with the workaround for operators that do not load beside this torch"


def _backend() -> str:
    if not HAS_TRITON:
        return "reference: triton is not installed"
    if not torch.cuda.is_available():
        return "reference: triton is installed, but there is no CUDA device"
    return "triton for CUDA tensors, reference for others"


def _cpu_kernel() -> str:
    found = kernels()
    return found.about if found.depthwise else f"none, PyTorch's ops run instead: {found.about}"


def _extra(name: str) -> Extra:
    return Extra(
        missing=tuple(module for module in EXTRAS[name] if find_spec(module) is None),
        install=f"pip install 'bcosvit[{name}]'",
    )

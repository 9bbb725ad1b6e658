"""Which implementation of an op runs: a plain predicate, the same for every op.

``reference`` is the truth, in plain PyTorch, for any device and dtype. ``triton`` are the kernels
beside it, for CUDA (or, under ``TRITON_INTERPRET=1``, anything, slowly: how tests check their
numbers without a GPU).
"""

import os
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "triton"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HAS_TRITON = find_spec("triton") is not None


def use_triton(backend: Backend, tensor: Tensor) -> bool:
    """Whether the kernels are to compute what comes from ``tensor``.

    ``auto`` takes them for every CUDA tensor of at most 32 bits; an explicit ``triton`` raises
    where they cannot run.
    """
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"There is no backend {backend!r}; choose auto, reference or triton.")
    on_gpu = tensor.is_cuda and tensor.dtype in DTYPES
    if backend == "auto":
        return on_gpu and HAS_TRITON
    if not HAS_TRITON:
        raise ValueError("The backend 'triton' needs triton, which is not installed; use auto.")
    if not (on_gpu or (interpreted() and tensor.dtype in DTYPES)):
        raise ValueError(
            f"The backend 'triton' cannot run on {tensor.dtype} on {tensor.device}; "
            f"give float32, float16 or bfloat16 on a CUDA device, or use auto."
        )
    return True


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launches_directly(*tensors: Tensor) -> bool:
    """Whether kernels may be launched as they are: nothing traces, nothing wraps the tensors.

    A graph needs every kernel as an op of ``torch.library``, which costs a tenth of a millisecond
    of Python in every call: more than a small kernel itself.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    functorch = torch._C._functorch
    return not any(
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
        for tensor in tensors
    )

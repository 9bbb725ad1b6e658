"""Which implementation of an op runs, and what all implementations share.

The backend ``reference`` is the paper's equation in plain PyTorch, for any device and dtype. The
backend ``triton`` is the kernels beside it, for CUDA (or for any device under
``TRITON_INTERPRET=1``, slowly, which is how tests check the kernels without a GPU). The backend
``auto`` takes them on CUDA, and on a CPU the same equation with fewer passes over memory.

``constant_if`` is the only function of the package that cuts a tensor out of the gradient for an
explanation: to read what a frozen view freezes, look for its callers.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from types import new_class
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["auto", "reference", "triton"]
HALF_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float32, *HALF_DTYPES)
HAS_TRITON = find_spec("triton") is not None


def use_triton(backend: Backend, tensor: Tensor) -> bool:
    """Decides whether the Triton kernels compute an op on ``tensor``.

    Args:
        backend: ``"auto"`` takes the kernels for every CUDA tensor of at most 32 bits,
            ``"reference"`` never does, and ``"triton"`` always does.
        tensor: The input of the op.

    Returns:
        Whether the kernels are to be called.

    Raises:
        ValueError: ``backend`` is unknown, or ``"triton"`` where the kernels cannot run.

    Examples:
        >>> use_triton("auto", torch.zeros(1))
        False
    """
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"There is no backend {backend!r}; choose auto, reference or triton.")
    on_gpu = tensor.is_cuda and tensor.dtype in KERNEL_DTYPES
    if backend == "auto":
        return on_gpu and HAS_TRITON
    if not HAS_TRITON:
        raise ValueError("The backend 'triton' needs triton, which is not installed; use auto.")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (on_gpu or (interpreted and tensor.dtype in KERNEL_DTYPES)):
        raise ValueError(
            f"The backend 'triton' cannot run on {tensor.dtype} on {tensor.device}; "
            f"give float32, float16 or bfloat16 on a CUDA device, or use auto."
        )
    return True


def use_cpu(backend: Backend, *tensors: Tensor) -> bool:
    """Whether the shortcuts for CPUs compute an op; what is traced is the plain equation."""
    return backend == "auto" and is_direct(*tensors)


def is_direct(*tensors: Tensor) -> bool:
    """Whether a CPU computes at once."""
    return all(tensor.device.type == "cpu" for tensor in tensors) and launches_directly(*tensors)


def launches_directly(*tensors: Tensor) -> bool:
    """Whether kernels may be launched as they are: nothing traces or wraps the tensors.

    A traced graph needs every kernel as an op of ``torch.library``, which costs a tenth of a
    millisecond of Python in every call: more than a small kernel itself.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        # Tangents (`torch.func.jvp`) belong to the plain equation.
        return False
    return not any(is_looped_over(tensor) or is_batched(tensor) for tensor in tensors)


def is_batched(tensor: Tensor) -> bool:
    """Whether ``torch.vmap`` hands on several tensors at once, also to a function inside it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its numbers, which code outside of PyTorch may read."""
    functorch = torch._C._functorch
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and launches_directly(tensor)
        and not functorch.is_functorch_wrapped_tensor(tensor)
        # Its numbers in memory may be the negative ones, or not be there.
        and not (tensor.is_neg() or tensor._is_zerotensor())
    )


def is_looped_over(tensor: Tensor) -> bool:
    """Whether ``is_grads_batched`` of ``torch.autograd.grad`` hands on several gradients at once.

    Functions of autograd are not told so, and only PyTorch's own ops can compute with them.
    """
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def untraced(
    name: str,
    launch: Callable[..., Any],
    remember: Callable[..., None],
    differentiate: Callable[..., Any],
) -> Any:
    """An op of ``torch.library`` as a function of autograd, for where nothing is traced.

    Args:
        name: The function's name, which graphs and profiles show.
        launch: Computes the op.
        remember: Keeps what the gradient needs.
        differentiate: Computes the gradient.
    """
    methods = {"forward": launch, "setup_context": remember, "backward": differentiate}
    body = {key: staticmethod(method) for key, method in methods.items()}
    return new_class(name, (torch.autograd.Function,), {}, lambda names: names.update(body))


def traceable(name: str, launch: Callable[..., Any]) -> Any:
    """An op of ``torch.library``, which ``torch.compile`` calls with tensors of any strides.

    ``launch`` copies those whose strides it cannot read. Otherwise the compiler would copy every
    input that it has not stored yet, and compute the sum of all skip connections again wherever it
    is used.

    Args:
        name: The op's name.
        launch: Computes the op, and changes none of its inputs.
    """
    return torch.library.custom_op(
        f"bcosvit::{name}", launch, mutates_args=(), tags=(torch.Tag.flexible_layout,)
    )


def constant_if(frozen: bool, tensor: Tensor) -> Tensor:
    """In a frozen view ``tensor`` is part of the dynamic matrix W(x), so no gradient enters it."""
    return tensor.detach() if frozen else tensor


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype that products of ``tensor`` are computed in: autocast's, or its own.

    Autocast leaves float64 as it is, and does not know the meta device.
    """
    device = tensor.device.type
    if tensor.dtype == torch.float64 or tensor.is_meta or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def wide(tensor: Tensor) -> Tensor:
    """At least float32: squares of half-precision numbers overflow at 256 and vanish below 2e-4."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def narrowed(tensor: Tensor, like: Tensor, *, frozen: bool) -> Tensor:
    """What a layer returns for an input ``like``: wide where autocast runs a frozen view.

    There products narrow their inputs themselves. Between them nothing is rounded, since both
    passes round, and differently, so that contributions would miss the logit.
    """
    if frozen and torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(like.dtype)


def matching(weight: Tensor, x: Tensor, *, frozen: bool) -> Tensor:
    """``weight`` for a product with ``x``, which a frozen view may keep wider than the model."""
    if not frozen or weight.dtype not in HALF_DTYPES or x.dtype != torch.float32:
        return weight
    return weight if torch.is_autocast_enabled(x.device.type) else weight.float()


def unit_rows(weight: Tensor) -> Tensor:
    """ŵ of the paper's Eq. (8): the weight of every output unit, scaled to norm one.

    Args:
        weight: [units, ...]; the norm is taken over everything but the first axis.

    Returns:
        A tensor of the same shape and dtype; an all-zero row stays zero, and a row whose norm is
        beyond the range of its dtype is not a number.

    Examples:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    flat = wide(weight).flatten(1)
    norm = weight_norms(flat).unsqueeze(1)
    # 0 for finite norms; an infinite one would make its row zero without a word.
    norm = norm + 0 * norm
    unit = flat / norm.clamp_min(torch.finfo(flat.dtype).tiny)
    return unit.view_as(weight).to(weight.dtype)


def weight_norms(weight: Tensor) -> Tensor:
    """The norm of every output unit's weight, [units] in at least float32.

    In float32 squares overflow at 1.8e19 and vanish below 1e-23, in float64 they do not. It is used
    where norms cannot be looked at without waiting for them, or look wrong.
    """
    flat = wide(weight).flatten(1)
    norm = torch.linalg.vector_norm(flat, dim=1)
    if flat.dtype == torch.float32 and not _is_known_between(norm, 1e-15, 1e19):
        norm = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).to(torch.float32)
    return norm


def _is_known_between(tensor: Tensor, low: float, high: float) -> bool:
    if not is_direct(tensor) or not tensor.numel():
        return False
    # One pass; what is not a number is not between.
    smallest, largest = tensor.detach().aminmax()
    return low <= smallest.item() and largest.item() <= high


def window_sums(
    images: Tensor,
    kernel: tuple[int, int],
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """The sum over each window of a convolution, per channel: [n, g, h, w] -> [n, g, oh, ow]."""
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return images
    images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    if dilation == (1, 1):
        return F.avg_pool2d(images, kernel, stride, divisor_override=1)
    # Shifted slices rather than a convolution with ones, which autocast would narrow.
    height = (images.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    width = (images.shape[3] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    sums = images.new_zeros(*images.shape[:2], height, width)
    for i, j in product(range(kernel[0]), range(kernel[1])):
        shifted = images[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]]
        sums = sums + shifted[:, :, :height, :width]
    return sums

"""Products and convolutions that use all of float32, whatever the process is set to.

PyTorch may round the inputs of float32 products to fewer bits: cuDNN does by default ("TF32", ten
bits), cuBLAS and oneDNN do on request. Contributions would then miss the logit by a percent, since
the two passes round differently. The settings belong to the whole process, so nobody may change
them for one call. The layers of a frozen view call the functions below instead, which ask for all
bits in every single call: a convolution on a GPU by the argument that cuDNN has for it, anything
else in float64 where the setting would round it. Half precision is left as it is.

On x86 processors ``linear`` multiplies float32 matrices by oneDNN, as PyTorch's convolutions do.
PyTorch's own products call MKL, which takes more than twice as long on processors of AMD.
"""

import platform
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bcosvit.ops.dispatch import (
    is_looped_over,
    is_plain,
    launches_directly,
    matching,
    untraced,
    window_sums,
)

HAS_ONEDNN = (
    platform.machine().lower() in ("x86_64", "amd64")
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
"""Whether PyTorch was built with oneDNN for a processor that it is known to be fast on."""

SMALLEST_PRODUCT = 2**20
"""Multiplications from which on calling oneDNN costs less than it saves."""

Function = TypeVar("Function", bound=Callable[..., Any])

_EXACT = ("ieee", "none")
_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _constant_in_graphs(function: Function) -> Function:
    """Does what ``torch.compiler.assume_constant_result`` does, which imports the compiler: that
    takes as long as importing all else."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_in_graphs
def rounds(device: str, op: str) -> bool:
    """Returns whether PyTorch is set to round the inputs of float32 ops to fewer bits.

    Args:
        device: The type of the device, e.g. ``"cuda"``.
        op: ``"matmul"`` or ``"conv"``.

    Examples:
        >>> rounds("cpu", "matmul")
        False
    """
    backend = {"cuda": "cuda", "cpu": "mkldnn"}.get(device)
    # A compiled graph is bound to the setting, and compiled again where it changes.
    return backend is not None and torch._C._get_fp32_precision_getter(backend, op) not in _EXACT


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, frozen: bool) -> Tensor:
    """``F.linear``; with all of float32 in both passes if ``frozen`` is set."""
    weight = matching(weight, x, frozen=frozen)
    if not _is_full(x, frozen, "matmul"):
        return _linear(x, weight, bias)
    rows = matmul(x.reshape(-1, x.shape[-1]), weight.T, frozen=True)
    y = rows.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _suits_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch._C._functorch.is_batchedtensor(x) or (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (x, weight, bias))
    ):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return _by_onednn(x, weight, bias)


def _suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is a plain one of float32 matrices on a CPU, and large enough."""
    if bias is not None and not (
        # oneDNN reads as many numbers in a row as there are units.
        bias.shape == weight.shape[:1]
        and bias.dtype == weight.dtype
        and bias.is_contiguous()
        and is_plain(bias)
    ):
        return False
    functorch = torch._C._functorch
    return (
        HAS_ONEDNN
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() * weight.shape[0] >= SMALLEST_PRODUCT
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not rounds("cpu", "matmul")
        # Nothing traces or wraps the tensors, but for several classes of one explanation.
        and is_plain(weight)
        and type(x) in _PLAIN
        and (functorch.is_batchedtensor(x) or not functorch.is_functorch_wrapped_tensor(x))
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    """``F.linear`` by oneDNN; ``x`` may be batched by ``torch.vmap``, the others may not."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _by_onednn(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = _linear(grad, weight.T, None)
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2) if grad.ndim > 1 else grad.unsqueeze(0)
            d_weight = _linear(rows.T, x.reshape(-1, x.shape[-1]).T, None)
        if ctx.needs_input_grad[2]:
            d_bias = grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad
        return d_x, d_weight, d_bias

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None and in_dims[1:] == (None, None)
        return _linear(x.movedim(in_dims[0], 0), *rest), 0


def matmul(a: Tensor, b: Tensor, *, frozen: bool) -> Tensor:
    """``a @ b``; with all of float32 in both passes if ``frozen`` is set."""
    if not _is_full(a, frozen, "matmul"):
        return a @ b
    if launches_directly(a, b):
        return _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return (a.double() @ b.double()).to(a.dtype) if rounds(a.device.type, "matmul") else a @ b


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    frozen: bool,
) -> Tensor:
    """``F.conv2d`` (or 1d, 3d); with all of float32 in both passes if ``frozen`` is set.

    Args:
        x: [n, d, ...].
        weight: [c, d / groups, ...].
        bias: As for ``F.conv2d``, and so are the arguments after it.
        frozen: Whether the layer belongs to a frozen view.

    Returns:
        [n, c, ...].

    Examples:
        >>> convolution(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 2, 2), frozen=True).shape
        torch.Size([1, 3, 3, 3])
    """
    dims = weight.ndim - 2
    weight = matching(weight, x, frozen=frozen)
    if not _is_full(x, frozen, "conv"):
        if frozen and bias is None and groups == 1 and _is_read_back(x, weight, padding):
            window2d = (_spread(stride, 2), _spread(padding, 2), _spread(dilation, 2))
            return _Pixels.apply(x, weight, *window2d)  # type: ignore[no-untyped-call]
        return _CONVOLUTIONS[dims - 1](x, weight, bias, stride, padding, dilation, groups)
    if isinstance(padding, str):
        x, padding = padded(x, weight, padding, dilation), 0
    window = (_spread(stride, dims), _spread(padding, dims), _spread(dilation, dims), groups)
    run = _Convolution.apply if launches_directly(x, weight) else _convolve
    y: Tensor = run(x, weight, *window)
    return y if bias is None else y + bias.view(-1, *[1] * dims)


def _is_full(x: Tensor, frozen: bool, op: str) -> bool:
    """Whether an op must ask for all bits: always on a GPU, on a CPU if PyTorch rounds there."""
    if not frozen or x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type):
        return False
    return x.is_cuda or rounds(x.device.type, op)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in all of float32. The setting may change while another thread runs: it is read both
    before and after the call that reads it."""
    if not rounds(a.device.type, "matmul"):
        out = a @ b
        if not rounds(a.device.type, "matmul"):
            return out
    return (a.double() @ b.double()).to(a.dtype)


class _Product(torch.autograd.Function):
    """``a @ b`` for tensors of any number of axes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)
        ctx.shapes = a.shape, b.shape
        return _product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), (shape_a, shape_b) = ctx.saved_tensors, ctx.shapes
        d_a = _summed(_product(grad, b.mT), shape_a) if ctx.needs_input_grad[0] else None
        d_b = _summed(_product(a.mT, grad), shape_b) if ctx.needs_input_grad[1] else None
        return d_a, d_b


def _summed(grad: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


def _convolve_directly(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return _by_backend(x, weight, stride, padding, dilation, groups, None)


def _adjoint_directly(
    grad: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
) -> Tensor:
    """The gradient with respect to an input whose positions are ``size``."""
    return _by_backend(grad, weight, stride, padding, dilation, groups, size)


def _by_backend(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int] | None,
) -> Tensor:
    """A convolution in all of float32, or its adjoint to inputs of ``size``, laid out like x."""
    left = [0] * len(stride)
    if size is not None:
        left = _left_over(x, weight, stride, padding, dilation, size)
    cudnn = torch.backends.cudnn
    # Only cuDNN has the argument.
    dtype = x.dtype if x.is_cuda else torch.float64
    out = torch._convolution(
        x.to(dtype),
        weight.to(dtype),
        None,
        *(stride, padding, dilation, size is not None, left, groups),
        *(cudnn.benchmark, cudnn.deterministic, cudnn.enabled, False),
    )
    return _laid_out(out.to(x.dtype), x)


def _left_over(
    grad: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    size: list[int],
) -> list[int]:
    """Positions at the end of an input that no window of a convolution reaches."""
    reached = zip(grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ends = [(out - 1) * s - 2 * p + d * (kernel - 1) + 1 for out, kernel, s, p, d in reached]
    return [whole - end for whole, end in zip(size, ends, strict=True)]


def transposed(
    grad: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
) -> Tensor:
    """The adjoint of a convolution to inputs of ``size`` by PyTorch."""
    left = _left_over(grad, weight, stride, padding, dilation, size)
    run = _TRANSPOSED[len(stride) - 1]
    out: Tensor = run(grad, weight, None, stride, padding, left, groups, dilation)
    return out


def _laid_out(out: Tensor, like: Tensor) -> Tensor:
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return out.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


_convolve = torch.library.custom_op("bcosvit::convolve", _convolve_directly, mutates_args=())
_adjoint = torch.library.custom_op("bcosvit::convolve_adjoint", _adjoint_directly, mutates_args=())


@_convolve.register_fake
def _(x, weight, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    plain = _CONVOLUTIONS[len(stride) - 1]
    return _laid_out(plain(x, weight, None, stride, padding, dilation, groups), x)


@_adjoint.register_fake
def _(grad, weight, stride, padding, dilation, groups, size):  # type: ignore[no-untyped-def]
    return _laid_out(grad.new_empty(grad.shape[0], weight.shape[1] * groups, *size), grad)


@_adjoint.register_vmap
def _(info, in_dims, grad, weight, *rest):  # type: ignore[no-untyped-def]
    # Several classes of one explanation.
    assert in_dims[0] is not None and in_dims[1] is None
    stacked = grad.movedim(in_dims[0], 0)
    out = _adjoint(stacked.flatten(0, 1), weight, *rest)
    return out.unflatten(0, (info.batch_size, -1)), 0


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.window = inputs
    ctx.size = list(x.shape[2:])
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.window
    d_x = d_weight = None
    if ctx.needs_input_grad[0]:
        if torch.is_grad_enabled() and (grad.requires_grad or weight.requires_grad):
            # To be differentiated again, which the ops above do not know.
            d_x = transposed(grad, weight, stride, padding, dilation, groups, ctx.size)
        else:
            run = _adjoint_directly if launches_directly(grad) else _adjoint
            d_x = run(grad, weight, stride, padding, dilation, groups, ctx.size)
    if ctx.needs_input_grad[1]:
        d_weight = torch.ops.aten.convolution_backward(
            *(grad, x, weight, None, stride, padding, dilation),
            *(False, [0] * len(stride), groups, [False, True, False]),
        )[1]
    return d_x, d_weight, None, None, None, None


_convolve.register_autograd(_differentiate, setup_context=_save)


_Convolution = untraced("_Convolution", _convolve_directly, _save, _differentiate)


def patch_sums(images: Tensor, kernel: tuple[int, int], **window: Any) -> Tensor:
    """``window_sums``, on a CPU by a convolution with ones, a tenth of the time of pooling."""
    channels = images.shape[1]
    if (
        channels == 1
        or kernel == (1, 1)
        or images.device.type != "cpu"
        or images.dtype not in (torch.float32, torch.float64)
        or rounds("cpu", "conv")
        or not launches_directly(images)
    ):
        return window_sums(images, kernel, **window)
    ones = images.new_ones(channels, 1, *kernel)
    last = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", enabled=False):
        return F.conv2d(last, ones, None, groups=channels, **window)


def _is_read_back(x: Tensor, weight: Tensor, padding: Any) -> bool:
    """Whether an explanation on a CPU asks for the adjoint alone, channels lying last in memory."""
    return (
        x.device.type == "cpu"
        and x.ndim == 4
        and x.dtype == weight.dtype in (torch.float32, torch.float64)
        and not isinstance(padding, str)
        and not torch.is_autocast_enabled("cpu")
        and torch.is_grad_enabled()
        and x.requires_grad
        and not weight.requires_grad
        and launches_directly(x, weight)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class _Pixels(torch.autograd.Function):
    """A convolution of an image on a CPU whose weight is a constant."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
    ) -> Tensor:
        return F.conv2d(x, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.window = inputs
        ctx.size = list(x.shape[2:])
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (stride, padding, dilation) = ctx.saved_tensors, ctx.window
        if is_looped_over(grad):
            d_x = transposed(grad, weight, stride, padding, dilation, 1, ctx.size)
        else:
            d_x = _PixelsAdjoint.apply(grad, weight, stride, padding, dilation, ctx.size)  # type: ignore[no-untyped-call]
        return d_x, None, None, None, None


class _PixelsAdjoint(torch.autograd.Function):
    """Its adjoint; several classes of one explanation are further images."""

    @staticmethod
    def forward(
        grad: Tensor,
        weight: Tensor,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        size: list[int],
    ) -> Tensor:
        grad = grad.contiguous(memory_format=torch.channels_last)
        shape = (len(grad), weight.shape[1], *size)
        if dilation == [1, 1] and stride[0] == stride[1] > 1 and shape[1] <= 8:
            return adjoint_by_phases(grad, weight, stride[0], padding, size)
        # Only its shape and layout are read.
        like = torch.empty(shape, dtype=grad.dtype, memory_format=torch.channels_last)
        d_x: Tensor = torch.ops.aten.convolution_backward(
            *(grad, like, weight, None, stride, padding, dilation),
            *(False, [0, 0], 1, [True, False, False]),
        )[0]
        return d_x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, *ctx.window, _ = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(grad, weight, None, *ctx.window), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], grad: Tensor, *rest: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        images = grad.movedim(in_dims[0], 0).flatten(0, 1)
        d_x: Tensor = _PixelsAdjoint.apply(images, *rest)  # type: ignore[no-untyped-call]
        return d_x.unflatten(0, (info.batch_size, -1)), 0


def adjoint_by_phases(
    grad: Tensor, weight: Tensor, stride: int, padding: list[int], size: list[int]
) -> Tensor:
    """The adjoint of a convolution with few input channels, as a convolution of stride 1.

    Pixels that lie ``stride`` apart are computed alike, so that they count as one pixel of
    stride² · channels: oneDNN computes at least 16 channels at once, and an image has six.

    Args:
        grad: [n, c, h, w].
        weight: [c, d, kernel height, kernel width].
        stride: Vertical and horizontal.
        padding: Zeros around the input, vertical and horizontal.
        size: Height and width of the input.

    Returns:
        [n, d, height, width].

    Examples:
        >>> ones = torch.ones(1, 1, 3, 3)
        >>> adjoint_by_phases(ones[..., :2, :2], ones, 2, [0, 0], [5, 5])[0, 0, 2]
        tensor([2., 2., 4., 2., 2.])
    """
    # Pixel stride·j + r gets what the output j − u has by the weight at stride·u + r + padding.
    taps, sides, cells = weight, [], []
    for axis, (pad, length) in enumerate(zip(padding, size, strict=True), start=2):
        kernel = weight.shape[axis]
        first, last = -((stride - 1 + pad) // stride), (kernel - 1 - pad) // stride
        low = stride * first + pad
        high = stride * (last + 1) + pad - kernel
        moved = taps.movedim(axis, -1)
        # A kernel that ends before the padding does leaves taps below the first one.
        moved = F.pad(moved, (max(0, -low), max(0, high)))[..., max(0, low) :]
        moved = moved.unflatten(-1, (last - first + 1, stride)).flip(-2)
        taps = moved.movedim(-2, axis)
        sides.append((last, -first))
        cells.append(-(-length // stride))
    # [c, d, taps, taps, vertical phase, horizontal phase] as [d · phases, c, taps, taps].
    c, d, *window = taps.shape[:4]
    phases = taps.permute(1, 4, 5, 0, 2, 3).reshape(d * stride**2, c, *window)
    # The same zeros on both sides, which a convolution adds by itself; what they add is cut off.
    # Outputs that the last pixels would read lie beyond the end.
    ends = [
        (before, after + cell - length)
        for (before, after), cell, length in zip(sides, cells, grad.shape[2:], strict=True)
    ]
    zeros = [max(0, *both) for both in ends]
    whole = F.pixel_shuffle(F.conv2d(grad, phases, padding=zeros), stride)
    (top, left), (height, width) = (
        [stride * (zero - before) for zero, (before, _) in zip(zeros, ends, strict=True)],
        size,
    )
    inside = whole[:, :, top : top + height, left : left + width]
    return inside.contiguous(memory_format=torch.channels_last)


def _spread(value: Any, dims: int) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value] * dims


def padded(x: Tensor, weight: Tensor, padding: str, dilation: Any) -> Tensor:
    """``x`` with the zeros that ``padding="same"`` means."""
    if padding == "valid":
        return x
    spans = zip(weight.shape[2:], _spread(dilation, weight.ndim - 2), strict=True)
    totals = [d * (kernel - 1) for kernel, d in spans]
    return F.pad(x, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])

"""The B-cos transform of vectors and of image patches (the paper's Eq. 8, with MaxOut).

What ends each function is the reference: the equation in plain PyTorch, which the kernels of
``bcos_triton`` and the shortcuts of ``bcos_cpu`` are tested against.

Letters: n batch, d inputs, c outputs, m units per output (MaxOut takes the largest), h, w pixels.
"""

from typing import Any, TypedDict

from torch import Tensor

from bcosvit.ops.dispatch import (
    Backend,
    constant_if,
    matching,
    narrowed,
    use_cpu,
    use_triton,
    wide,
    window_sums,
)
from bcosvit.ops.products import convolution, linear
from bcosvit.ops.scaling import Pair, cosine_scaled, largest_units


class BcosOptions(TypedDict):
    """What a B-cos transform is made of besides its weight; see :func:`bcos_linear`."""

    b: float
    maxout: int
    scale: float
    eps: float


def bcos_linear(
    x: Tensor,
    weight: Tensor,
    *,
    b: float = 2.0,
    maxout: int = 1,
    scale: float = 1.0,
    eps: float = 1e-6,
    frozen: bool = False,
    backend: Backend = "auto",
    squares: Tensor | None = None,
) -> Tensor:
    """Computes γ·|cos(x, ŵ)|^(B−1)·(ŵ·x), the maximum over ``maxout`` units per output.

    Args:
        x: [..., d].
        weight: [m·c, d], its rows of norm one already (``unit_rows``), which is why MaxOut may come
            before the scaling.
        b: The exponent B; 1 is an ordinary linear layer with unit rows.
        maxout: m, the units per output.
        scale: The factor γ.
        eps: Added to the squared norm of ``x``, so that zero inputs have finite gradients.
        frozen: Whether the gradient with respect to ``x`` is the dynamic matrix W(x).
        backend: Which implementation runs; see :func:`~bcosvit.ops.dispatch.use_triton`.
        squares: Σx² [..., 1], if it is known, which saves the kernels a pass over ``x``.

    Returns:
        [..., c].

    Examples:
        >>> x, weight = torch.tensor([3.0, 4.0]), torch.tensor([[0.6, 0.8], [0.8, -0.6]])
        >>> bcos_linear(x, weight)
        tensor([5., 0.])
    """
    if use_triton(backend, x):
        from bcosvit.ops import bcos_triton

        run, weight = bcos_triton.bcos_linear, matching(weight, x, frozen=frozen)
        how = BcosOptions(b=b, maxout=maxout, scale=scale, eps=eps)
        return run(x, weight, **how, frozen=frozen, squares=squares)[0]
    if use_cpu(backend, x, weight):
        from bcosvit.ops import bcos_cpu

        directly = bcos_cpu.bcos_linear
        return directly(x, weight, b=b, maxout=maxout, scale=scale, eps=eps, frozen=frozen)
    units, norm = linear(x, weight, frozen=frozen), row_norms(x, b, eps, frozen)
    return bcos_scale(units, norm, b=b, maxout=maxout, scale=scale, frozen=frozen)


def bcos_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_by: BcosOptions,
    down_by: BcosOptions,
    *,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Two B-cos transforms in a row, the paper's Eq. (16) without the skip connection.

    The kernels of the second one get the norm of its input from the first one's.

    Args:
        x: [..., d].
        up: The weight of the first transform, with unit rows.
        down: The weight of the second transform, with unit rows.
        up_by: What else the first transform is made of.
        down_by: What else the second transform is made of.
        frozen: As for :func:`bcos_linear`.
        backend: As for :func:`bcos_linear`.

    Returns:
        [..., c].

    Examples:
        >>> by = BcosOptions(b=2.0, maxout=1, scale=1.0, eps=1e-6)
        >>> bcos_mlp(torch.ones(2), torch.eye(2), torch.eye(2), by, by).shape
        torch.Size([2])
    """
    if not use_triton(backend, x):
        hidden = bcos_linear(x, up, **up_by, frozen=frozen, backend=backend)
        return bcos_linear(hidden, down, **down_by, frozen=frozen, backend=backend)
    from bcosvit.ops import bcos_triton

    hidden, squares = bcos_triton.bcos_linear(x, up, **up_by, frozen=frozen, with_squares=True)
    return bcos_triton.bcos_linear(hidden, down, **down_by, frozen=frozen, squares=squares)[0]


def bcos_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    b: float = 2.0,
    maxout: int = 1,
    scale: float = 1.0,
    eps: float = 1e-6,
    frozen: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Applies :func:`bcos_linear` to every patch of an image.

    Args:
        x: [n, d, h, w].
        weight: [m·c, d / groups, kernel height, kernel width], of norm one per unit already.
        stride: Vertical and horizontal, as are ``padding`` and ``dilation``.
        padding: Zeros around the image.
        dilation: Distance between the pixels of a patch.
        groups: Groups of channels, each of which has a norm and units of its own.
        b: As for :func:`bcos_linear`, and so are the arguments after it.

    Returns:
        [n, c, output height, output width].

    Examples:
        >>> bcos_conv2d(torch.ones(1, 2, 4, 4), torch.full((3, 2, 2, 2), 8**-0.5)).shape
        torch.Size([1, 3, 3, 3])
    """
    window: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    how: dict[str, Any] = {"b": b, "maxout": maxout, "scale": scale, "eps": eps}
    if use_triton(backend, x):
        from bcosvit.ops import bcos_triton

        run, weight = bcos_triton.bcos_conv2d, matching(weight, x, frozen=frozen)
        return run(x, weight, **window, groups=groups, **how, frozen=frozen)
    if use_cpu(backend, x, weight):
        from bcosvit.ops import bcos_cpu

        return bcos_cpu.bcos_conv2d(x, weight, **window, groups=groups, **how, frozen=frozen)
    largest = largest_units(
        convolution(x, weight, **window, groups=groups, frozen=frozen), maxout, dim=1
    )
    if b == 1:
        return scale * largest
    squares = wide(constant_if(frozen, x)).square().unflatten(1, (groups, -1)).sum(2)
    kernel = (weight.shape[2], weight.shape[3])
    norm = (window_sums(squares, kernel, **window) + eps).sqrt()
    per_group = wide(largest).unflatten(1, (groups, -1))
    scaled = cosine_scaled(per_group, norm.unsqueeze(2), b, scale, frozen)
    return narrowed(scaled.flatten(1, 2), largest, frozen=frozen)


def row_norms(x: Tensor, b: float, eps: float, frozen: bool) -> Tensor | None:
    """√(Σx² + ε) [..., 1] in at least float32; None where B = 1, which does not read it."""
    if b == 1:
        return None
    return (wide(constant_if(frozen, x)).square().sum(-1, keepdim=True) + eps).sqrt()


def bcos_scale(
    units: Tensor,
    norm: Tensor | None,
    *,
    b: float,
    maxout: int,
    scale: float,
    frozen: bool = False,
) -> Tensor:
    """MaxOut and scaling: from ŵ·a [..., m·c] and ‖a‖ [..., 1] to the B-cos transform [..., c]."""
    largest = largest_units(units, maxout, dim=-1)
    if b == 1:
        return scale * largest
    assert norm is not None
    return narrowed(cosine_scaled(wide(largest), norm, b, scale, frozen), largest, frozen=frozen)

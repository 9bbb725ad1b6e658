"""The first module of every model: from RGB in [0, 1] to what the model computes on.

It also checks the images, so that every way into a model does.
"""

import torch
from torch import Tensor

from bcosvit.nn.views import DynamicModule
from bcosvit.ops.dispatch import is_batched, launches_directly


class Encoding(DynamicModule):
    """The base class of encodings, which check images and then encode them.

    ``channels`` is the number of channels of an encoded image, which is the x of W(x)·x.
    """

    channels: int
    is_end = True

    def forward(self, images: Tensor) -> Tensor:
        check_images(images)
        return self.encode(images)

    def encode(self, images: Tensor) -> Tensor:
        """Encodes images [B, 3, H, W] without checking them."""
        raise NotImplementedError


class BcosEncoding(Encoding):
    """Encodes a pixel as [r, g, b, 1−r, 1−g, 1−b] (the paper's Sec. C.1).

    The *direction* of this vector determines the color, so weights that align with the input can be
    shown in color. Black is as long a vector as white, so dark objects can contribute too.

    Examples:
        >>> BcosEncoding()(torch.ones(1, 3, 1, 1)).flatten()
        tensor([1., 1., 1., 0., 0., 0.])
    """

    channels = 6

    def encode(self, images: Tensor) -> Tensor:
        encoded = torch.cat([images, 1 - images], dim=1)
        if encoded.device.type != "cpu" or not launches_directly(encoded):
            return encoded
        # With the channels of a pixel side by side oneDNN need not rearrange the input and the
        # result of every convolution.
        return encoded.contiguous(memory_format=torch.channels_last)


class ImageNetEncoding(Encoding):
    """Subtracts the mean of ImageNet's pixels and divides by their standard deviation."""

    channels = 3
    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


def check_images(images: Tensor) -> None:
    """Raises ``ValueError`` unless ``images`` is a batch of RGB images in [0, 1]."""
    if not isinstance(images, Tensor):
        raise ValueError(f"Images must be a tensor [B, 3, H, W], not {type(images).__name__}.")
    if images.ndim != 4 or images.shape[1] != 3:
        hint = "; add a batch axis with images[None]" if images.ndim == 3 else ""
        raise ValueError(
            f"Images have shape {list(images.shape)}, expected [B, 3, H, W] (RGB){hint}."
        )
    if images.shape[0] == 0:
        raise ValueError("The batch of images is empty; give at least one image.")
    if images.numel() == 0:
        raise ValueError(f"Images of shape {list(images.shape)} have no pixels; give some.")
    if images.layout != torch.strided:
        raise ValueError("Images are a sparse tensor; give images.to_dense().")
    if not images.is_floating_point():
        raise ValueError(
            f"Images have dtype {images.dtype}, expected floating point in [0, 1]; "
            f"divide 8-bit pixels by 255."
        )
    # Values cannot be looked at in a graph that is being captured, on the meta device or in vmap.
    if (
        torch.compiler.is_compiling()
        or images.is_meta
        or _is_recorded(images)
        or is_batched(images)
    ):
        return
    low, high = (value.item() for value in images.detach().aminmax())
    if not (low >= 0 and high <= 1):
        if low != low or high != high:
            raise ValueError("Images contain NaN; every value must be a number in [0, 1].")
        raise ValueError(
            f"Images have values in [{low:g}, {high:g}], allowed is [0, 1]; don't normalize them "
            f"(the model's first module does) and divide 8-bit pixels by 255."
        )


def _is_recorded(images: Tensor) -> bool:
    return images.is_cuda and torch.cuda.is_current_stream_capturing()

"""A conventional model's own dynamic matrix as a post-hoc explanation.

Gates, norms and attention matrices of a conventional model can be held constant like those of a
B-cos model. It is then affine in the image, and its rows W(x) and the share of its constants say
exactly how it came to its logits, though nothing made these rows align with what is in the image.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bcosvit.attribution.base import Attribution, Explainer, Target, register_explainer
from bcosvit.attribution.inherent import Inherent
from bcosvit.models.base import AnyModel, Classifier
from bcosvit.models.bcosify import Bcosified, bcosify
from bcosvit.nn.encoding import check_images
from bcosvit.nn.views import unwrapped


@register_explainer("exact-linear")
@dataclass(frozen=True)
class ExactLinear(Explainer):
    """Contributions by the matrix W(x) that a conventional model multiplies the image with.

    The model is converted by `bcosvit.bcosify`, which changes nothing about its logits, and the
    copy is explained. The map and the residual sum to the logit exactly.

    Args:
        rows_at_once: As for `Inherent`.

    Examples:
        >>> import bcosvit, torch
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> options = {"family": "conventional", "width": 12, "depth": 1, "image_size": 16}
        >>> model = bcosvit.create_model(bcosvit.ModelConfig(backbone=stem, **options)).eval()
        >>> found = bcosvit.explain(model, torch.rand(1, 3, 16, 16), method="exact-linear")
        >>> bool(found.completeness_error().max() < 1e-4)
        True
    """

    title = "Exact linear"
    color = "#7a5195"
    exact = True
    several = True

    rows_at_once: int | None = None

    def applies_to(self, model: AnyModel) -> bool:
        return isinstance(model, Classifier) and model.config.family == "conventional"

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        model = unwrapped(model)
        if not self.applies_to(model):
            raise ValueError(
                f"exact-linear is for conventional models of this library, and this "
                f"{type(model).__name__} is none; B-cos models have it as method='inherent'."
            )
        check_images(images)
        copy = _converted(model, (images.shape[-2], images.shape[-1]))
        return Inherent(self.rows_at_once)(copy, images, target)


@dataclass(frozen=True, kw_only=True)
class _Converted:
    """A converted copy, with what its original was like."""

    size: tuple[int, int]
    parts: list[tuple[object, ...]]
    tensors: list[Tensor]
    copy: Bcosified

    def is_of(self, model: nn.Module, size: tuple[int, int]) -> bool:
        now = _tensors(model)
        return (
            (self.size, self.parts) == (size, _parts(model))
            and len(now) == len(self.tensors)
            and all(_equal(*pair) for pair in zip(now, self.tensors, strict=True))
        )


_cache: "weakref.WeakKeyDictionary[nn.Module, _Converted]" = weakref.WeakKeyDictionary()


def _converted(model: AnyModel, size: tuple[int, int]) -> Bcosified:
    """``model`` as a converted one, which is kept until its weights or layers change."""
    with torch.inference_mode(False):
        if any(
            m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__
            for m in model.modules()
        ):
            return _convert(model, size)
        found = _cache.get(model)
        if found is None or not found.is_of(model, size):
            # Numbers are compared: versions of tensors miss changes by way of `.data`.
            tensors = [tensor.detach().clone() for tensor in _tensors(model)]
            copy = _convert(model, size)
            found = _Converted(size=size, parts=_parts(model), tensors=tensors, copy=copy)
            _cache[model] = found
    return found.copy


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _equal(one: Tensor, other: Tensor) -> bool:
    same = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return same and torch.equal(one, other)


def _parts(model: nn.Module) -> list[tuple[object, ...]]:
    """The layers and their options, as far as they are plain values."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        (
            name,
            type(part),
            {
                key: value
                for key, value in part.__dict__.items()
                if key != "training" and isinstance(value, plain)
            },
        )
        for name, part in model.named_modules()
    ]


def _convert(model: AnyModel, size: tuple[int, int]) -> Bcosified:
    # The encoding, our models' first module, subtracts the mean itself.
    return bcosify(model, mean=(0, 0, 0), std=(1, 1, 1), image_size=size, check=False)

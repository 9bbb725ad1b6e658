"""A conventional model's own dynamic matrix as a post-hoc explanation.

Gates, norms and attention matrices of a conventional model can be held constant like those of a
B-cos model. It is then affine in the image, and its rows W(x) and the share of its constants say
exactly how it came to its logits, though nothing made these rows align with what is in the image.
"""

import weakref
from dataclasses import dataclass
from typing import Any

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

    rows_at_once: int = 8

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


_cache: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Bcosified]]" = weakref.WeakKeyDictionary()


def _converted(model: AnyModel, size: tuple[int, int]) -> Bcosified:
    """``model`` as a converted one, which is kept until its weights change."""
    tensors = (*model.parameters(), *model.buffers())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.inference_mode(False):
        if hooked or any(tensor.is_inference() for tensor in tensors):
            return _convert(model, size)
        # Every change in place counts up a tensor's version.
        key = (size, *((id(t), t._version, t.dtype, t.device) for t in tensors))
        found = _cache.get(model)
        if found is None or found[0] != key:
            found = _cache[model] = (key, _convert(model, size))
    return found[1]


def _convert(model: AnyModel, size: tuple[int, int]) -> Bcosified:
    # The encoding, our models' first module, subtracts the mean itself.
    return bcosify(model, mean=(0, 0, 0), std=(1, 1, 1), image_size=size, check=False)

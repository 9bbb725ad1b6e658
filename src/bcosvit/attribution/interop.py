"""Our explainers in the shapes that other libraries expect; neither of them is imported.

Quantus takes a function from a model and NumPy arrays to NumPy arrays, captum's users an object
with ``attribute``. Both hand pictures to the model as they are, so whatever perturbs them must keep
them in [0, 1].
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bcosvit.attribution.base import Attribution, Explainer, Method, Target, explain, get_explainer
from bcosvit.attribution.gradient import IntegratedGradients
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import unwrapped


class ExplainFunc(Protocol):
    """What Quantus calls an ``explain_func``; it passes options of its own, which are ignored."""

    def __call__(
        self, model: AnyModel, inputs: NDArray[Any], targets: NDArray[Any], **options: Any
    ) -> NDArray[np.float32]: ...


def quantus_explain_func(method: Method = "inherent") -> ExplainFunc:
    """A function for Quantus' metrics: images [B, 3, H, W] and classes [B] -> maps [B, 1, H, W]."""
    explainer = get_explainer(method)

    def explain_func(
        model: AnyModel, inputs: NDArray[Any], targets: NDArray[Any], **options: Any
    ) -> NDArray[np.float32]:
        reference = next(model.parameters())
        images = torch.as_tensor(np.asarray(inputs)).to(reference)
        classes = torch.as_tensor(np.asarray(targets)).long().to(reference.device)
        map_ = explainer(model, images, classes).map
        return map_.unsqueeze(1).float().cpu().numpy()

    return explain_func


@dataclass(frozen=True)
class CaptumStyle:
    """An explainer with the interface of captum's ``Attribution``.

    Inherent attributions have the shape of the images: a color's share is that of both channels
    that encode it. Other methods give one map for all colors [B, 1, H, W]. Where several classes
    are asked for, an axis of classes follows B.
    """

    forward_func: AnyModel
    """The model, under the name that captum's own objects use."""
    method: Method = "inherent"

    @property
    def multiplies_by_inputs(self) -> bool:
        """Contributions are W(x) ⊙ x, not W(x)."""
        return True

    def has_convergence_delta(self) -> bool:
        """Whether ``attribute`` can tell its error: only inherent attributions claim none."""
        explainer = get_explainer(self.method)
        return isinstance(explainer, Explainer) and explainer.exact

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Target = None,
        return_convergence_delta: bool = False,
        *,
        baselines: Tensor | float | None = None,
    ) -> Any:
        """Attributions of images [B, 3, H, W] for ``target``; with them, if asked, errors [B].

        A tuple of one tensor, which captum makes of its inputs, is answered by a tuple. Integrated
        gradients start at ``baselines``, images as ``inputs`` or one brightness; other methods
        have none.
        """
        if isinstance(inputs, tuple) and len(inputs) != 1:
            raise ValueError(f"inputs are {len(inputs)} tensors, but a model takes one; give one.")
        images = inputs[0] if isinstance(inputs, tuple) else inputs
        explainer = get_explainer(self.method)
        if baselines is not None:
            explainer = self._from_baselines(explainer, baselines, images)
        found = explain(self.forward_func, images, target, explainer)
        by_color = _by_color(found, self.forward_func, images)
        result = (by_color,) if isinstance(inputs, tuple) else by_color
        return (result, found.completeness_error()) if return_convergence_delta else result

    def _from_baselines(self, explainer: Any, given: Tensor | float, images: Tensor) -> Any:
        if not isinstance(explainer, IntegratedGradients):
            raise ValueError(
                f"baselines are not allowed with {getattr(explainer, 'title', self.method)}, which "
                f"compares with none; leave them out, or use method='intgrad'."
            )
        start = torch.as_tensor(given).to(images).expand_as(images)
        return replace(explainer, start=unwrapped(self.forward_func).encoding(start))


def _by_color(found: Attribution, model: AnyModel, images: Tensor) -> Tensor:
    if found.weights is None:
        return found.map.unsqueeze(-3)
    encoded = unwrapped(model).encoding(images.detach())
    # Several classes have an axis behind the images'.
    encoded = encoded.view(len(images), *[1] * (found.weights.ndim - 4), *encoded.shape[1:])
    return (found.weights * encoded).unflatten(-3, (2, 3)).sum(-4)

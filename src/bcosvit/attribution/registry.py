"""Every explanation method by its name, and the one function that users call."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bcosvit.attribution.attention import (
    AttentionExplainer,
    FinalAttention,
    GradCam,
    GradSam,
    Rollout,
    observe,
)
from bcosvit.attribution.attribution import Attribution
from bcosvit.attribution.compiled import CompiledInherent
from bcosvit.attribution.gradient import (
    InputGradient,
    IntegratedGradients,
    Occlusion,
    RandomMap,
    SmoothGrad,
)
from bcosvit.attribution.inherent import Inherent
from bcosvit.attribution.lrp import CheferLRP, PartialLRP
from bcosvit.attribution.target import Target
from bcosvit.models.base import AnyModel
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.views import unwrapped


class Explainer(Protocol):
    """Any callable of this shape is an explainer; ours are dataclasses of hyper-parameters."""

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution: ...


EXPLAINERS: dict[str, Explainer] = {
    "inherent": Inherent(),
    "ixg": InputGradient(),
    "intgrad": IntegratedGradients(),
    "gradcam": GradCam(),
    "gradsam": GradSam(),
    "rollout": Rollout(),
    "finatt": FinalAttention(),
    "cheferlrp": CheferLRP(),
    "plrp": PartialLRP(),
    "smoothgrad": SmoothGrad(),
    "occlusion": Occlusion(),
    "random": RandomMap(),
}


def explainers(model: AnyModel | None = None) -> tuple[str, ...]:
    """Names of all methods, or of those that apply to ``model``."""
    if model is None:
        return tuple(EXPLAINERS)
    model = unwrapped(model)
    left_out: set[str] = set()
    if model.config.family == "bcos":
        # "No LRP rules are defined for B-cos ViTs" (the paper, Sec. 4).
        left_out |= {"cheferlrp", "plrp"}
    else:
        left_out |= {"inherent"}
    if not isinstance(model, VisionTransformer):
        left_out |= {"cheferlrp", "plrp", "gradcam", "gradsam", "rollout", "finatt"}
    return tuple(name for name in EXPLAINERS if name not in left_out)


def resolve_method(method: str | Explainer) -> Explainer:
    """An explainer by name, or as it is."""
    if not isinstance(method, str):
        return method
    if method not in EXPLAINERS:
        raise ValueError(f"There is no method {method!r}; choose from {', '.join(EXPLAINERS)}.")
    return EXPLAINERS[method]


def explain(
    model: AnyModel,
    images: Tensor,
    target: Target = None,
    method: str | Explainer = "inherent",
) -> Attribution:
    """How much each pixel speaks for a class.

    ``target``: ``None`` explains the predicted class, an int one class for all samples, a tensor
    [B] one class each, "all" every class (a class axis then follows B in all results).
    ``method``: one of ``explainers()``, or an explainer with other hyper-parameters, e.g.
    ``Rollout(start=1)``. The model is explained as it predicts, in evaluation mode, and is left
    untouched.
    """
    explainer = resolve_method(method)
    if target == "all" and not isinstance(explainer, Inherent | CompiledInherent):
        with torch.no_grad():
            classes = model(images[:1]).shape[1]
        each = [explainer(model, images, k) for k in range(classes)]
        return Attribution(
            map=torch.stack([a.map for a in each], 1),
            target=torch.stack([a.target for a in each], 1),
        )
    return explainer(model, images, target)


def explain_with(
    model: AnyModel,
    images: Tensor,
    target: Target,
    methods: Sequence[str | Explainer],
) -> dict[str, Attribution]:
    """Several methods on one batch; those that read attention share one forward pass."""
    resolved = {
        method if isinstance(method, str) else repr(method): resolve_method(method)
        for method in methods
    }
    seen = None
    results = {}
    for name, explainer in resolved.items():
        if isinstance(explainer, AttentionExplainer):
            seen = seen or observe(model, images, name)
            results[name] = explainer.of(seen, target)
        else:
            results[name] = explainer(model, images, target)
    return results

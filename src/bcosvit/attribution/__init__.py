"""Explanations: how much each pixel contributes to the logit of a class."""

from bcosvit.attribution.base import (
    METHODS,
    Attribution,
    CompletenessWarning,
    Explainer,
    Method,
    Target,
    Top,
    describe_method,
    explain,
    explain_all,
    explainers,
    get_explainer,
    method_name,
    method_title,
    register_explainer,
)

# isort: split
# Methods are listed in the order of these imports.
from bcosvit.attribution.inherent import CompiledInherent, Inherent

# isort: split
from bcosvit.attribution.gradient import InputGradient, IntegratedGradients

# isort: split
from bcosvit.attribution.attention import FinalAttention, GradCam, GradSam, Rfem, Rollout

# isort: split
from bcosvit.attribution.lrp import CheferLRP, PartialLRP

# isort: split
from bcosvit.attribution.libragrad import LibraGrad

# isort: split
from bcosvit.attribution.exact_linear import ExactLinear

# isort: split
from bcosvit.attribution.sampling import Occlusion, RandomMap, SmoothGrad

# isort: split
from bcosvit.attribution import layers as layers

__all__ = [
    "METHODS",
    "Attribution",
    "CheferLRP",
    "CompiledInherent",
    "CompletenessWarning",
    "ExactLinear",
    "Explainer",
    "FinalAttention",
    "GradCam",
    "GradSam",
    "Inherent",
    "InputGradient",
    "IntegratedGradients",
    "LibraGrad",
    "Method",
    "Occlusion",
    "PartialLRP",
    "RandomMap",
    "Rfem",
    "Rollout",
    "SmoothGrad",
    "Target",
    "Top",
    "describe_method",
    "explain",
    "explain_all",
    "explainers",
    "get_explainer",
    "method_name",
    "method_title",
    "register_explainer",
]

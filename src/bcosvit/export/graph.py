"""A model as one graph of plain tensor operations: image in, logits and contributions out.

``torch.export`` refuses a gradient inside the graph. So the adjoint pass of a frozen view is traced
first (``make_fx``), which leaves ordinary operations with the weights as constants among them, and
the trace is exported. What pictures hold is checked by whoever calls the graph; their size is part
of its signature, which every runtime checks.

Letters: n pictures, of any number; k classes; h, w pixels.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from bcosvit.export.rules import RULES
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import frozen_view, view

IMAGE, TARGET = "image", "target"
"""[n, 3, h, w], RGB in [0, 1]; and [n], int64: a class, or -1 for the predicted one."""
LOGITS, CONTRIBUTIONS, RESIDUAL = "logits", "contributions", "residual"
"""[n, k]; [n, h, w]; and [n]: logits = Σ contributions + residual + bias for the target."""

Outputs = tuple[Tensor, ...]


def inputs(explanation: bool) -> tuple[str, ...]:
    """The graph's inputs in order."""
    return (IMAGE, TARGET) if explanation else (IMAGE,)


def outputs(explanation: bool) -> tuple[str, ...]:
    """The graph's outputs in order."""
    return (LOGITS, CONTRIBUTIONS, RESIDUAL) if explanation else (LOGITS,)


def graph_of(model: AnyModel, size: tuple[int, int], *, explanation: bool) -> ExportedProgram:
    """The graph for pictures of ``size`` pixels (height, width) and any number of them."""
    # A view, so that the model's mode stays as it is.
    model = view(model, with_parameter_grad=False).eval()
    if explanation and model.config.family != "bcos":
        raise ValueError(
            "A conventional model has no contributions of its own to export; export its logits "
            "alone, or explain it with one of bcosvit.explainers(model)."
        )
    device = next(model.parameters()).device
    # Two pictures: the size 1 would be taken for a constant. They are the same each time, because
    # they are written into files of torch's format.
    generator = torch.Generator().manual_seed(0)
    example = [torch.rand(2, 3, *size, generator=generator).to(device)]
    if explanation:
        example.append(torch.tensor([0, -1], device=device))
    function = _explained(model) if explanation else _predicted(model)
    with warnings.catch_warnings():
        # torch's own bookkeeping warns about itself when it copies what it exports.
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        traced = make_fx(
            function,
            decomposition_table=RULES,
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
        )(*example)
        pictures = Dim("n", min=1, max=2**16)
        shapes = tuple({0: pictures} for _ in example)
        return torch.export.export(traced, tuple(example), dynamic_shapes=shapes)


def _predicted(model: AnyModel) -> Callable[..., Outputs]:
    def function(images: Tensor) -> Outputs:
        # As if somebody differentiated: layers then write nothing in place.
        encoded = model.encoding.encode(images).requires_grad_()
        return (model.from_encoded(encoded),)

    return function


def _explained(model: AnyModel) -> Callable[..., Outputs]:
    def function(images: Tensor, target: Tensor) -> Outputs:
        def evidence(encoded: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
            frozen = frozen_view(model, probe=probe, with_parameter_grad=False)
            logits = frozen.from_encoded(encoded)
            classes = torch.where(target < 0, logits.argmax(1), target)
            return logits.gather(1, classes[:, None])[:, 0], logits

        encoded = model.encoding.encode(images)
        probe = torch.ones_like(images[:, 0, 0, 0])
        vjp: Any = torch.func.vjp
        logit, adjoint, logits = vjp(evidence, encoded, probe, has_aux=True)
        weights, residual = adjoint(torch.ones_like(logit))
        return logits, (weights * encoded).sum(1), residual

    return function

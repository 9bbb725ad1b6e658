"""Inherent explanations: rows of W(x), read off a frozen view by one adjoint pass.

In a frozen view logits = W·x + Σ constants is affine in the encoded image x, so the gradient of
logit k with respect to x is row k of W, and the gradient with respect to the constants' probe is
the residual. Nothing is left over by construction; ``Attribution.completeness_error`` measures it.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.attribution.base import (
    Attribution,
    Explainer,
    Target,
    check_direct_call,
    register_explainer,
    resolve_target,
)
from bcosvit.models.base import AnyModel, Classifier
from bcosvit.nn.encoding import check_images
from bcosvit.nn.views import DynamicModule, M, frozen_view, unwrapped
from bcosvit.ops.dispatch import HALF_DTYPES, computed_in, wide
from bcosvit.ops.products import matmul


class InherentExplainer(Explainer):
    """Base class of methods that read W(x) off a frozen view."""

    title = "Inherent contributions"
    color = "#d0342c"
    exact = True
    several = True

    def applies_to(self, model: AnyModel) -> bool:
        return isinstance(model, Classifier) and model.config.family == "bcos"


@register_explainer("inherent")
@dataclass(frozen=True)
class Inherent(InherentExplainer):
    """Contributions of every pixel to a class logit of a B-cos model (the paper's Eq. 7)."""

    rows_at_once: int | None = None
    """With several classes: the rows of W(x), over all images, that one adjoint pass computes. It
    bounds memory. By default 8 on a CPU, which they keep busy already, and 32 on a GPU."""

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        model = bcos_model(model)
        with torch.inference_mode(False):
            view, probe = probed_view(model, images)
        return attribute(view, probe, view.from_encoded, images, target, self.rows_at_once)


def bcos_model(model: AnyModel) -> AnyModel:
    """``model`` without wrappers, if it can be explained."""
    model = unwrapped(model)
    if not isinstance(model, Classifier) or model.config.family != "bcos":
        raise ValueError(
            f"{type(model).__name__} is not a B-cos model, so it has no inherent explanation; "
            f"create one of the names bcosvit.list_models() that begin with 'bcos'."
        )
    return model


def attribute(
    view: AnyModel,
    probe: Tensor,
    from_encoded: Callable[[Tensor], Tensor],
    images: Tensor,
    target: Target,
    rows_at_once: int | None,
) -> Attribution:
    """Rows of W(x) by a probed view and its way from an encoded image to logits."""
    with torch.inference_mode(False), torch.enable_grad(), _products_in_half(images):
        with torch.no_grad():
            encoded = _as_seen(view.encoding.encode(images))
        logits = from_encoded(encoded.requires_grad_())
        classes = resolve_target(target, logits.detach())
        seeds = F.one_hot(classes, logits.shape[1]).to(logits.dtype)
        if classes.ndim == 2:
            # Classes lead, so that each pass differentiates a few of them at once.
            at_once = (32 if images.is_cuda else 8) if rows_at_once is None else rows_at_once
            chunks = max(1, at_once // len(images))
            seeds = seeds.transpose(0, 1)
            if from_encoded == view.from_encoded and _is_narrow(view, len(seeds), images):
                weights, residual = _through_head(view, encoded, probe, seeds, chunks)
            else:
                weights, residual = _several(logits, seeds, encoded, probe, chunks)
            weights, residual = weights.transpose(0, 1), residual.transpose(0, 1)
            pixels = encoded.detach().unsqueeze(1)
        else:
            weights, residual = _adjoint(logits, seeds, encoded, probe, is_last=True)
            pixels = encoded.detach()
    found = Attribution(
        map=(weights * pixels).sum(-3),
        target=classes,
        weights=weights,
        residual=residual,
        logits=logits.detach(),
        logit=logits.detach().gather(1, classes.view(len(images), -1)).view_as(classes),
        bias=view.logit.bias,
        computed_in=computed_in(images),
    )
    return check_direct_call(found)


def probed_view(model: M, images: Tensor) -> tuple[M, Tensor]:
    """A frozen view in evaluation mode and the probe on its constants, for these images."""
    check_images(images)
    probe = new_probe(images)
    return frozen_view(model, probe=probe, with_parameter_grad=False).eval(), probe


def new_probe(images: Tensor) -> Tensor:
    """Ones [B], a factor on every constant of a view."""
    dtype = torch.promote_types(images.dtype, torch.float32)
    return torch.ones(len(images), dtype=dtype, device=images.device, requires_grad=True)


def _adjoint(
    logits: Tensor, seed: Tensor, encoded: Tensor, probe: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Rows of W(x) and residuals for ``seed`` [B, K], or for several at once [k, B, K].

    The last pass frees what it has read, which later layers use again: memory that is new to a
    process has to be cleared by the system first.
    """
    if len(seed) == 1 and seed.ndim == 3:
        # One class needs no batching, which a compiled graph does not know.
        weights, residual = _adjoint(logits, seed[0], encoded, probe, is_last=is_last)
        return weights.unsqueeze(0), residual.unsqueeze(0)

    def rows(seed: Tensor) -> tuple[Tensor, ...]:
        inputs = (encoded, probe)
        again = not is_last or _in_float16(encoded)
        found = torch.autograd.grad(logits, inputs, seed, retain_graph=again, allow_unused=True)
        # A model without constants never touches the probe.
        return tuple(grad for grad in found if grad is not None)

    def scaled(scale: float) -> tuple[Tensor, Tensor]:
        weights, *share = (torch.vmap(rows) if seed.ndim == 3 else rows)(scale * seed)
        # Zero, not rounding, where there are no constants.
        residual = share[0] if share else probe.new_zeros(seed.shape[:-1])
        # Wide, since float16 might not hold them unscaled.
        return wide(weights) / scale, wide(residual) / scale

    first, *smaller = (2.0**24, 2.0**12, 2.0**8, 2.0**4, 1.0) if _in_float16(encoded) else (1.0,)
    weights, residual = scaled(first)
    for scale in smaller:
        # A sample that overflowed takes a smaller scale; the others keep their digits.
        finite = weights.isfinite().flatten(-3).all(-1) & residual.isfinite()
        if finite.all():
            break
        instead = scaled(scale)
        weights = torch.where(finite[..., None, None, None], weights, instead[0])
        residual = torch.where(finite, residual, instead[1])
    return weights, residual


def _several(
    outputs: Tensor, seeds: Tensor, inputs: Tensor, probe: Tensor, at_once: int
) -> tuple[Tensor, Tensor]:
    """`_adjoint` for many seeds [K, B, n], of which a pass takes a few."""
    chunks = seeds.split(at_once)
    parts = [
        _adjoint(outputs, chunk, inputs, probe, is_last=number == len(chunks))
        for number, chunk in enumerate(chunks, start=1)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _is_narrow(view: AnyModel, classes: int, images: Tensor) -> bool:
    """Whether the last layer has fewer inputs than classes are asked for."""
    if type(view).head_inputs is Classifier.head_inputs:
        return False  # which the model does not say
    width = getattr(view.get_classifier(), "in_features", classes)
    # In half precision logits and contributions have to come from the same products.
    return width < classes and computed_in(images) not in HALF_DTYPES


def _through_head(
    view: AnyModel, encoded: Tensor, probe: Tensor, seeds: Tensor, at_once: int
) -> tuple[Tensor, Tensor]:
    """Rows of W(x) as the product of the last layer's matrix and that of all layers before it.

    The second has a row for each of its outputs, however many classes there are.
    """
    inputs = view.head_inputs(encoded)
    cut = inputs.detach().requires_grad_()
    head, of_head = _several(view.from_head_inputs(cut), seeds, cut, probe, at_once)
    units = torch.eye(inputs.shape[1]).to(inputs)
    units = units.unsqueeze(1).expand(-1, len(inputs), -1)
    body, of_body = _several(inputs, units, encoded, probe, at_once)
    # Samples lead.
    head, body, of_body = head.transpose(0, 1), body.flatten(2).transpose(0, 1), of_body.T
    weights = matmul(head, body, frozen=True).unflatten(2, encoded.shape[1:])
    residual = matmul(head, of_body.unsqueeze(2), frozen=True).squeeze(2)
    return weights.transpose(0, 1), of_head + residual.T


def _products_in_half(images: Tensor) -> AbstractContextManager[object]:
    """For half-precision images: autocast, so that layers keep float32 between their products."""
    device = images.device.type
    asked = images.dtype in HALF_DTYPES and torch.amp.is_autocast_available(device)
    if not asked or torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, images.dtype)


def _as_seen(encoded: Tensor) -> Tensor:
    """The encoded image as the first product reads it, in at least float32.

    Pixels have a few hundred values, whose rounding would not average out.
    """
    if encoded.dtype == torch.float64 or not torch.is_autocast_enabled(encoded.device.type):
        return encoded
    return encoded.to(computed_in(encoded)).float()


def _in_float16(encoded: Tensor) -> bool:
    """Whether rows of W(x) could vanish: float16 ends at 6e-8, and logits are scaled by 1e-3."""
    return computed_in(encoded) == torch.float16


class CompiledInherent(InherentExplainer):
    """Inherent explanations by a frozen view that ``torch.compile`` has fused once.

    Forward and adjoint pass become one graph each. The adjoint's holds input gradients alone, since
    a view without parameter gradients asks for no others, and runs once per class. The first call
    of a batch size compiles. The view shares the model's tensors, so further training is seen; a
    part that was replaced, cast or moved is not, and is refused. Calls from several threads take
    turns.

    Examples:
        ``bcosvit.explain(model, images, method=CompiledInherent(model))``
    """

    def __init__(self, model: AnyModel, backend: str = "inductor") -> None:
        self._model = bcos_model(model)
        self._parts = _parts(self._model)
        self._view = frozen_view(self._model, with_parameter_grad=False).eval()
        self._run = torch.compile(self._view.from_encoded, backend=backend)
        self._turn = threading.Lock()

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        if unwrapped(model) is not self._model or _parts(self._model) != self._parts:
            raise ValueError(
                "This explainer was compiled for another model, or for this one before a part of "
                "it was replaced, cast or moved; make a new CompiledInherent(model)."
            )
        check_images(images)
        with self._turn, torch.inference_mode(False), reusable_adjoint():
            probe = new_probe(images)
            for module in self._view.modules():
                if isinstance(module, DynamicModule):
                    module.probe = probe
            return attribute(self._view, probe, self._run, images, target, rows_at_once=1)


def reusable_adjoint() -> AbstractContextManager[None]:
    """While it lasts, a compiled adjoint pass leaves its buffers alone: the next class needs them.

    By default the first pass overwrites ("donates") them, and torch refuses a second.
    """
    return torch._functorch.config.patch(donated_buffer=False)


def _parts(model: nn.Module) -> list[int]:
    """Which objects the model is made of, and where its numbers lie."""
    tensors = (*model.parameters(), *model.buffers())
    return [*map(id, model.modules()), *(tensor.data_ptr() for tensor in tensors)]

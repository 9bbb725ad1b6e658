"""Inherent explanations by a frozen view that ``torch.compile`` has fused once.

The forward and the adjoint pass become one graph each. The adjoint's holds input gradients alone,
since a view without parameter gradients asks for no others, and runs once for every class.
"""

import threading
from contextlib import AbstractContextManager

import torch
import torch._functorch.config
from torch import Tensor, nn

from bcosvit.attribution.attribution import Attribution
from bcosvit.attribution.inherent import attribute, bcos_model, new_probe
from bcosvit.attribution.target import Target
from bcosvit.models.base import AnyModel
from bcosvit.nn.encoding import check_images
from bcosvit.nn.views import DynamicModule, frozen_view, unwrapped


class CompiledInherent:
    """For many explanations of one model: ``explain(..., method=CompiledInherent(model))``.

    The first call of a batch size compiles. The view shares the model's tensors, so training them
    on is seen; a part that was replaced is not, and is refused. Calls from several threads take
    turns.
    """

    def __init__(self, model: AnyModel, backend: str = "inductor") -> None:
        self._model = bcos_model(model)
        self._parts = _parts(self._model)
        self._view = frozen_view(self._model, with_parameter_grad=False).eval()
        self._run = torch.compile(self._view.from_encoded, backend=backend)
        self._turn = threading.Lock()

    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        """As ``Inherent``."""
        if unwrapped(model) is not self._model or _parts(self._model) != self._parts:
            raise ValueError(
                "This explainer was compiled for another model, or for this one before a part of "
                "it was replaced; make a new CompiledInherent(model)."
            )
        check_images(images)
        with self._turn, torch.inference_mode(False), reusable():
            probe = new_probe(images)
            for module in self._view.modules():
                if isinstance(module, DynamicModule):
                    module.probe = probe
            return attribute(self._view, probe, self._run, images, target, rows_at_once=1)


def reusable() -> AbstractContextManager[None]:
    """While it lasts, a compiled adjoint pass leaves its buffers alone: the next class needs them.

    By default the first pass overwrites ("donates") them, and torch refuses a second.
    """
    return torch._functorch.config.patch(donated_buffer=False)


def _parts(model: nn.Module) -> list[int]:
    """Which objects the model is made of."""
    return [id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())]

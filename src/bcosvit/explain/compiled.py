"""A frozen view that ``torch.compile`` has fused: compiled once, then used again and again.

The forward and the adjoint pass become one graph each. The adjoint's holds input gradients alone,
since a view without parameter gradients asks for no others, and may run once for every class.
"""

from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch._functorch.config
from torch import nn

V = TypeVar("V", bound=nn.Module)


def compiled_view(view: V) -> V:
    """``view`` with its ways from an encoded image and from features to logits compiled."""
    for name in ("from_encoded", "from_features"):
        if way := getattr(view, name, None):
            setattr(view, name, torch.compile(way))
    return view


def reusable() -> AbstractContextManager[None]:
    """While it lasts, a compiled adjoint pass leaves its buffers alone: the next class needs them.

    By default the first pass overwrites ("donates") them, and torch refuses a second.
    """
    return torch._functorch.config.patch(donated_buffer=False)

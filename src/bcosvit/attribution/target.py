"""Which class of each sample is to be explained."""

from typing import Literal

import torch
from torch import Tensor

Target = int | Tensor | Literal["all"] | None


def resolve_target(target: Target, logits: Tensor) -> Tensor:
    """Class indices [B], or [B, K] for "all"; ``None`` is the predicted class."""
    samples, classes = logits.shape
    if target is None:
        return logits.argmax(1)
    allowed = f"allowed are None, 'all', a class from 0 to {classes - 1}, or {samples} of them"
    if isinstance(target, str):
        if target != "all":
            raise ValueError(f"target = {target!r} is not a target; {allowed}.")
        return torch.arange(classes, device=logits.device).expand(samples, -1)
    if isinstance(target, int) and not isinstance(target, bool):
        target = torch.full((samples,), target)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target = {target!r} is not a class; {allowed}.")
    if target.shape != (samples,):
        raise ValueError(f"target has shape {list(target.shape)}; {allowed} in a tensor [B].")
    if (wrong := (target < 0) | (target >= classes)).any():
        raise ValueError(f"target {target[wrong][0].item()} is out of range; {allowed}.")
    # A copy: the caller may change the tensor, or have made it in inference mode.
    return target.to(logits.device, torch.long, copy=True)

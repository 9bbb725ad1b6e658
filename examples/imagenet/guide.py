"""A loss on explanations: in a mosaic of photographs, evidence for one lies on that one.

The energy loss of Rao et al., "Studying How to Efficiently and Effectively Guide Models with
Explanations" (ICCV 2023), on the exact contributions of a B-cos network: one minus the share of
the positive contributions to a class that lies in the quarter that shows it. The teacher names the
class, so that no labels are needed.
"""

import torch
from network import Student, encode, patches
from torch import Tensor

from bcosvit.metrics.grid_pointing import CELLS, cell_shares, grid_images


def contributions(student: Student, images: Tensor, classes: Tensor) -> Tensor:
    """The contributions of pixels to one class per image [n, h, w], differentiable in the weights.

    Gates, norms and attention matrices count as constants, as they do in explanations.
    """
    x = encode(images).requires_grad_()
    logits, _ = student(patches(x), frozen=True)
    chosen = logits.gather(1, classes[:, None]).sum()
    (row,) = torch.autograd.grad(chosen, x, create_graph=True)
    return (row * x.detach()).float().sum(1)


def energy_loss(student: Student, views: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss on one mosaic per view.

    Args:
        student: The network; in evaluation mode, since explanations are of that.
        views: Views [n, 3, h, w] in [0, 1] of different photographs.
        logits: What the teacher says about them [n, classes].

    Returns:
        The loss, in which mosaics count by the teacher's confidence, and the mean share in the
        right quarter. A quarter whose class another quarter has too does not count.
    """
    n = len(views)
    index = torch.arange(n, device=views.device)
    shown = (index[:, None] + torch.arange(CELLS, device=views.device)) % n
    cell = torch.randint(CELLS, (n,), device=views.device)
    confidence, top = logits.softmax(-1).max(-1)
    around = top[shown]
    classes = around.gather(1, cell[:, None])
    unique = (around == classes).sum(1) == 1
    weight = confidence[shown].gather(1, cell[:, None])[:, 0] * unique
    maps = contributions(student, grid_images(views[shown]), classes[:, 0]).clamp(min=0)
    inside = cell_shares(*maps.shape[1:]).to(maps)[cell]
    least = torch.finfo(maps.dtype).tiny
    share = (maps * inside).sum((1, 2)) / maps.sum((1, 2)).clamp(min=least)
    total = weight.sum().clamp(min=least)
    return ((1 - share) * weight).sum() / total, ((share * weight).sum() / total).detach()

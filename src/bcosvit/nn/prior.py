"""Positional information: attention priors and the additive embedding (the paper's Sec. 3.5)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcosvit.nn.views import DynamicModule
from bcosvit.ops.attention import PriorKind

Grid = tuple[int, int]


class AttentionPrior(DynamicModule):
    """The prior B [h, t, t]: how much one position reads another before any content is seen.

    Args:
        kind: ``"add"`` or ``"mul"``, as in :func:`bcosvit.ops.attention_matrix`; ``"none"`` has no
            parameter.
        num_heads: h.
        tokens: t.
    """

    logits: nn.Parameter | None

    def __init__(self, kind: PriorKind, num_heads: int, tokens: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "none":
            self.register_parameter("logits", None)
        else:
            # Zero is "no preference": heads part ways through their queries and keys.
            self.logits = nn.Parameter(torch.zeros(num_heads, tokens, tokens))

    def extra_repr(self) -> str:
        return self.kind if self.logits is None else f"{self.kind}, {list(self.logits.shape)}"


class PositionalEmbedding(DynamicModule):
    """E [1, t, d], which is added to the tokens; in an explanation its share is the residual.

    Args:
        tokens: t.
        width: d.
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, width))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.offset(self.weight, tokens)


def resize_pairs(logits: Tensor, old: Grid, new: Grid) -> Tensor:
    """A prior over pairs of ``old`` grid positions, interpolated to the ``new`` grid."""
    heads = logits.shape[0]
    by_key = _resize(logits.reshape(heads * old[0] * old[1], 1, *old), new)
    by_key = by_key.reshape(heads, old[0] * old[1], -1).transpose(1, 2)
    by_query = _resize(by_key.reshape(heads * new[0] * new[1], 1, *old), new)
    return by_query.reshape(heads, new[0] * new[1], -1).transpose(1, 2).contiguous()


def resize_embedding(weight: Tensor, old: Grid, new: Grid) -> Tensor:
    """An embedding of the ``old`` grid's positions, interpolated to the ``new`` grid."""
    image = weight.transpose(1, 2).unflatten(2, old)
    return _resize(image, new).flatten(2).transpose(1, 2).contiguous()


def _resize(images: Tensor, size: Grid) -> Tensor:
    return F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)

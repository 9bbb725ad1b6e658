"""Multi-head self-attention, the paper's and the ordinary one, with a prior over token pairs.

Letters: n batch, t tokens, d width, h heads.
"""

from typing import Literal

from torch import Tensor

from bcosvit.nn.dynamic import DynamicModule
from bcosvit.nn.linear import BcosLinear, Linear
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.prior import AttentionPrior
from bcosvit.ops import attention_matrix, prior_attention

AttentionKind = Literal["shifted", "standard"]


class Attention(DynamicModule):
    """U [A_h · V_h(·)]_h with A from LayerNorm(P) (the paper's Eq. 12–14).

    ``shifted``: the LayerNorm acts on queries and keys alone; V and U are the B-cos transforms
    handed in. ``standard``: LayerNorm before q, k and v; V and U are linear with biases.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kind: AttentionKind,
        prior: AttentionPrior,
        value: BcosLinear | Linear,
        project: BcosLinear | Linear,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kind = kind
        self.norm = LayerNorm(width)
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = value
        self.prior = prior
        self.project = project

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        query, key = self._query_key(normed)
        value = self._split(self.value(tokens if self.kind == "shifted" else normed))
        mixed = prior_attention(
            query, key, value, self.prior.logits, kind=self.prior.kind, frozen=self.frozen
        )
        return self.project(mixed.transpose(1, 2).flatten(2))

    def matrix(self, tokens: Tensor) -> Tensor:
        """A [n, h, t, t] for these tokens, prior included: what ``forward`` mixes values with."""
        query, key = self._query_key(self.norm(tokens))
        return attention_matrix(query, key, self.prior.logits, self.prior.kind)

    def _query_key(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        # A belongs to W(x): cutting its input off keeps no graph for it in a frozen view.
        normed = self.constant(normed)
        return self._split(self.query(normed)), self._split(self.key(normed))

    def _split(self, x: Tensor) -> Tensor:
        """[n, t, d] -> [n, h, t, d/h]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

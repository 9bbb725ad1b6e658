"""Multi-head self-attention, the paper's and the ordinary one, with a prior over token pairs.

Letters: n batch, t tokens, d width, h heads.
"""

from typing import Any, Literal

from torch import Tensor

from bcosvit.nn.linear import BcosLinear, Linear, is_plain_bcos
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.prior import AttentionPrior
from bcosvit.nn.views import DynamicModule
from bcosvit.ops import attention_matrix, prior_attention
from bcosvit.ops.attention import prior_attention_and_squares
from bcosvit.ops.dispatch import computed_in

AttentionKind = Literal["shifted", "standard"]


class Attention(DynamicModule):
    """Multi-head attention U [A_h · V_h(P)]_h (the paper's Eq. 12 to 14).

    Args:
        width: d, of queries and keys.
        num_heads: h.
        kind: ``"shifted"`` applies the LayerNorm to queries and keys alone; ``"standard"`` applies
            it to values as well, as ViTs usually do.
        prior: The prior over pairs of tokens.
        value: V, a B-cos transform or a linear layer.
        project: U, likewise.
        token_width: Width of the tokens; default d.
    """

    tape: list[Tensor] | None = None
    """In a view that observes: where each call leaves its A [n, h, t, t], prior included."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        kind: AttentionKind,
        prior: AttentionPrior,
        value: BcosLinear | Linear,
        project: BcosLinear | Linear,
        token_width: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kind = kind
        inputs = token_width or width
        self.norm = LayerNorm(inputs)
        self.query = Linear(inputs, width)
        self.key = Linear(inputs, width)
        self.value = value
        self.prior = prior
        self.project = project

    def forward(self, tokens: Tensor) -> Tensor:
        if self.kind == "shifted":
            # A belongs to W(x): cutting its input off keeps no graph for it in a frozen view.
            normed = self.norm.standardize(self.constant(tokens))
        else:
            normed = self.norm(tokens)
        fixed = self.constant(normed)
        # Autocast would narrow it for queries and for keys, and write it twice.
        fixed = fixed.to(computed_in(fixed))
        query, key = self.split(self.query(fixed)), self.split(self.key(fixed))
        value = self.split(self.value(tokens if self.kind == "shifted" else normed))
        prior, kind = self.prior.logits, self.prior.kind
        if self.tape is None:
            how: dict[str, Any] = {"kind": kind, "frozen": self.frozen, "backend": self.backend}
            if is_plain_bcos(self.project):
                mixed, squares = prior_attention_and_squares(query, key, value, prior, **how)
                return self.project(mixed.transpose(1, 2).flatten(2), squares)
            mixed = prior_attention(query, key, value, prior, **how)
        else:
            matrix = self.constant(attention_matrix(query, key, prior, kind))
            self.tape.append(matrix)
            mixed = matrix.to(value.dtype) @ value
        return self.project(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """[n, t, d] -> [n, h, t, d/h]"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

"""The hot equations as pure functions, one folder an op.

Each op's ``reference.py`` is the truth: the paper's equation in plain PyTorch, one screen long.
Faster implementations are measured against it.
"""

from bcosvit.ops.bcos_conv import bcos_conv2d
from bcosvit.ops.bcos_linear import bcos_linear, bcos_mlp
from bcosvit.ops.prior_attention import attention_matrix, prior_attention

__all__ = ["attention_matrix", "bcos_conv2d", "bcos_linear", "bcos_mlp", "prior_attention"]

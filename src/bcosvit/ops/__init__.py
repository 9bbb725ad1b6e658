"""The operations that take the time, as pure functions.

``bcos`` and ``attention`` hold the paper's equations in plain PyTorch; the modules beside them hold
the Triton kernels that compute the same on a GPU.
"""

from bcosvit.ops.attention import attention_matrix, prior_attention
from bcosvit.ops.bcos import bcos_conv2d, bcos_linear, bcos_mlp

__all__ = ["attention_matrix", "bcos_conv2d", "bcos_linear", "bcos_mlp", "prior_attention"]

"""When two attributions are equal.

Maps of tokens are drawn large, so they have whole regions of one value; the last bits of those
differ by how the model's batch happened to be rounded. Comparing a few digits less makes them ties,
to be broken on purpose, instead of an order that changes with the batch size. A value can still lie
so close to where rounding turns that its last bits decide: rare, and between neighbors only.
"""

import torch
from torch import Tensor

from bcosvit.ops.dispatch import wide

BITS = 16
"""Of each attribution that count: five digits, where float32 has seven."""


def significant(maps: Tensor) -> Tensor:
    """``maps`` rounded to ``BITS`` significant bits, each value on its own."""
    mantissa, exponent = torch.frexp(wide(maps))
    return torch.ldexp((mantissa * 2.0**BITS).round() / 2.0**BITS, exponent)

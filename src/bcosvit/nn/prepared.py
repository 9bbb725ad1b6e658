"""Views for inference: what depends on the weights alone is computed once, not in every call."""

from typing import Any

import torch
from torch import nn

from bcosvit.nn.dynamic import M, view
from bcosvit.nn.linear import BcosLayer
from bcosvit.ops.common import unit_rows


def prepared(model: M, dtype: torch.dtype | None = None) -> M:
    """A view for predicting and explaining whose B-cos weights have unit rows already.

    A snapshot: training ``model`` further does not change it. With ``dtype`` the rows are stored
    narrower, as autocast to that dtype would compute with them; the model itself stays as it is.
    """

    def mark(module: nn.Module) -> dict[str, Any]:
        return {"prepared": True} if isinstance(module, BcosLayer) else {}

    snapshot = view(model, mark=mark, with_parameter_grad=False)
    for module in snapshot.modules():
        if isinstance(module, BcosLayer):
            with torch.no_grad():
                unit = unit_rows(module.weight).to(dtype or module.weight.dtype)
            module._parameters["weight"] = unit  # type: ignore[assignment]
    return snapshot.eval()

"""Contributions that miss the logit are never silent."""

import pytest
import torch
from torch import nn

from bcosvit import create_model, explain, frozen_view
from bcosvit.attribution import Attribution, CompletenessWarning, explain_all
from bcosvit.attribution.base import TOLERANCES, check_completeness
from bcosvit.ops.dispatch import unit_rows
from tests.conftest import randomize, small_config


def made(error: float, dtype: torch.dtype = torch.float32, bias: float = -4.0) -> Attribution:
    """Contributions of 1 in all to a logit of bias + 1, which they miss by ``error``."""
    return Attribution(
        map=torch.full((1, 2, 2), 0.25, dtype=dtype),
        target=torch.zeros(1, dtype=torch.long),
        residual=torch.zeros(1, dtype=torch.float64),
        logit=torch.tensor([bias + 1 + error], dtype=torch.float64),
        bias=bias,
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tolerances_are_shares_of_the_logit_or_the_bias(dtype):
    check_completeness(made(0.9 * 4 * TOLERANCES[dtype], dtype), strict=True)
    for wrong in (1.2 * 4 * TOLERANCES[dtype], float("nan")):
        with pytest.warns(CompletenessWarning, match="miss the logit"):
            check_completeness(made(wrong, dtype))
        with pytest.raises(ValueError, match="miss the logit"):
            check_completeness(made(wrong, dtype), strict=True)


def test_autocast_counts_as_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        check_completeness(made(0.04), strict=True)
    with pytest.raises(ValueError, match="float32"):
        check_completeness(made(0.04), strict=True)


class Leaky(nn.Module):
    """Computes something between its child and its result that no view can freeze."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.child(x)) + 0.3


def test_a_module_of_others_is_proved_by_the_numbers(model, images):
    explain(model, images)
    model.blocks[1] = Leaky(model.blocks[1])
    with pytest.raises(ValueError, match="Leaky"):
        explain(model, images)
    with pytest.raises(ValueError, match="Leaky"):
        explain_all(model, images, None, ["inherent"])
    plain = Leaky(nn.Identity())
    plain.forward = lambda x: plain.child(x)
    model.blocks[1] = plain
    explain(model, images)


def test_weights_beyond_float32_do_not_vanish():
    weight = torch.tensor([[3e19, 4e19], [3.0, 4.0]])
    unit = unit_rows(weight)
    assert unit[0].isnan().all()
    assert unit[1].tolist() == pytest.approx([0.6, 0.8])
    model = randomize(create_model(small_config())).eval()
    with torch.no_grad():
        model.head.weight.mul_(1e20)
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        explain(model, torch.rand(1, 3, 16, 16))
    with pytest.raises(ValueError, match="miss the logit"):
        explain(model, torch.rand(1, 3, 16, 16), strict=True)


@pytest.mark.parametrize("method", ["ixg", "intgrad", "gradcam", "occlusion"])
def test_post_hoc_methods_refuse_frozen_views(method, model, images):
    with pytest.raises(ValueError, match="frozen view"):
        explain(frozen_view(model), images, 0, method)
    torch.testing.assert_close(
        explain(frozen_view(model), images, 0).map, explain(model, images, 0).map
    )

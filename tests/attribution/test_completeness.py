"""Contributions that miss the logit are never silent."""

import warnings

import pytest
import torch
from torch import nn

from bcosvit import create_model, explain, frozen_view
from bcosvit.attribution import Attribution, CompletenessWarning, explain_all
from bcosvit.attribution.base import TOLERANCES, check_completeness
from bcosvit.attribution.inherent import CompiledInherent, Inherent
from bcosvit.attribution.layers import input_contributions, token_contributions
from bcosvit.nn import BcosLinear, prepared_view
from bcosvit.nn.views import DynamicModule, unverified
from bcosvit.ops.dispatch import unit_rows
from bcosvit.predictor import Predictor
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


class Doubling(nn.Sequential):
    """A subclass of a container that computes something of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.norm()


class Arranging(nn.Module):
    """Arranges its children: two branches and a skip connection, with an option by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = BcosLinear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x) + self.two(x) + skip, x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_view_proves_modules_of_others_in_its_first_call(dtype):
    x = torch.randn(4, 6, dtype=dtype)
    for wrong in (Leaky(BcosLinear(6, 6)), Doubling(nn.Linear(6, 6))):
        view = frozen_view(nn.Sequential(BcosLinear(6, 6), wrong).to(dtype))
        with pytest.raises(ValueError, match=f"{type(wrong).__name__} computes something"):
            view(x)
    right = Arranging().to(dtype)
    view = frozen_view(right)
    torch.testing.assert_close(view(x, skip=x)[0], right(x, skip=x)[0])
    with torch.inference_mode():
        frozen_view(right)(x, skip=x)
    # The model itself has no hook, and its own tensors.
    assert not right._forward_hooks
    assert {parameter.dtype for parameter in right.parameters()} == {dtype}


def test_a_proof_is_computed_once_and_leaves_no_trace():
    right, calls = Arranging().train(), []
    right.one.register_forward_hook(lambda *_: calls.append(1))
    view, x = frozen_view(right), torch.randn(4, 6)
    view(x, skip=x)
    first = len(calls)
    view(x, skip=x)
    assert (first, len(calls)) == (2, 3)
    assert right.training
    assert all(parameter.grad is None for parameter in right.parameters())


@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e19, 3e25, 1e37])
def test_unit_rows_of_any_size(size):
    weight = torch.randn(5, 30)
    torch.testing.assert_close(unit_rows(weight * size), unit_rows(weight), rtol=1e-5, atol=1e-7)
    # Bit by bit as ever where squares fit.
    norm = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    assert torch.equal(unit_rows(weight), weight / norm)


def test_a_model_with_huge_weights_is_the_same_model(model):
    model, images = model.float(), torch.rand(1, 3, 16, 16)
    expected = explain(model, images, strict=True)
    with torch.no_grad():
        model.head.weight.mul_(1e20)
    found = explain(model, images, strict=True)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.map, expected.map)


def test_weights_beyond_their_dtype_are_not_silent():
    weight = torch.tensor([[3e38, 3e38], [3.0, 4.0]])
    unit = unit_rows(weight)
    assert unit[0].isnan().all()
    assert unit[1].tolist() == pytest.approx([0.6, 0.8])
    model = randomize(create_model(small_config())).eval()
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        explain(model, torch.rand(1, 3, 16, 16))
    with pytest.raises(ValueError, match="miss the logit"):
        explain(model, torch.rand(1, 3, 16, 16), strict=True)
    with pytest.raises(ValueError, match=r"BcosLinear.*is not finite"):
        prepared_view(model)


@pytest.mark.parametrize("method", ["ixg", "intgrad", "gradcam", "occlusion"])
def test_post_hoc_methods_refuse_frozen_views(method, model, images):
    with pytest.raises(ValueError, match="frozen view"):
        explain(frozen_view(model), images, 0, method)
    torch.testing.assert_close(
        explain(frozen_view(model), images, 0).map, explain(model, images, 0).map
    )


@pytest.fixture
def broken(model, monkeypatch):
    """A model whose views do not see their constants, so that nothing adds up."""
    monkeypatch.setattr(
        DynamicModule, "offset", lambda self, constant, like: constant * 1.0, raising=True
    )
    options = {"position": "emb", "attention": "standard", "logit_scale": 1.0}
    return randomize(create_model(small_config(**options))).eval()


EVERY_WAY = {
    "explain": lambda model, x, **strict: explain(model, x, **strict),
    "several": lambda model, x, **strict: explain(model, x, method=["inherent", "ixg"], **strict),
    "versus": lambda model, x, **strict: explain(model, x, 0, versus=1, **strict),
    "all": lambda model, x, **strict: explain_all(model, x, None, ["inherent"], **strict),
    "tokens": lambda model, x, **strict: token_contributions(model, x, 0, **strict),
    "inputs": lambda model, x, **strict: input_contributions(model, x, 1, 0, **strict),
    "predictor": lambda model, x, **strict: Predictor.of(model).explain(x[0], **strict),
}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_no_way_to_an_explanation_is_silent(way, broken):
    images = torch.rand(1, 3, 16, 16)
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        found = EVERY_WAY[way](broken, images)
    if way == "predictor":
        assert "miss the logit" in found.incompleteness
    with pytest.raises(ValueError, match="miss the logit"):
        EVERY_WAY[way](broken, images, strict=True)


def test_explainers_that_are_called_directly_are_checked_too(broken):
    images = torch.rand(1, 3, 16, 16)
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        Inherent()(broken, images)
    # Through `explain` there is one warning, not two, and none where it is asked not to check.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        explain(broken, images)
        explain_all(broken, images, None, ["inherent"], check=False)
    assert len(caught) == 1


@pytest.mark.slow
def test_compiled_explanations_are_checked(broken):
    images = torch.rand(1, 3, 16, 16)
    compiled = CompiledInherent(broken, backend="aot_eager")
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        explain(broken, images, method=compiled)
    with pytest.raises(ValueError, match="miss the logit"):
        explain(broken, images, method=compiled, strict=True)


def test_autocast_beyond_its_tolerance_is_not_silent(broken):
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(CompletenessWarning, match="5e-02 is the tolerance in bfloat16"):
            explain(broken, torch.rand(1, 3, 16, 16))
        with pytest.raises(ValueError, match="miss the logit"):
            explain(broken, torch.rand(1, 3, 16, 16), strict=True)


class Slightly(nn.Module):
    """Misses being dynamic linear by a hundred-thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.child = BcosLinear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.child(x)
        return y + 1e-5 * y * y.norm()


def test_a_proof_is_as_strict_as_the_dtype_allows():
    x = torch.randn(4, 6)
    frozen_view(Slightly())(x)
    with pytest.raises(ValueError, match="Slightly computes something"):
        frozen_view(Slightly().double())(x.double())


class OwnLinear(nn.Linear):
    """Of another module than torch's, although its ``forward`` is torch's."""


def test_modules_that_are_not_known_to_be_linear_are_named():
    changed = nn.Linear(2, 2)
    changed.forward = lambda x: x**3
    assert unverified(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) is None
    assert unverified(nn.Sequential(nn.Linear(2, 2), OwnLinear(2, 2))) == "OwnLinear"
    assert unverified(nn.Sequential(nn.ReLU(), changed)) == "Linear"

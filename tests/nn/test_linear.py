"""Two transforms in a row, and layers in their place."""

import pytest
import torch
from torch import nn

from bcosvit.nn import BcosLinear, frozen_view, prepared_view
from bcosvit.nn.linear import BcosMLP


class Doubled(BcosLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_either_transform_run(kind):
    mlp, x, seen = BcosMLP(BcosLinear(4, 6, maxout=2), BcosLinear(6, 4)), torch.randn(3, 4), []
    expected = mlp(x)
    for layer in mlp:
        getattr(layer, kind)(lambda layer, *_: seen.append(layer))
    assert torch.equal(mlp(x), expected)
    assert seen == list(mlp)


def test_a_forward_that_was_set_on_a_transform_is_called():
    mlp, x = BcosMLP(BcosLinear(4, 6), BcosLinear(6, 4)), torch.randn(3, 4)
    expected, original = mlp(x), mlp[1].forward
    mlp[1].forward = lambda hidden: 2 * original(hidden)
    torch.testing.assert_close(mlp(x), 2 * expected)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), Doubled(6, 4), nn.Identity()])
def test_layers_in_place_of_a_transform_are_called(layer):
    mlp, x = BcosMLP(BcosLinear(4, 6), layer), torch.randn(3, 4)
    for each in (mlp, frozen_view(mlp)):
        torch.testing.assert_close(each(x), layer(mlp[0](x)))


def test_weights_that_are_loaded_into_a_prepared_view_are_normalized():
    layer, other, x = BcosLinear(4, 3), BcosLinear(4, 3), torch.randn(2, 4)
    view = prepared_view(layer)
    view.load_state_dict(other.state_dict())
    torch.testing.assert_close(view(x), other(x).detach())


def test_more_layers_than_two_are_called_one_by_one():
    mlp, x = BcosMLP(BcosLinear(4, 6), BcosLinear(6, 4)), torch.randn(3, 4)
    mlp.append(BcosLinear(4, 5))
    torch.testing.assert_close(mlp(x), mlp[2](mlp[1](mlp[0](x))))

"""The ratio of the two branches of an attention block."""

import torch

from bcosvit import create_model
from bcosvit.paper.norms import branch_ratios
from tests.conftest import randomize, small_config


def test_ratios_are_those_of_the_branches(model, images):
    ratios = branch_ratios(model, images)
    tokens = model.position(model.tokens(images))
    for layer, block in enumerate(model.blocks):
        added = block.attention(tokens)
        expected = (tokens.norm(dim=-1) / added.norm(dim=-1)).log().mean(1)
        assert torch.allclose(ratios[:, layer], expected, rtol=1e-9)
        tokens = block(tokens)
    assert ratios.shape == (len(images), len(model.blocks))


def test_nothing_is_left_on_the_model(images):
    model = randomize(create_model(small_config(attention="standard"))).double().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    branch_ratios(model, images)
    assert all(not module._forward_hooks and module.training for module in model.modules())
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_branch_that_adds_nothing_has_a_finite_ratio(images):
    model = create_model(small_config(attention="standard")).double()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.project.weight)
        torch.nn.init.zeros_(block.attention.project.bias)
    ratios = branch_ratios(model, images)
    assert ratios.isfinite().all()
    assert (ratios > 100).all()

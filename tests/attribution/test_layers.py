"""The layer-wise view: both ends of W(x) moved, still exact."""

import pytest
import torch

from bcosvit import create_model, explain
from bcosvit.attribution.layers import input_contributions, token_contributions
from tests.attribution.test_inherent import snapshot
from tests.conftest import randomize, small_config


@pytest.mark.parametrize("options", [{}, {"position": "emb"}, {"attention": "standard"}])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_complete_at_every_block(options, block, images):
    model = randomize(create_model(small_config(**options))).double().eval()
    before = snapshot(model)
    to_logit = token_contributions(model, images, block, 3)
    assert to_logit.map.shape == (4, 4, 4)
    scale = to_logit.map.abs().sum((1, 2)) + 1
    assert (to_logit.completeness_error() < 1e-9 * scale).all()
    torch.testing.assert_close(to_logit.logit, model(images)[:, 3].detach())
    from_input = input_contributions(model, images, block, token=5)
    assert from_input.map.shape == (4, 16, 16)
    assert (from_input.completeness_error() < 1e-9 * (from_input.logit + 1)).all()
    assert snapshot(model) == before


def test_residual_counts_only_what_lies_between(images):
    model = randomize(create_model(small_config(position="emb"))).double().eval()
    assert (explain(model, images, 0).residual != 0).all()
    # The embedding enters before block 0: its share is already in the tokens.
    assert (token_contributions(model, images, 0, 0).residual == 0).all()
    assert (input_contributions(model, images, 1, 0).residual != 0).all()


def test_the_two_halves_make_the_whole(model, images):
    """W(x) = (logit ← token) · (token ← input), summed over tokens: the chain itself."""
    from bcosvit import frozen_view

    view = frozen_view(model)
    encoded = model.encoding(images).requires_grad_()
    tokens = view.blocks[0](view.position(view.tokenizer(encoded)))
    logit = view.logit(view.head(view.blocks[1](tokens).mean(1)))[:, 3]
    (outer,) = torch.autograd.grad(logit.sum(), tokens, retain_graph=True)
    (inner,) = torch.autograd.grad((outer * tokens).sum(), encoded)
    torch.testing.assert_close(inner, explain(model, images, 3).weights)
    scores = (outer * tokens).sum(-1).detach().unflatten(1, (4, 4))
    torch.testing.assert_close(scores, token_contributions(model, images, 1, 3).map)


def test_last_block_is_the_head_alone(model, images):
    """Behind the last block tokens are only averaged: contributions are linear in each token."""
    result = token_contributions(model, images, 2, 1)
    with torch.no_grad():
        tokens = model.blocks(model.position(model.tokens(images)))
        pooled = tokens.mean(1)
        head = model.head
        unit = head.weight[1] / head.weight[1].norm()
        cos = (pooled @ unit).abs() / (pooled.square().sum(1) + head.eps).sqrt()
        expected = model.logit.scale * head.scale * cos[:, None] * (tokens @ unit) / 16
    torch.testing.assert_close(result.map.flatten(1), expected)


def test_bad_places(model, images):
    with pytest.raises(ValueError, match="block = 3 does not exist; allowed are 0 to 2"):
        token_contributions(model, images, 3)
    with pytest.raises(ValueError, match="token = 16 does not exist; allowed are 0 to 15"):
        input_contributions(model, images, 1, 16)
    with pytest.raises(ValueError, match="token = -1 does not exist"):
        input_contributions(model, images, 1, -1)
    with pytest.raises(ValueError, match="one class a sample"):
        token_contributions(model, images, 1, "all")


@pytest.mark.parametrize("token", [0, 15])
def test_first_and_last_token(images, token):
    """Where there are more tokens than a token has numbers."""
    model = randomize(create_model(small_config(width=8, num_heads=2))).double().eval()
    found = input_contributions(model, images, 1, token)
    assert found.target.tolist() == [token] * len(images)
    assert (found.completeness_error() < 1e-9 * (found.logit + 1)).all()


def test_results_keep_no_graph(model, images):
    found = token_contributions(model, images, 1, 3)
    assert not any(part.requires_grad for part in (found.map, found.logits, found.logit))

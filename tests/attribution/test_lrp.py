"""LRP: each rule conserves relevance; a two-token example computed by hand; the whole model."""

import numpy as np
import pytest
import torch

from bcosvit import create_model, explain
from bcosvit.attribution.lrp import linear_rule, pool_rule, product_rule, propagate, skip_rule
from tests.conftest import randomize, small_config, tiny_config
from tests.reference import attention as slow


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(relevance: torch.Tensor) -> torch.Tensor:
    return relevance.flatten(1).sum(1)


def test_linear_rule():
    relevance, x, weight = randn(4, 3, 5), randn(4, 3, 7), randn(5, 7)
    back = linear_rule(relevance, x, weight)
    torch.testing.assert_close(total(back), total(relevance))
    # Output by output: shares of the positive products.
    expected = np.zeros((4, 3, 7))
    for n, t, c in np.ndindex(4, 3, 5):
        products = x[n, t].numpy() * weight[c].numpy()
        products = np.maximum(products, 0) if (products > 0).any() else products
        expected[n, t] += relevance[n, t, c].item() * products / products.sum()
    np.testing.assert_allclose(back.numpy(), expected, rtol=1e-9)


def test_linear_rule_by_hand():
    """x = (1, −2), w = (3, 1), so the products are 3 and −2: all relevance goes to the first."""
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]])
    assert linear_rule(torch.tensor([[6.0]]), x, weight).tolist() == [[6.0, 0.0]]
    weight = torch.tensor([[3.0, -1.0]])
    torch.testing.assert_close(
        linear_rule(torch.tensor([[5.0]]), x, weight), torch.tensor([[3.0, 2.0]])
    )


def test_pool_rule():
    relevance, tokens = randn(4, 6), randn(4, 9, 6)
    back = pool_rule(relevance, tokens)
    torch.testing.assert_close(total(back), total(relevance))
    assert (back[tokens < 0] == 0).all()


def test_product_rule():
    relevance, left, right = randn(4, 2, 3, 5), randn(4, 2, 3, 6), randn(4, 2, 6, 5)
    parts = product_rule(relevance, left, right)
    for part in parts:
        torch.testing.assert_close(total(part), total(relevance) / 2)


def test_product_rule_by_hand():
    """Two tokens: A = (¼, ¾) reads v = (2, 4): of 3.5, token one makes 0.5 and token two 3."""
    matrix, value = torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[2.0], [4.0]]])
    a, v = product_rule(torch.tensor([[[7.0]]]), matrix, value)
    torch.testing.assert_close(a, torch.tensor([[[0.5, 3.0]]]))
    torch.testing.assert_close(v, torch.tensor([[[0.5], [3.0]]]))


def test_skip_rule():
    relevance, x, branch = randn(4, 3, 5), randn(4, 3, 5), randn(4, 3, 5)
    first, second = skip_rule(relevance, x, branch)
    torch.testing.assert_close(total(first) + total(second), total(relevance))
    # One sample's totals are not another's: alone it gets the same.
    alone = skip_rule(relevance[2:3], x[2:3], branch[2:3])
    torch.testing.assert_close(first[2:3], alone[0])
    torch.testing.assert_close(second[2:3], alone[1])


def test_skip_rule_by_hand():
    """1 + 3 shares relevance 8 as 2 and 6."""
    one, three = torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])
    first, second = skip_rule(torch.tensor([[[8.0]]]), one, three)
    assert (first.item(), second.item()) == (2.0, 6.0)


@pytest.mark.parametrize("position", ["none", "emb", "add", "mul"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_whole_model_conserves_relevance(position, hybrid):
    if hybrid:
        config = tiny_config(family="conventional", flavor="conventional", position=position)
    else:
        config = small_config(family="conventional", position=position)
    model = randomize(create_model(config)).double().eval()
    side = config.image_size[0]
    images = torch.rand(3, 3, side, side, dtype=torch.float64)
    result = propagate(model, images, torch.tensor([0, 2, 1]))
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(total(result.tokens), ones, rtol=1e-6, atol=1e-6)


def test_two_tokens_by_hand():
    """A model small enough for pencil and paper, with every layer but attention an identity.

    One head of width 1, V = U = 1, no query and key: A = ½ everywhere. Tokens 1 and 3 are both
    read as 2; the last skip gives 3 and 5, pooled 4. Relevance 1 splits 3/8 : 5/8 over the pooled
    tokens; at the skip 1:2 and 3:2 of it goes past and into the branch; A's share is half of the
    branch's, split ½·1 : ½·3 between the keys.
    """
    relevance = pool_rule(torch.tensor([[1.0]]), torch.tensor([[[3.0], [5.0]]]))
    torch.testing.assert_close(relevance, torch.tensor([[[3 / 8], [5 / 8]]]))
    x, attended = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[2.0], [2.0]]])
    past, branch = skip_rule(relevance, x, attended)
    torch.testing.assert_close(past, torch.tensor([[[1 / 8], [3 / 8]]]))
    torch.testing.assert_close(branch, torch.tensor([[[2 / 8], [2 / 8]]]))
    matrix, value = product_rule(branch, torch.full((1, 2, 2), 0.5), x)
    expected = torch.tensor([[[1 / 32, 3 / 32], [1 / 32, 3 / 32]]])
    torch.testing.assert_close(matrix, expected)
    torch.testing.assert_close(value, torch.tensor([[[2 / 32], [6 / 32]]]))
    assert (past.sum() + matrix.sum() + value.sum()).item() == pytest.approx(1.0)


def test_maps_from_relevance():
    model = randomize(create_model(small_config(family="conventional"))).double().eval()
    images, target = torch.rand(3, 3, 16, 16, dtype=torch.float64), torch.tensor([4, 0, 2])
    result = propagate(model, images, target)
    from bcosvit.attribution.attention import upsample

    for i in range(3):
        r = [relevance[i].numpy() for relevance in result.attentions]
        g = [gradient[i].numpy() for gradient in result.gradients]
        scores = torch.from_numpy(slow.chefer(r, g))[None]
        expected = upsample(scores, model, (16, 16))[0]
        torch.testing.assert_close(explain(model, images, target, "cheferlrp").map[i], expected)
        last = torch.from_numpy(np.maximum(r[-1], 0).mean((0, 1)))[None]
        torch.testing.assert_close(
            explain(model, images, target, "plrp").map[i], upsample(last, model, (16, 16))[0]
        )


def test_forward_is_the_models_own():
    """The pass that LRP retraces gives the gradients of the model itself."""
    from bcosvit.attribution.attention import observe

    model = randomize(create_model(small_config(family="conventional"))).double().eval()
    images, target = torch.rand(2, 3, 16, 16, dtype=torch.float64), torch.tensor([4, 0])
    seen = observe(model, images)
    expected = seen.gradients(target, seen.attentions)
    for ours, theirs in zip(propagate(model, images, target).gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)

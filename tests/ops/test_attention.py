"""Attention with priors against the definition, loop by loop."""

import numpy as np
import pytest
import torch

from bcosvit.ops import attention_matrix, prior_attention
from tests.reference.dynamic import softmax


@pytest.mark.parametrize("kind", ["none", "add", "mul"])
def test_prior_attention(kind):
    q, k, v = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    prior = torch.randn(4, 5, 5, dtype=torch.float64)
    out = prior_attention(q, k, v, None if kind == "none" else prior, kind=kind)
    for n in range(2):
        for h in range(4):
            scores = q[n, h].numpy() @ k[n, h].numpy().T / np.sqrt(6)
            bias = prior[h].numpy()
            a = {
                "none": softmax(scores),
                "add": softmax(scores + bias),
                "mul": softmax(scores) * softmax(bias),
            }[kind]
            np.testing.assert_allclose(out[n, h].numpy(), a @ v[n, h].numpy(), rtol=1e-9)


def test_rows_of_mul_sum_to_less_than_one():
    q, k = torch.randn(2, 1, 2, 5, 6)
    rows = attention_matrix(q, k, torch.randn(2, 5, 5), "mul").sum(-1)
    assert (rows < 1).all()
    assert (rows > 0).all()


def test_frozen_attention_passes_gradient_to_values_alone():
    q, k, v = (torch.randn(1, 2, 5, 6, requires_grad=True) for _ in range(3))
    prior = torch.randn(2, 5, 5, requires_grad=True)
    out = prior_attention(q, k, v, prior, kind="mul", frozen=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v, prior), allow_unused=True)
    assert [grad is None for grad in grads] == [True, True, False, True]

"""Attention with priors against the definition, loop by loop."""

import numpy as np
import pytest
import torch

from bcosvit.ops import attention_cpu, attention_matrix, prior_attention
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


@pytest.mark.parametrize("few", [1, 60, 2**18], ids=["one head", "two heads", "all heads"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["none", "add", "mul"])
def test_on_a_cpu_a_few_heads_at_a_time_are_the_equation(monkeypatch, kind, frozen, few):
    monkeypatch.setattr(attention_cpu, "BLOCK", few)
    monkeypatch.setattr(attention_cpu, "LEAST", 1)
    # As heads lie in memory.
    q, k, v = torch.randn(3, 2, 5, 3, 6, dtype=torch.float64).transpose(2, 3)
    prior = None if kind == "none" else torch.randn(3, 5, 5, dtype=torch.float64)
    given = [t.clone() for t in (q, k, v)]
    expected = prior_attention(q, k, v, prior, kind=kind, backend="reference")
    assert attention_cpu.suits(q, k, v, prior, frozen)
    found = prior_attention(q, k, v, prior, kind=kind, frozen=frozen)
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(t, before) for t, before in zip((q, k, v), given, strict=True))
    if not frozen:
        return
    v.requires_grad_()
    seeds = torch.randn(4, *found.shape, dtype=torch.float64)

    def rows(backend):
        out = prior_attention(q, k, v, prior, kind=kind, frozen=True, backend=backend)
        one = [torch.autograd.grad(out, v, s, retain_graph=True)[0] for s in seeds]
        several = torch.vmap(lambda s: torch.autograd.grad(out, v, s, retain_graph=True)[0])(seeds)
        return out.detach(), torch.stack(one), several

    for ours, theirs in zip(rows("auto"), rows("reference"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_differentiated_narrow_or_rounded_is_the_reference(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 5, 6)
    # Few tokens do not pay.
    assert not attention_cpu.suits(q, k, v, None, False)
    monkeypatch.setattr(attention_cpu, "LEAST", 50)
    assert attention_cpu.suits(q, k, v, None, False)
    assert not attention_cpu.suits(q.clone().requires_grad_(), k, v, None, False)
    assert attention_cpu.suits(q.clone().requires_grad_(), k, v, None, True)
    assert not attention_cpu.suits(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not attention_cpu.suits(q, k, v, None, True)
    monkeypatch.setattr(attention_cpu, "rounds", lambda device, op: True)
    assert not attention_cpu.suits(q, k, v, None, True)
    assert attention_cpu.suits(q, k, v, None, False)
    with pytest.raises(AssertionError, match="needs a prior"):
        prior_attention(q, k, v, None, kind="mul")

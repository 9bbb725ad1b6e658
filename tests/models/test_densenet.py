"""Dense blocks: with and without concatenations."""

import pytest
import torch

from bcosvit import create_model
from bcosvit.models import densenet
from bcosvit.nn import prepared_view
from bcosvit.nn.views import view
from tests.conftest import randomize, tiny_config


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("flavor", ["v1", "v2"])
def test_writing_in_place_changes_nothing(flavor, backend, monkeypatch):
    """What a GPU does where nothing is differentiated, done on a CPU."""
    if backend == "triton":
        pytest.importorskip("triton")
    model = randomize(create_model(tiny_config(flavor=flavor))).eval()
    images = torch.rand(2, 3, 32, 32)
    calls = []

    def in_place(x, block):
        calls.append(block)
        return True

    with torch.no_grad():
        expected = model(images)
        monkeypatch.setattr(densenet, "_writes_in_place", in_place)
        found = view(model, mark=lambda module: {"backend": backend})(images)
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_prepared_view_predicts_the_same_and_stays_as_it_is():
    model = randomize(create_model(tiny_config())).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        ready = prepared_view(model)
        torch.testing.assert_close(ready(images), before)
        model.head.weight.neg_()
        torch.testing.assert_close(ready(images), before)
        assert not torch.allclose(model(images), before)
    assert not any(p.requires_grad for p in ready.parameters())
    assert all(p.requires_grad for p in model.blocks.parameters())


@pytest.mark.parametrize("flavor", ["v1", "v2"])
def test_logits_of_an_untrained_network_differ(flavor):
    """Otherwise it starts, and stays, at the same answer for every image."""
    model = create_model("bcos_densenet121", flavor=flavor, num_classes=10)
    with torch.no_grad():
        logits = model(torch.rand(4, 3, 64, 64))
    assert logits.std(1).mean() > 1e-2
    assert logits.abs().max() < 20

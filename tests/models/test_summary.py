"""Costs counted on the meta device against a real model."""

import pytest
import torch

from bcosvit import create_model
from bcosvit.models import model_config
from bcosvit.models.summary import summarize
from tests.conftest import small_config, tiny_config


def test_counts_are_those_of_the_model():
    config = tiny_config()
    model, summary = create_model(config), summarize(config, batch=2)
    assert sum(part.parameters for part in summary.parts) == sum(
        p.numel() for p in model.parameters()
    )
    assert sum(part.trained for part in summary.parts) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    assert summary.grid == (2, 2)
    by_name = {part.name: part for part in summary.parts}
    assert by_name["tokenizer.backbone"].layers == config.backbone.convolutions_at(2)
    # The head: one multiply-add for each weight.
    assert by_name["head"].flops == 2 * 8 * 3


def test_flops_of_the_conventional_vit_are_the_known_ones():
    """ViT-B at 196 tokens without its patch layer: 17.4 G multiply-adds."""
    parts = {part.name: part for part in summarize(model_config("vit_b_87")).parts}
    assert parts["blocks"].flops / 2 == pytest.approx(17.4e9, rel=0.02)
    assert parts["tokenizer.backbone"].trained == 0


def test_training_memory_counts_what_autograd_keeps():
    config = small_config()
    model = create_model(config)
    kept = {}

    def pack(tensor):
        base = tensor if tensor._base is None else tensor._base
        if not any(base is p for p in model.parameters()):
            kept[id(base)] = base
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.rand(1, 3, 16, 16)).sum()
    activations = sum(t.numel() * t.element_size() for t in kept.values())
    one, three = summarize(config, batch=1), summarize(config, batch=3)
    assert (three.training_bytes - one.training_bytes) / 2 == pytest.approx(activations, rel=0.05)
    assert one.inference_bytes < one.training_bytes

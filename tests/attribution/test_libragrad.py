"""LibraGrad: shares of tokens add up, and agree with a transformer that is written out."""

import torch
import torch.nn.functional as F

import bcosvit
from bcosvit.attribution.libragrad import LibraGrad
from bcosvit.nn import frozen_view


def transformer(family, **options):
    torch.manual_seed(0)
    sizes = {"width": 12, "num_heads": 3, "depth": 2, "image_size": 16, "num_classes": 4}
    config = bcosvit.ModelConfig(
        family=family, backbone=bcosvit.StemConfig(widths=(8, 8)), **sizes, **options
    )
    model = bcosvit.create_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def written_out(model, images, target):
    """Scores of tokens of a conventional model, every constant factor computed beforehand."""
    with torch.no_grad():
        x = model.position(model.tokens(images))
    leaf = x.clone().requires_grad_()
    x = leaf
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        normed = _norm(x, attention.norm)
        q, k, v = (
            layer(normed).unflatten(-1, (3, -1)).transpose(1, 2)
            for layer in (attention.query, attention.key, attention.value)
        )
        matrix = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).detach()
        x = x + attention.project((matrix @ v).transpose(1, 2).flatten(2))
        hidden = mlp.up(_norm(x, mlp.norm))
        gate = (F.gelu(hidden) / hidden).detach()
        x = x + mlp.down(gate * hidden)
    logits = model.head(_norm(x, model.norm).mean(1))
    logits[torch.arange(len(target)), target].sum().backward()
    return (leaf * leaf.grad).sum(-1).detach(), logits.detach()


def _norm(x, norm):
    centered = x - x.mean(-1, keepdim=True)
    scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt().detach()
    return centered * scale * norm.weight + norm.bias


def test_conventional_transformers_as_written_out():
    model, images, target = transformer("conventional"), torch.rand(2, 3, 16, 16), [1, 3]
    scores, logits = written_out(model, images, target)
    torch.testing.assert_close(logits, model(images))
    expected = F.interpolate(scores.view(2, 1, 4, 4) / 16, (16, 16), mode="bilinear")[:, 0]
    torch.testing.assert_close(LibraGrad()(model, images, torch.tensor(target)).map, expected)


def test_without_biases_shares_add_up_to_the_logit():
    model, images = transformer("conventional"), torch.rand(2, 3, 16, 16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not name.startswith("tokenizer"):
            torch.nn.init.zeros_(parameter)
    found = LibraGrad()(model, images, torch.tensor([0, 2]))
    torch.testing.assert_close(found.map.sum((1, 2)), model(images)[[0, 1], [0, 2]])


def test_tokens_of_a_bcos_transformer_get_their_contributions():
    model, images = transformer("bcos"), torch.rand(2, 3, 16, 16)
    tokens = model.tokens(images).detach().requires_grad_()
    logits = frozen_view(model).from_tokens(tokens)
    (rows,) = torch.autograd.grad(logits[:, 3].sum(), tokens)
    contributions = (tokens * rows).sum(-1).detach()
    expected = F.interpolate(contributions.view(2, 1, 4, 4) / 16, (16, 16), mode="bilinear")[:, 0]
    found = LibraGrad()(model, images, torch.tensor([3, 3]))
    torch.testing.assert_close(found.map, expected)
    torch.testing.assert_close(contributions.sum(1) + model.config.logit_bias, logits[:, 3])

"""The command line with one more method: AttnLRP (Achtibat et al., ICML 2024) on conventional ViTs.

pip install --no-deps lxt zennit    # not a dependency; its license grants no patent rights
python benchmarks/attnlrp.py reproduce conventional --methods inherent,ixg,attnlrp ...
python benchmarks/attnlrp.py evaluate --weights vit.safetensors --methods ixg,attnlrp ...
python benchmarks/attnlrp.py --check    # conservation of relevance on a small model, seconds

The rules are those of the authors' package `lxt`, put on a view of our model: LayerNorm with a
constant scale, GELU by the identity rule, a quarter of the gradient through queries and keys and
half of it through values, and zennit's γ rule for linear layers, which the package advises for
vision transformers. As for the other methods that explain tokens, scores belong to the tokens that
enter the first block, and queries are averaged by the model's average pooling.
"""

import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lxt
import torch
from torch import Tensor, nn

import bcosvit
import bcosvit._torchvision  # before zennit, which imports torchvision as it is
from bcosvit.attribution import Attribution, Explainer
from bcosvit.attribution.attention import as_transformer, upsample
from bcosvit.attribution.base import register_explainer, resolve_target
from bcosvit.models.vit import VisionTransformer
from bcosvit.nn.attention import Attention
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.views import unwrapped, view
from bcosvit.ops import attention_matrix

# The package itself imports language models of `transformers`, of which nothing is needed here.
_efficient = types.ModuleType("lxt.efficient")
_efficient.__path__ = [str(Path(*lxt.__path__, "efficient"))]
sys.modules["lxt.efficient"] = _efficient
from lxt.efficient.patches import layer_norm_forward  # noqa: E402
from lxt.efficient.rules import divide_gradient, identity_rule_implicit  # noqa: E402
from lxt.efficient.zennit_patches import monkey_patch_zennit  # noqa: E402
from zennit.composites import LayerMapComposite  # noqa: E402
from zennit.rules import Gamma  # noqa: E402

monkey_patch_zennit()


@register_explainer("attnlrp")
@dataclass(frozen=True)
class AttnLRP(Explainer):
    """Relevance of tokens by AttnLRP's rules."""

    title = "AttnLRP"
    color = "#b5651d"

    gamma: float = 0.05
    """Of the rule for linear layers; 0 is the ε rule."""

    def applies_to(self, model: Any) -> bool:
        return isinstance(model, VisionTransformer) and model.config.family == "conventional"

    def __call__(self, model: Any, images: Tensor, target: Any = None) -> Attribution:
        transformer = as_transformer(unwrapped(model), "AttnLRP")
        if transformer.config.family != "conventional":
            raise ValueError("AttnLRP has no rule for B-cos layers; give a conventional model.")
        patched = view(transformer).eval()
        for module in patched.modules():
            # zennit puts parameters back, which those of a view without gradients are not.
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = nn.Parameter(value.detach(), requires_grad=False)
            if isinstance(module, LayerNorm):
                module.forward = types.MethodType(layer_norm_forward, module)
            elif isinstance(module, nn.GELU):
                module.forward = partial(identity_rule_implicit, nn.GELU())
            elif isinstance(module, Attention):
                module.forward = types.MethodType(_attention, module)
        linear = [(nn.Linear, Gamma(self.gamma))] if self.gamma else []
        size = (images.shape[-2], images.shape[-1])
        with torch.inference_mode(False), torch.enable_grad():
            with torch.no_grad():
                tokens = patched.position(patched.tokens(images))
            tokens.requires_grad_()
            with LayerMapComposite(linear).context(patched):
                last = patched.norm(patched.blocks(tokens))
                logits = patched.classify(last, patched.config.grid_of(*size))
                classes = resolve_target(target, logits.detach())
                logit = logits.gather(1, classes[:, None]).sum()
                (gradient,) = torch.autograd.grad(logit, tokens)
        scores = (tokens * gradient).sum(-1).detach()
        return Attribution(
            map=upsample(scores, transformer, size), target=classes, logits=logits.detach()
        )


def _attention(self: Attention, tokens: Tensor) -> Tensor:
    normed = self.norm(tokens)
    query = divide_gradient(self.split(self.query(normed)), 4)
    key = divide_gradient(self.split(self.key(normed)), 4)
    value = divide_gradient(self.split(self.value(normed)), 2)
    matrix = attention_matrix(query, key, self.prior.logits, self.prior.kind)
    return self.project((matrix @ value).transpose(1, 2).flatten(2))


def check() -> None:
    """Without biases relevance is conserved up to what softmax absorbs: printed beside logits."""
    torch.manual_seed(0)
    stem = bcosvit.StemConfig(widths=(8,))
    sizes = {"width": 12, "num_heads": 3, "depth": 2, "image_size": 16, "position": "none"}
    config = bcosvit.ModelConfig(family="conventional", backbone=stem, **sizes)
    model = bcosvit.create_model(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    images = torch.rand(3, 3, 16, 16)
    for gamma in (0.0, 0.05):
        found = AttnLRP(gamma)(model, images)
        relevance = found.map.sum((1, 2)) / 4
        print(f"gamma {gamma}: relevance {relevance.tolist()}")
    print(f"logits {model(images).amax(1).tolist()}")


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        from bcosvit.cli import main as command

        command()


if __name__ == "__main__":
    main()

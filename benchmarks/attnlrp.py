"""Measures AttnLRP (Achtibat et al., ICML 2024) beside this library's methods on conventional ViTs.

pip install --no-deps lxt zennit    # not a dependency; its license grants no patent rights
python benchmarks/attnlrp.py --weights vit.safetensors --data imagenette/ --out attnlrp
python benchmarks/attnlrp.py --check    # conservation of relevance on a small model, seconds

The rules are those of the authors' package `lxt`, put on a view of our model: LayerNorm with a
constant scale, GELU by the identity rule, a quarter of the gradient through queries and keys and
half of it through values, and zennit's γ rule for linear layers, which the package advises for
vision transformers. As for the other methods that explain tokens, scores belong to the tokens that
enter the first block, and queries are averaged by the model's average pooling.
"""

import argparse
import json
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
from bcosvit.attribution import Attribution
from bcosvit.attribution.attention import as_transformer, upsample
from bcosvit.attribution.base import resolve_target
from bcosvit.data.labeled import labeled_images
from bcosvit.data.sources import open_source
from bcosvit.metrics import METRICS, configure, evaluate
from bcosvit.nn.attention import Attention
from bcosvit.nn.norm import LayerNorm
from bcosvit.nn.views import unwrapped, view
from bcosvit.ops import attention_matrix
from bcosvit.predictor import Predictor

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


@dataclass(frozen=True)
class AttnLRP:
    """Relevance of tokens by AttnLRP's rules."""

    gamma: float = 0.05
    """Of the rule for linear layers; 0 is the ε rule."""

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights")
    parser.add_argument("--data")
    parser.add_argument("--out", default="attnlrp")
    parser.add_argument("--gamma", type=float, default=0.05)
    parser.add_argument("--methods", default="ixg,gradsam,cheferlrp,libragrad")
    parser.add_argument("--metrics", default="localization,perturbation,additivity")
    parser.add_argument("--grids", type=int, default=50)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        check()
        return
    predictor = Predictor.load(arguments.weights, "auto")
    names = predictor.class_names if predictor.has_class_names else None
    source = open_source(arguments.data, only_val=True)
    images = labeled_images(
        source,
        "val",
        names,
        predictor.transform,
        num_classes=len(predictor.class_names),
        class_ids=predictor.class_ids,
    )
    if arguments.limit:
        images.limit(arguments.limit, seed=0)
    metrics = []
    for name in arguments.metrics.split(","):
        metric = METRICS.get(name)
        amount = "grids" if hasattr(metric, "grids") else "images"
        metrics.append(configure(metric, {amount: getattr(arguments, amount)}))
    methods = [AttnLRP(arguments.gamma), *arguments.methods.split(",")]
    found = evaluate(
        predictor.model, images, methods, metrics=metrics, batch_size=arguments.batch_size
    )
    for name, result in found.results.items():
        for title, column in result.columns().items():
            for method, each in column.items():
                print(
                    f"{name}, {title}, {method}: {each.mean:.3f} [{each.low:.3f}, {each.high:.3f}]"
                )
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"command": sys.argv, "summary": found.summary()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

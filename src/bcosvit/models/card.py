"""The model card: what a repository of the hub shows first."""

import json
from collections.abc import Mapping, Sequence

from bcosvit.models.config import Config, DenseNetConfig, StemConfig

CLASSES_KEY = "bcosvit.classes"
"""Under which training writes the classes' names into a weights file, a JSON list."""
RUN_KEY = "bcosvit.run"
"""Under which training writes into a weights file how it was trained, as JSON."""

_HEAD = """---
library_name: bcosvit
license: apache-2.0
pipeline_tag: image-classification
tags:
- image-classification
- explainability
- {tag}
---
"""

_EXPLAINED = """Every prediction is its own explanation: `logits = W(x)·x + residual + bias`,
exactly, so each pixel has a contribution to each class, and they add up to the logit.
"""

_MOST = 20
"""Classes that are named; of more, the number."""


def card_of(
    config: Config, notes: Mapping[str, str], pictures: Sequence[str], repo_id: str | None
) -> str:
    """A card in Markdown with the hub's front matter.

    ``notes`` are those of the weights file, ``pictures`` the names of files beside the card.
    """
    bcos = config.family == "bcos"
    where = f"hf://{repo_id}" if repo_id else "model.safetensors"
    rows = {"input": _input(config), "classes": _classes(config, notes), **_run(notes)}
    parts = [
        _HEAD.format(tag="b-cos" if bcos else "vision-transformer"),
        f"# {title(config)}\n",
        _EXPLAINED if bcos else "A conventional model: explanations of it are post hoc.\n",
        *(f"![Drawn scenes and what speaks for their class]({name})\n" for name in pictures),
        "| | |\n|---|---|\n"
        + "\n".join(f"| {key} | {text} |" for key, text in rows.items())
        + "\n",
        "```python\nimport bcosvit\n\n"
        f'model = bcosvit.load("{where}")\n'
        "logits = model(images)  # RGB in [0, 1]; the model encodes it\n"
        + ("attribution = bcosvit.explain(model, images)\n" if bcos else "")
        + "```\n",
    ]
    return "\n".join(parts)


def title(config: Config) -> str:
    """'B-cos ViT, 192 wide, 12 blocks, on a DenseNet'"""
    kind = "B-cos" if config.family == "bcos" else "Conventional"
    if isinstance(config, DenseNetConfig):
        return f"{kind} DenseNet, flavor {config.flavor}"
    tokenizer = "a convolutional stem" if isinstance(config.backbone, StemConfig) else "a DenseNet"
    return f"{kind} ViT, {config.width} wide, {config.depth} blocks, on {tokenizer}"


def _input(config: Config) -> str:
    if isinstance(config, DenseNetConfig):
        return "RGB in [0, 1]"
    return f"RGB in [0, 1], {config.image_size[0]}×{config.image_size[1]} pixels"


def _classes(config: Config, notes: Mapping[str, str]) -> str:
    names = [str(name) for name in json.loads(notes.get(CLASSES_KEY, "[]"))]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    listed = f": {', '.join(names[:_MOST])}{more}" if names else ""
    return f"{config.num_classes}{listed}"


def _run(notes: Mapping[str, str]) -> dict[str, str]:
    """What training wrote into the weights, where it did."""
    run = json.loads(notes.get(RUN_KEY, "{}"))
    found = {}
    if "recipe" in run:
        found["recipe"] = f"`{run['recipe']}`"
    if "accuracy" in run:
        found["validation accuracy"] = f"{run['accuracy']:.2%}"
    return found

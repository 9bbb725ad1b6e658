"""The model card: the README that stands beside weights, and that the hub shows first."""

from collections.abc import Mapping, Sequence
from typing import Any

from bcosvit.messages import and_more
from bcosvit.models.config import Config
from bcosvit.models.weights import class_names, run_notes

_HEAD = """---
library_name: bcosvit
license: apache-2.0
pipeline_tag: image-classification
tags:
- image-classification
- explainability
- {tag}
---

# {title}

{explained}
"""

_BCOS = """Every prediction is its own explanation: `logits = W(x)·x + residual + bias`,
exactly, so each pixel has a contribution to each class, and they add up to the logit.
"""
_CONVENTIONAL = "This is a conventional model: explanations of it are post hoc.\n"


def model_card(
    config: Config,
    metadata: Mapping[str, str],
    *,
    weights: str = "model.safetensors",
    pictures: Sequence[str] = (),
    details: Mapping[str, str] | None = None,
) -> str:
    """Writes a model card in Markdown with the hub's front matter.

    Args:
        config: The model's config.
        metadata: What is written in the weights file beside the weights.
        weights: What ``bcosvit.load`` is to be called with.
        pictures: Names of image files beside the card that show explained images.
        details: Further rows of the card's table.

    Returns:
        The text of ``README.md``.

    Examples:
        >>> from bcosvit.models import model_config
        >>> print(model_card(model_config("bcos_vit_ti_38"), {}).splitlines()[10])
        # B-cos ViT, 192 wide, 12 blocks, on a DenseNet
    """
    bcos = config.family == "bcos"
    height, width = config.image_size
    names = class_names(metadata, "The model card") or ()
    rows = {
        "input": f"RGB in [0, 1], {height}×{width} pixels",
        "classes": f"{config.num_classes}" + (f": {and_more(names, 20)}" if names else ""),
        **_run(run_notes(metadata, "The model card")),
        **(details or {}),
    }
    head = _HEAD.format(
        tag="b-cos" if bcos else "vision-transformer",
        title=config.title,
        explained=_BCOS if bcos else _CONVENTIONAL,
    )
    shown = "".join(f"![Images and what speaks for their class]({name})\n\n" for name in pictures)
    table = "\n".join(f"| {key} | {text} |" for key, text in rows.items())
    explain = "attribution = bcosvit.explain(model, images)\n" if bcos else ""
    return f"""{head}{shown}| | |
|---|---|
{table}

```python
import bcosvit

model = bcosvit.load("{weights}")
logits = model(images)  # RGB in [0, 1]; the model encodes it
{explain}```
"""


def _run(run: Mapping[str, Any]) -> dict[str, str]:
    """What training wrote into the weights, where it did."""
    found = {key: f"`{run[key]}`" for key in ("data", "recipe") if key in run}
    if "accuracy" in run:
        epoch = f", epoch {run['epoch']}" if "epoch" in run else ""
        found["validation accuracy"] = f"{run['accuracy']:.2%}{epoch}"
    return found

"""How sure a model is of a class: one definition for every metric.

B-cos models are trained with a sigmoid per class, conventional ones with a softmax over all. Both
are the sigmoid of a log-odds, which also orders images where the confidence itself has long been
rounded to 1.
"""

import torch
from torch import Tensor

from bcosvit.models.base import AnyModel


def confidence(model: AnyModel, logits: Tensor) -> Tensor:
    """Of every class [..., K]: sigmoid (B-cos) or softmax (conventional), in float64."""
    logits = logits.double()
    return logits.sigmoid() if model.config.family == "bcos" else logits.softmax(-1)


def log_odds(model: AnyModel, logits: Tensor, labels: Tensor) -> Tensor:
    """log p/(1−p) of each sample's labeled class [B], in float64; p is its ``confidence``."""
    logits, labels = logits.double(), labels.unsqueeze(1)
    own = logits.gather(1, labels).squeeze(1)
    if model.config.family == "bcos":
        return own
    return own - logits.scatter(1, labels, -torch.inf).logsumexp(1)

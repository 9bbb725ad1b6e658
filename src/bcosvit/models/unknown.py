"""How unlike the training photographs a picture is: a calibrated score, stored with the weights.

A classifier names one of its classes for every picture, also for one of a kind that it has never
seen. Its logits tell the two apart better than its largest probability does. Where photographs of
other kinds were at hand, the score is a logistic regression on all logits, fitted to tell both; its
value is the probability that a picture is of another kind, where both are equally frequent. Where
there were photographs of the model's own kinds alone, as in training, it is the share of these
whose largest logit is higher.

Both need the prediction alone, so that the score costs no pass of its own.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KNOWN_SHARE = 0.95
"""The share of photographs of known kinds that is not called unlike."""
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of which `fit_unlike` chooses the weight of the squared coefficients."""
STEPS = 40
"""Largest logits of known photographs that are stored where there are none of other kinds."""


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """A fitted score; ``unlike(logits)`` is from 0, as in training, to 1.

    Examples:
        >>> unlike = fit_known(torch.randn(100, 5))
        >>> bool((unlike(torch.full((1, 5), 9.0)) < unlike(torch.full((1, 5), -9.0))).all())
        True
    """

    threshold: float
    """From here on a picture is called unlike what the model was trained on."""
    weight: tuple[float, ...] = ()
    """One coefficient per logit; empty where the largest logit alone counts."""
    bias: float = 0.0
    quantiles: tuple[float, ...] = ()
    """Evenly spaced quantiles of the largest logit of known photographs."""
    about: dict[str, Any] | None = None
    """What it was fitted and measured on, fit for JSON."""

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Tensor:
        """Returns scores [...] for logits [..., K], in float64."""
        logits = logits.double().cpu()
        if self.weight:
            return (logits @ torch.tensor(self.weight).double() + self.bias).sigmoid()
        # The largest logits in ascending order; between two of them the share is interpolated.
        known = torch.tensor(self.quantiles).double()
        largest = logits.amax(-1)
        above = torch.searchsorted(known, largest.contiguous()).clamp(1, len(known) - 1)
        low, high = known[above - 1], known[above]
        part = ((largest - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
        return 1 - (above - 1 + part) / (len(known) - 1)

    def dumps(self) -> str:
        """Returns the score as JSON."""
        values = {
            "threshold": self.threshold,
            "weight": [float(f"{w:.4g}") for w in self.weight],
            "bias": self.bias,
            "quantiles": [float(f"{q:.6g}") for q in self.quantiles],
            "about": self.about,
        }
        return json.dumps({k: v for k, v in values.items() if v not in ([], None)})

    @classmethod
    def loads(cls, text: str, num_classes: int) -> "Unlike":
        """Reads what `dumps` wrote.

        Raises:
            ValueError: The text is no score for so many classes.
        """
        try:
            values = json.loads(text)
            found = cls(
                threshold=float(values["threshold"]),
                weight=tuple(map(float, values.get("weight", ()))),
                bias=float(values.get("bias", 0.0)),
                quantiles=tuple(map(float, values.get("quantiles", ()))),
                about=dict(values["about"]) if values.get("about") else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"The stored score of unknown kinds cannot be read ({error})."
            ) from error
        numbers = (found.threshold, found.bias, *found.weight, *found.quantiles)
        fits = len(found.weight) == num_classes or (
            not found.weight and 2 <= len(found.quantiles) <= 1000
        )
        if not fits or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"The stored score of unknown kinds is none for {num_classes} classes; fit it "
                f"again with bcosvit calibrate."
            )
        return found


def fit_known(logits: Tensor) -> Unlike:
    """Fits a score to photographs of known kinds alone.

    Args:
        logits: [N, K], of photographs that the model was not trained on.

    Returns:
        The share of these photographs whose largest logit is higher.
    """
    largest = logits.double().amax(1)
    places = torch.linspace(0, 1, min(STEPS, max(len(largest), 2)), dtype=torch.float64)
    return Unlike(
        threshold=KNOWN_SHARE,
        quantiles=tuple(torch.quantile(largest, places).tolist()),
        about={"known": len(largest)},
    )


def fit_unlike(known: Tensor, unknown: Tensor, kinds: Sequence[str] = ()) -> Unlike:
    """Fits a score to photographs of known and of other kinds.

    Penalty, probabilities and threshold are those at which photographs that were left out are told
    apart: one kind after the other, each with a part of the known photographs.

    Args:
        known: Logits [N, K] of photographs of the model's classes.
        unknown: Logits [M, K] of photographs of other kinds.
        kinds: The kind of each of the latter; without kinds, fifths of them are left out.

    Returns:
        The score. Both sides count alike, whatever their numbers.
    """
    known, unknown = known.double(), unknown.double()
    names = sorted(set(kinds))
    parts = max(len(names), 2) if len(names) > 1 else 5
    of_unknown = torch.arange(len(unknown)) % parts
    if len(names) > 1:
        of_unknown = torch.tensor([names.index(kind) for kind in kinds])
    # Neighbors are often alike; so all parts get some of each.
    of_known = torch.arange(len(known)) % parts

    def left_out(penalty: float) -> tuple[float, Tensor, Tensor]:
        inside, outside = known.new_empty(len(known)), unknown.new_empty(len(unknown))
        areas = []
        for part in range(parts):
            a, b = of_known == part, of_unknown == part
            weight, bias = _regression(known[~a], unknown[~b], penalty)
            inside[a], outside[b] = known[a] @ weight + bias, unknown[b] @ weight + bias
            areas.append(auroc(inside[a], outside[b]))
        return sum(areas) / parts, inside, outside

    found = {penalty: left_out(penalty) for penalty in PENALTIES}
    penalty = max(found, key=lambda penalty: found[penalty][0])
    area, inside, outside = found[penalty]
    scale, shift = _calibration(inside, outside)
    weight, bias = _regression(known, unknown, penalty)
    return Unlike(
        threshold=torch.quantile((scale * inside + shift).sigmoid(), KNOWN_SHARE).item(),
        weight=tuple((scale * weight).tolist()),
        bias=scale * bias + shift,
        about={
            "known": len(known),
            "unknown": len(unknown),
            "kinds": names,
            "penalty": penalty,
            "auroc_left_out": round(area, 4),
        },
    )


def auroc(known: Tensor, unknown: Tensor) -> float:
    """The share of pairs of a known and an unknown picture whose scores are in the right order.

    Examples:
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9]))
        0.75
    """
    ordered = torch.sort(known.double()).values
    below = torch.searchsorted(ordered, unknown.double(), right=False)
    up_to = torch.searchsorted(ordered, unknown.double(), right=True)
    return ((below + up_to).double().mean() / 2 / len(known)).item()


def auroc_interval(
    known: Tensor, unknown: Tensor, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """The `auroc` with a bootstrap interval over pictures: its value, lower and upper end."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(scores: Tensor) -> Tensor:
        return scores[torch.randint(len(scores), (len(scores),), generator=generator)]

    values = torch.tensor([auroc(drawn(known), drawn(unknown)) for _ in range(resamples)])
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2])
    low, high = torch.quantile(values, ends).tolist()
    return auroc(known, unknown), low, high


def _regression(known: Tensor, unknown: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Coefficients of the logits and a constant, by logistic regression of standardized logits."""
    known, unknown = known.double(), unknown.double()
    both = torch.cat([known, unknown])
    mean, std = both.mean(0), both.std(0).clamp_min(1e-6)
    a, b = (known - mean) / std, (unknown - mean) / std
    weight = torch.zeros(both.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        mistakes = F.softplus(a @ weight + bias).mean() + F.softplus(-(b @ weight + bias)).mean()
        total: Tensor = mistakes + penalty * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    slope = weight.data / std
    return slope, (bias.data - mean @ slope).item()


def _calibration(known: Tensor, unknown: Tensor) -> tuple[float, float]:
    """The scale and shift that make probabilities of scores (Platt, 1999)."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([scale, shift], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        mistakes = F.softplus(scale * known + shift).mean()
        total: Tensor = mistakes + F.softplus(-(scale * unknown + shift)).mean()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return scale.item(), shift.item()

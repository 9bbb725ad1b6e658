"""The result of every explanation method."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """How much each pixel speaks for a target class.

    Shapes: [B, H, W] and so on; explained for all K classes, an axis K follows B everywhere.
    """

    map: Tensor
    """[B, H, W]: the contribution of each pixel."""
    target: Tensor
    """[B]: the class explained."""
    weights: Tensor | None = None
    """[B, 6, H, W]: W(x)'s row of the target class (inherent explanations)."""
    residual: Tensor | None = None
    """[B]: the share of the model's constants in the logit (inherent explanations)."""
    logit: Tensor | None = None
    """[B]: the logit explained."""
    bias: float = 0.0
    """The part of every logit that is there before any evidence."""

    def completeness_error(self) -> Tensor:
        """|Σ map + residual − (logit − bias)| for each sample, summed in float64."""
        if self.residual is None or self.logit is None:
            raise ValueError(
                "This attribution carries no residual, so it claims no completeness; "
                "only inherent explanations do."
            )
        explained = self.map.double().sum((-2, -1)) + self.residual.double()
        return (explained - (self.logit.double() - self.bias)).abs()

"""Every figure by its name."""

from collections.abc import Mapping

from bcosvit.paper import (
    accuracy,
    attention,
    conventional,
    localization,
    maxout,
    normalization,
    perturbation,
    positional,
    qualitative,
)
from bcosvit.paper.figure import PaperFigure

FIGURES: Mapping[str, PaperFigure] = {
    module.FIGURE.name: module.FIGURE
    for module in (
        # In the order in which they are made: with little time, the main claims first.
        accuracy,
        localization,
        perturbation,
        conventional,
        qualitative,
        normalization,
        positional,
        attention,
        maxout,
    )
}


def find_figures(name: str) -> list[PaperFigure]:
    """One by its name, or all."""
    if name == "all":
        return list(FIGURES.values())
    if name not in FIGURES:
        raise ValueError(f"There is no figure {name!r}; choose all, or {', '.join(FIGURES)}.")
    return [FIGURES[name]]

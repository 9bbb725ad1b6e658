"""Reproduces the paper's figures: `reproduce` trains, measures and draws them.

Importing this package imports Lightning, which takes seconds.
"""

from bcosvit.paper.figures import FIGURES, Figure, Headline, Outcome, Panel, register_figure

# isort: split
# Figures are made in the order of these imports.
from bcosvit.paper import qualitative as _qualitative  # noqa: F401

# isort: split
from bcosvit.paper import faithfulness as _faithfulness  # noqa: F401

# isort: split
from bcosvit.paper.reproduction import Reproduction, reproduce
from bcosvit.paper.study import RunSpec, Study, StudyOptions

__all__ = [
    "FIGURES",
    "Figure",
    "Headline",
    "Outcome",
    "Panel",
    "Reproduction",
    "RunSpec",
    "Study",
    "StudyOptions",
    "register_figure",
    "reproduce",
]

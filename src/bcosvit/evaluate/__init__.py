"""Metrics: how often a model is right, and how right its explanations are.

``evaluate`` runs them all. Each metric is a pure function of attribution maps, a frozen dataclass
of parameters that decides which images it looks at, and a frozen dataclass of what came out.
"""

from bcosvit.evaluate.accuracy import Accuracy, Prediction, most_confident, predict
from bcosvit.evaluate.bootstrap import Bootstrap, Estimate
from bcosvit.evaluate.confidence import confidence, log_odds
from bcosvit.evaluate.localisation import GridPointingGame, Localisation, localisation_score
from bcosvit.evaluate.masks import Masked, energy_inside, pointing
from bcosvit.evaluate.perturbation import Perturbation, PixelPerturbation, area_between
from bcosvit.evaluate.results import Completeness, Evaluation, write_summary, write_table
from bcosvit.evaluate.run import Progress, evaluate
from bcosvit.evaluate.samples import Images, Masks

__all__ = [
    "Accuracy",
    "Bootstrap",
    "Completeness",
    "Estimate",
    "Evaluation",
    "GridPointingGame",
    "Images",
    "Localisation",
    "Masked",
    "Masks",
    "Perturbation",
    "PixelPerturbation",
    "Prediction",
    "Progress",
    "area_between",
    "confidence",
    "energy_inside",
    "evaluate",
    "localisation_score",
    "log_odds",
    "most_confident",
    "pointing",
    "predict",
    "write_summary",
    "write_table",
]

"""Metrics: how often a model is right, and how right its explanations are.

``evaluate`` runs them all. Each metric is a pure function of attribution maps, a frozen dataclass
of parameters that decides which images it looks at, and a frozen dataclass of what came out.
"""

from bcosvit.metrics.accuracy import Accuracy, Prediction, most_confident, predict
from bcosvit.metrics.bootstrap import Bootstrap, Estimate
from bcosvit.metrics.localization import GridPointingGame, Localization, localization_score
from bcosvit.metrics.masks import Masked, energy_inside, pointing
from bcosvit.metrics.perturbation import Perturbation, PixelPerturbation, area_between
from bcosvit.metrics.results import Completeness, Evaluation, write_summary, write_table
from bcosvit.metrics.run import Progress, evaluate
from bcosvit.metrics.samples import Images, Masks
from bcosvit.predictor import confidence, log_odds

__all__ = [
    "Accuracy",
    "Bootstrap",
    "Completeness",
    "Estimate",
    "Evaluation",
    "GridPointingGame",
    "Images",
    "Localization",
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
    "localization_score",
    "log_odds",
    "most_confident",
    "pointing",
    "predict",
    "write_summary",
    "write_table",
]

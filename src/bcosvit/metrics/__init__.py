"""Metrics of models and their explanations; `evaluate` runs them all."""

from bcosvit.metrics.base import (
    METRICS,
    BarChart,
    Chart,
    CurveChart,
    ExplainedBatch,
    Item,
    Metric,
    MetricResult,
    NotDefinedError,
    Prediction,
    configure,
    register_metric,
)
from bcosvit.metrics.statistics import Bootstrap, Estimate, Resampled

# isort: split
# Metrics are listed in the order of these imports.
from bcosvit.metrics.accuracy import Accuracy, AccuracyResult, most_confident

# isort: split
from bcosvit.metrics.grid_pointing import GridPointingGame, GridPointingResult, localization_score

# isort: split
from bcosvit.metrics.perturbation import (
    DeletionInsertion,
    DeletionInsertionResult,
    PerturbationResult,
    PixelPerturbation,
    area_between,
)

# isort: split
from bcosvit.metrics.additivity import Additivity, AdditivityResult

# isort: split
from bcosvit.metrics.randomization import Randomization, RandomizationResult

# isort: split
from bcosvit.metrics.masks import MaskOverlap, MaskResult, energy_inside, pointing

# isort: split
from bcosvit.metrics.evaluation import (
    Completeness,
    Evaluation,
    Progress,
    evaluate,
    name_metrics,
    obstacles,
    write_summary,
    write_table,
)
from bcosvit.metrics.kept import KeptScores
from bcosvit.metrics.loader import Images, Masks

__all__ = [
    "METRICS",
    "Accuracy",
    "AccuracyResult",
    "Additivity",
    "AdditivityResult",
    "BarChart",
    "Bootstrap",
    "Chart",
    "Completeness",
    "CurveChart",
    "DeletionInsertion",
    "DeletionInsertionResult",
    "Estimate",
    "Evaluation",
    "ExplainedBatch",
    "GridPointingGame",
    "GridPointingResult",
    "Images",
    "Item",
    "KeptScores",
    "MaskOverlap",
    "MaskResult",
    "Masks",
    "Metric",
    "MetricResult",
    "NotDefinedError",
    "PerturbationResult",
    "PixelPerturbation",
    "Prediction",
    "Progress",
    "Randomization",
    "RandomizationResult",
    "Resampled",
    "area_between",
    "configure",
    "energy_inside",
    "evaluate",
    "localization_score",
    "most_confident",
    "name_metrics",
    "obstacles",
    "pointing",
    "register_metric",
    "write_summary",
    "write_table",
]

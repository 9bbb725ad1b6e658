"""What every metric is and what it returns, and the registry of all metrics.

A metric is an object that describes itself: its name and title, which images it looks at, how it
scores them, and how its result is summarized, tabulated and plotted. ``register_metric`` makes it
known everywhere at once: in `evaluate`, its report, the command line and the paper's figures. Other
packages register theirs on import, or by an entry point of the group ``bcosvit.metrics``.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from bcosvit.attribution import Method
from bcosvit.messages import unknown
from bcosvit.metrics.statistics import Bootstrap, Estimate
from bcosvit.models.base import AnyModel
from bcosvit.registry import Registry

FromEncoded = Callable[[Tensor], Tensor]
"""From encoded images to logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model predicts for one image."""

    index: int
    """The image's position in the data set."""
    key: str
    label: int
    predicted: int
    place: int
    """Of the labeled class among all classes by logit; 0 is the first."""
    confidence: float
    """In the labeled class, and so is ``log_odds``."""
    log_odds: float

    @property
    def correct(self) -> bool:
        return self.place == 0


Item = tuple[Prediction, ...]
"""What a metric scores at once: one image, or several that it shows in one picture."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExplainedBatch:
    """Some items of a metric with their explanations."""

    model: AnyModel
    images: Tensor
    """[N, 3, H, W]: what was explained; with several pictures per item they follow each other."""
    labels: Tensor
    """[N]: the classes that were explained."""
    keys: Sequence[str]
    """The names of the images."""
    maps: Mapping[str, Tensor]
    """By method: [N, H, W]."""
    masks: Tensor | None
    """[N, H, W]: the objects' pixels, for metrics that need masks."""
    batch_size: int
    """How many images may pass through the model at once."""
    from_encoded: FromEncoded
    """The model's ``from_encoded``, possibly as a CUDA graph."""
    methods: Sequence[Method] = ()
    """The methods that made the maps, for metrics that explain more than the images."""
    shared: dict[Hashable, Any] = field(default_factory=dict)
    """What metrics leave for others that need the same of these images."""


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """One bar per method."""

    name: str
    axis: str
    values: Mapping[str, Estimate]
    chance: float | None = None
    """Where a dashed line is drawn."""


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """One curve per method."""

    name: str
    title: str
    x_axis: str
    y_axis: str
    positions: Sequence[float]
    curves: Mapping[str, Sequence[Estimate]]


Chart = BarChart | CurveChart


def image_rows(
    images: Sequence[Prediction], columns: Sequence[str], values: Mapping[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """Yields a table with one row per image and method, from values [N, columns] by method."""
    for method, each in values.items():
        for image, row in zip(images, each.tolist(), strict=True):
            yield {
                "index": image.index,
                "key": image.key,
                "label": image.label,
                "method": method,
                **dict(zip(columns, row, strict=True)),
            }


class NotDefinedError(ValueError):
    """A metric has no value for what was measured; the message says why, and what to do."""


class MetricResult(ABC):
    """What a metric found; subclasses are frozen dataclasses."""

    @abstractmethod
    def about(self) -> str:
        """Says in a few sentences what was measured, on how much, and how to read it."""

    @abstractmethod
    def rows(self) -> Iterable[dict[str, Any]]:
        """Yields the table of all scores, one row per image (and method)."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Returns all means with their intervals, fit for JSON."""

    def facts(self) -> dict[str, Estimate]:
        """Returns the means that do not depend on a method, by their titles."""
        return {}

    def columns(self) -> dict[str, Mapping[str, Estimate]]:
        """Returns the means by column title and method; higher is better."""
        return {}

    def charts(self) -> list[Chart]:
        """Returns what to plot."""
        return []

    def samples(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Returns the independent measurements by method, for comparisons between models.

        Each is values [n] and what to divide their mean by, the mean of other values [n] or None.
        """
        return {}


class Metric(ABC):
    """A way to measure a model or its explanations. Subclasses are frozen dataclasses of options.

    `evaluate` predicts all images, asks each metric which of them to look at (``select``), explains
    these by all methods, hands the maps to ``score`` and all scores to ``result``. Metrics that
    explain single images share one explanation of each.

    Examples:
        >>> from bcosvit.metrics import METRICS
        >>> METRICS.get("localization").title
        'Grid pointing game'
    """

    name: ClassVar[str] = ""
    """Set by ``register_metric``."""
    title: ClassVar[str] = ""
    """The class name where it is empty."""
    tiles: ClassVar[int] = 1
    """How many images an item has."""
    explains: ClassVar[bool] = True
    """Whether the metric looks at explanations; one that does not only gets the predictions."""
    needs_masks: ClassVar[bool] = False
    """Whether the metric needs the objects' masks; images without one are left out."""
    default: ClassVar[bool] = True
    """Whether `evaluate` measures it where no metrics are named."""
    version: ClassVar[int] = 1
    """Increased when the metric's numbers change, so that cached ones are measured again."""

    def obstacle(self, num_classes: int) -> str | None:
        """Returns why data with so many classes cannot be measured, or None if they can."""
        return None

    @abstractmethod
    def select(self, predictions: Sequence[Prediction]) -> list[Item]:
        """Chooses the items to score from the predictions of all images."""

    def compose(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Makes the pictures to explain.

        Args:
            images: The items' images [N, tiles, 3, H, W].
            labels: Their labels [N, tiles].

        Returns:
            Pictures, as many per item as the metric likes, and the class to explain for each [P],
            or several [P, C]. With several the scored batch has each picture once per class.
        """
        return images[:, 0], labels[:, 0]

    def score(self, batch: ExplainedBatch) -> dict[str, Tensor]:
        """Scores a batch of items; returns scores [N, ...] by method."""
        raise NotImplementedError(f"{type(self).__name__} explains images but has no score().")

    @abstractmethod
    def result(
        self,
        items: Sequence[Item],
        scores: Mapping[str, Tensor],
        bootstrap: Bootstrap,
        left_out: int = 0,
    ) -> MetricResult:
        """Summarizes the scores.

        Args:
            items: The items that were scored, in the order of ``select``.
            scores: The scores of all items by method, in float64; empty where there are no items.
            bootstrap: How to compute intervals.
            left_out: How many items were left out for want of a mask.

        Returns:
            The result.
        """


METRICS: Registry[Metric] = Registry("metric", group="bcosvit.metrics")
"""All registered metrics by name, with their default options."""

M = TypeVar("M", bound=type[Metric])


def register_metric(name: str) -> Callable[[M], M]:
    """Class decorator that registers a metric with its default options.

    Args:
        name: The name under which users ask for the metric; its table is called ``NAME.csv``.

    Raises:
        ValueError: If the name is taken.
    """

    def register(cls: M) -> M:
        cls.name = name
        cls.title = cls.title or cls.__name__
        METRICS.register(name)(cls())
        return cls

    return register


def configure(metric: Metric, options: Mapping[str, Any]) -> Metric:
    """Returns a metric with other options.

    Args:
        metric: The metric.
        options: Values by field.

    Raises:
        ValueError: If the metric has no such option, or does not allow the value.

    Examples:
        >>> from bcosvit.metrics import METRICS, configure
        >>> configure(METRICS.get("localization"), {"grids": 50}).grids
        50
    """
    fields = [field.name for field in dataclasses.fields(metric)]  # type: ignore[arg-type]
    for option in options:
        if option not in fields:
            raise ValueError(unknown(f"option of {metric.name}", option, fields))
    return dataclasses.replace(metric, **options)  # type: ignore[type-var]

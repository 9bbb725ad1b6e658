"""What a figure of the paper is: the runs it needs, and how it is made of their measurements."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from bcosvit.paper.charts import Chart
from bcosvit.paper.lab import Lab
from bcosvit.paper.sampled import Sampled
from bcosvit.paper.spec import RunSpec
from bcosvit.paper.study import Study

Row = Mapping[str, Any]
"""Of a table: text and plain numbers by column."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """What the paper says, beside what was found here."""

    claim: str
    paper: str
    ours: str
    value: Sampled | None = None
    """The number in ``ours``, where it is one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """A picture of many tiles."""

    name: str
    caption: str
    png: bytes
    size: tuple[int, int]
    """Width and height in pixels."""

    @classmethod
    def of(cls, name: str, image: Image.Image, caption: str) -> "Panel":
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return cls(name=name, caption=caption, png=buffer.getvalue(), size=image.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A figure, made."""

    headlines: Sequence[Headline]
    rows: Sequence[Row]
    """All of the same columns."""
    means: Sequence[Row] = ()
    """Those rows that are to be read first, where there are many."""
    charts: Sequence[Chart] = ()
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure or ablation of the paper."""

    name: str
    title: str
    about: str
    """Which figure it is and how to read it, in a few sentences."""
    runs: Callable[[Study], Sequence[RunSpec]]
    """Transformers, most important first; backbones follow from them."""
    make: Callable[[Lab], Outcome]
    """Measures, or finds measured, and draws."""


def number(value: Sampled | None, digits: int = 3, *, sign: bool = False) -> str:
    """For people: ``2.471 [2.300, 2.650]``."""
    if value is None:
        return "not measured"
    shown = value.estimate()
    plus = "+" if sign else ""
    return (
        f"{shown.mean:{plus}.{digits}f} "
        f"[{shown.low:{plus}.{digits}f}, {shown.high:{plus}.{digits}f}]"
    ).replace("-", "−")


def columns(value: Sampled | None, name: str) -> dict[str, float | None]:
    """A number and its interval as columns of a table."""
    if value is None:
        return {name: None, f"{name} low": None, f"{name} high": None}
    shown = value.estimate()
    return {name: shown.mean, f"{name} low": shown.low, f"{name} high": shown.high}

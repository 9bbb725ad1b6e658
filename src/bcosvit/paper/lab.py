"""Where figures get their numbers: trains and measures what is missing while there is time.

What could not be had is remembered with its reason, and figures are drawn from the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bcosvit.paper.budget import TRAINING_SHARE, Clock, seconds_left
from bcosvit.paper.measure import Loaded, kept, load, measure
from bcosvit.paper.runs import Runs
from bcosvit.paper.spec import RunSpec
from bcosvit.paper.study import Study


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A study at work."""

    runs: Runs
    clock: Clock
    missing: dict[str, str] = field(default_factory=dict)
    """Runs and measurements that there was no time for, and why."""
    used: dict[RunSpec, None] = field(default_factory=dict)
    """Runs that were asked for and found; an ordered set."""

    @property
    def study(self) -> Study:
        return self.runs.study

    def train(self, specs: Sequence[RunSpec]) -> None:
        """Trains these and their backbones, in order, but for those that there is no time for."""
        for spec in self.runs.needed(list(specs)):
            if self.runs.done(spec) is not None:
                continue
            backbone = self.runs.backbone(spec)
            if backbone is not None and self.runs.done(backbone) is None:
                self.missing[spec.label] = f"its backbone {backbone.label} is missing"
            elif (reason := self._too_long(spec)) is not None:
                self.missing[spec.label] = reason
                self.runs.say(f"Leaving out {spec.label}: {reason}")
            else:
                self.runs.train(spec)

    def measure(self, spec: RunSpec, metric: str) -> dict[str, Any] | None:
        """A measurement of a run; None, with its reason kept, where it cannot be had."""
        if self.runs.done(spec) is None:
            self.missing.setdefault(spec.label, "it was not trained")
            return None
        found = kept(self.runs, spec, metric)
        if found is None:
            if self.clock.left() <= 0:
                self.missing[f"{metric} of {spec.label}"] = "the minutes were spent"
                return None
            found = measure(self.runs, spec, metric)
        self.used[spec] = None
        return found

    def load(self, spec: RunSpec) -> Loaded | None:
        """A run's model and pictures; None, with its reason kept, where there is none."""
        if self.runs.done(spec) is None:
            self.missing.setdefault(spec.label, "it was not trained")
            return None
        self.used[spec] = None
        return load(self.runs, spec)

    def _too_long(self, spec: RunSpec) -> str | None:
        if self.clock.minutes is None:
            return None
        takes, left = seconds_left(self.runs, spec), self.clock.left(TRAINING_SHARE)
        if takes <= left:
            return None
        return f"it would take {takes / 60:.1f} minutes, and {max(0.0, left) / 60:.1f} are left"

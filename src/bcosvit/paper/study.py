"""What was asked for: the pictures, the part of the paper's axes, and how much to measure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcosvit.attribution import explainers
from bcosvit.messages import pick
from bcosvit.models.densenet import VARIANTS as BACKBONES
from bcosvit.models.hub import locate
from bcosvit.models.vit import SIZES, TAPS

FLAVORS = ("v2", "v1")
"""Of the B-cos backbone."""

KINDS = ("bcos_densenet121", "densenet121", "bcos_vit", "vit")
"""Of runs, by which they have their recipes."""

PREFIXES = ("model.", "densenet.", "backbone.", *(f"{kind}." for kind in KINDS))
"""Of settings that are not for all recipes."""

BCOS_METHODS = ("inherent", "ixg", "intgrad", "gradcam", "gradsam", "rollout", "finatt")
CONVENTIONAL_METHODS = (*BCOS_METHODS[1:], "cheferlrp", "plrp")
"""The methods that the paper compares, by family."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One reproduction; two calls that agree in all fields but the figure share their runs."""

    data: str
    """As ``open_source`` takes it."""
    out: Path
    """Gets the runs, and a folder a figure."""
    sizes: tuple[str, ...] | None = None
    """Of the transformers; None: those of the paper's figure."""
    taps: tuple[str, ...] | None = None
    """Of the backbones, in convolutions; None: those of the paper's figure."""
    seeds: int = 1
    """Runs of every transformer; backbones are trained once, with seed 0."""
    recipe: str = "paper"
    """See ``schedule``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to recipes; with a prefix to ``model.`` (transformers), ``densenet.`` (backbones),
    ``backbone.`` (the recipes of backbones alone) or a kind of run (the recipe of that alone)."""
    flavor: str = "v2"
    """Of the B-cos backbone."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Weights of backbones that need not be trained, by the backbone's name: files, or whatever
    else ``load`` takes."""
    methods: tuple[str, ...] | None = None
    """Explanations to compare, where they apply; None: the paper's."""
    grids: int = 250
    images: int = 250
    """To perturb."""
    limit: int | None = None
    """Draw so many validation pictures; None: all."""
    batch: int = 32
    """Pictures in one pass of an evaluation."""
    device: str = "auto"

    def __post_init__(self) -> None:
        known = {"sizes": tuple(SIZES), "taps": tuple(TAPS), "methods": explainers()}
        for name, allowed in known.items():
            given = getattr(self, name)
            if given is not None:
                pick(",".join(given), allowed, name.rstrip("s"))
        for name in ("seeds", "grids", "images", "batch", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} is not allowed: give an integer >= 1.")
        if self.flavor not in FLAVORS:
            raise ValueError(
                f"flavor = {self.flavor!r} is not allowed: choose from {', '.join(FLAVORS)}."
            )
        self._check_settings()
        for name, file in self.given.items():
            assert name in BACKBONES
            # What does not exist is found before anything is trained.
            locate(file)

    def _check_settings(self) -> None:
        for key in self.settings:
            if "." in key and not key.startswith(PREFIXES):
                raise ValueError(
                    f"The setting {key!r} is unknown: give a field of the recipes, or one after "
                    f"{', '.join(PREFIXES)}."
                )
        for key, instead in {
            "seed": "give --seeds, which trains with seeds from 0",
            "model.backbone": "choose the flavor of the B-cos backbone, and set fields of both "
            "backbones as densenet.xxx",
        }.items():
            if key in self.settings:
                raise ValueError(f"{key} is not allowed: {instead}.")

    def sizes_or(self, paper: Iterable[str]) -> tuple[str, ...]:
        """In the order of the catalog."""
        return tuple(size for size in SIZES if size in (self.sizes or tuple(paper)))

    def taps_or(self, paper: Iterable[str]) -> tuple[str, ...]:
        return tuple(tap for tap in TAPS if tap in (self.taps or tuple(paper)))

    def methods_for(self, family: str) -> tuple[str, ...]:
        """Those that apply to a family."""
        paper = BCOS_METHODS if family == "bcos" else CONVENTIONAL_METHODS
        if self.methods is None:
            return paper
        barred = {"cheferlrp", "plrp"} if family == "bcos" else {"inherent"}
        return tuple(method for method in self.methods if method not in barred)

    def part(self, prefix: str) -> dict[str, Any]:
        """Settings under a prefix, without it."""
        return {
            key.removeprefix(prefix): value
            for key, value in self.settings.items()
            if key.startswith(prefix)
        }

    @property
    def plain(self) -> dict[str, Any]:
        """Settings without a prefix: fields of every recipe."""
        return {key: value for key, value in self.settings.items() if "." not in key}

"""One training run of a figure, as data."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bcosvit.models.densenet import VARIANTS as BACKBONES
from bcosvit.models.vit import FAMILIES
from bcosvit.paper.study import Study

SIZE_NAMES = {"ti": "Ti", "s": "S", "b": "B"}
BACKBONE_OF = {"bcos": "bcos_densenet121", "conventional": "densenet121"}
STEM_OF = {family: stem for stem, family in FAMILIES.items()}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A model by its name in the catalog, and where it differs from the paper's default."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def kind(self) -> str:
        """What decides its recipe: bcos_vit, vit, bcos_densenet121 or densenet121."""
        return self.model if self.model in BACKBONES else self.model.rsplit("_", 2)[0]

    @property
    def family(self) -> str:
        return "bcos" if self.kind.startswith("bcos") else "conventional"

    @property
    def is_backbone(self) -> bool:
        return self.model in BACKBONES

    @property
    def short(self) -> str:
        """Size and tap, as on the paper's axes: ``Ti-38``."""
        size, tap = self.model.rsplit("_", 2)[1:]
        return f"{SIZE_NAMES[size]}-{tap}"

    @property
    def label(self) -> str:
        """For people: ``bcos_vit_s_38, position=add, seed 1``."""
        options = "".join(f", {key}={value}" for key, value in self.options)
        return f"{self.model}{options}" + (f", seed {self.seed}" if self.seed else "")

    def seeded(self, count: int) -> "tuple[RunSpec, ...]":
        """The same with each of ``count`` seeds."""
        return tuple(replace(self, seed=seed) for seed in range(count))


def vit(family: str, size: str, tap: str, **options: Any) -> RunSpec:
    """A transformer of the catalog with other options than the paper's."""
    return RunSpec(model=f"{STEM_OF[family]}_{size}_{tap}", options=tuple(sorted(options.items())))


def configurations(study: Study, family: str, **options: Any) -> list[RunSpec]:
    """The paper's 3 sizes × 3 depths, or the part that was asked for, without seeds."""
    axes = product(study.sizes_or(SIZE_NAMES), study.taps_or(("13", "38", "87")))
    return [vit(family, size, tap, **options) for size, tap in axes]


def with_seeds(study: Study, *specs: RunSpec) -> list[RunSpec]:
    """Every seed of every spec, all first seeds first: with little time there is one of each."""
    return [replace(spec, seed=seed) for seed in range(study.seeds) for spec in specs]

"""What a reproduction of the paper was asked for, and the runs that it is made of.

`StudyOptions` is what was asked for. `Study` adds what follows from it (the opened data, the
recipes) and what happens on the way (the time left, what is missing); it is the one object that
training, measuring and drawing pass around.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from bcosvit.attribution import explainers
from bcosvit.data.sources import Source, open_source
from bcosvit.messages import pick
from bcosvit.models.base import load
from bcosvit.models.densenet import VARIANTS as BACKBONES
from bcosvit.models.hub import is_file, locate
from bcosvit.models.vit import FAMILIES, SIZES, TAPS
from bcosvit.paper.schedule import KINDS, resolve_recipes
from bcosvit.train.recipe import Recipe

FLAVORS = ("v2", "v1")
"""Of the B-cos backbone."""

PREFIXES = ("model.", "densenet.", "backbone.", *(f"{kind}." for kind in KINDS))
"""Of settings that do not change all recipes."""

PAPER_METHODS = (
    *("inherent", "ixg", "intgrad", "gradcam", "gradsam", "rollout", "finatt"),
    *("cheferlrp", "plrp"),
)
"""The explanation methods that the paper compares, each on the models to which it applies."""

SIZE_NAMES = {"ti": "Ti", "s": "S", "b": "B"}
BACKBONE_OF = {"bcos": "bcos_densenet121", "conventional": "densenet121"}
_MODEL_NAME = {family: name for name, family in FAMILIES.items()}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training run: a model by its name, and where it differs from the paper's default."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @classmethod
    def vit(cls, family: str, size: str, tap: str, **options: Any) -> "RunSpec":
        """Returns the run of a transformer with other options than the paper's.

        Example:
            >>> RunSpec.vit("bcos", "s", "38", position="add").label
            'bcos_vit_s_38, position=add'
        """
        model = f"{_MODEL_NAME[family]}_{size}_{tap}"
        return cls(model=model, options=tuple(sorted(options.items())))

    @property
    def kind(self) -> str:
        """The kind of run, which decides its recipe: one of ``KINDS``."""
        return self.model if self.model in BACKBONES else self.model.rsplit("_", 2)[0]

    @property
    def family(self) -> str:
        """``"bcos"`` or ``"conventional"``."""
        return "bcos" if self.kind.startswith("bcos") else "conventional"

    @property
    def is_backbone(self) -> bool:
        """Whether the run trains a backbone."""
        return self.model in BACKBONES

    @property
    def tap(self) -> str:
        """The number of backbone layers below a transformer."""
        return self.model.rsplit("_", 1)[1]

    @property
    def short(self) -> str:
        """Size and tap as on the axes of the paper: ``Ti-38``."""
        return f"{SIZE_NAMES[self.model.rsplit('_', 2)[1]]}-{self.tap}"

    @property
    def label(self) -> str:
        """A name for readers: ``bcos_vit_s_38, position=add, seed 1``."""
        options = "".join(f", {key}={value}" for key, value in self.options)
        return f"{self.model}{options}" + (f", seed {self.seed}" if self.seed else "")

    def with_seeds(self, count: int) -> "tuple[RunSpec, ...]":
        """Returns the same run with each of ``count`` seeds."""
        return tuple(replace(self, seed=seed) for seed in range(count))


@dataclass(frozen=True, kw_only=True)
class GivenModel(RunSpec):
    """Weights that are measured as they are; nothing is trained."""

    weights: str
    """As given."""
    given_family: str
    methods: tuple[str, ...]
    """The explanation methods that apply."""

    @property
    def family(self) -> str:
        return self.given_family

    @property
    def is_backbone(self) -> bool:
        return False

    @property
    def short(self) -> str:
        return self.model

    @property
    def label(self) -> str:
        return self.model


def given_models(weights: Iterable[str]) -> tuple[GivenModel, ...]:
    """Looks at weights that are to be measured, and names them after files or shipped weights.

    Raises:
        ValueError: If weights cannot be read, or two have the same name.

    Example:
        >>> [model.short for model in given_models(["bcos_vit_ti_87_imagenette"])]
        ['bcos_vit_ti_87_imagenette']
    """
    found: dict[str, GivenModel] = {}
    for each in weights:
        name = Path(each).stem if is_file(each) else re.sub(r"[^\w.-]+", "-", each)
        if name in found:
            raise ValueError(f"Two of the weights are called {name!r}: give files of other names.")
        model = load(each)
        found[name] = GivenModel(
            model=name, weights=each, given_family=model.config.family, methods=explainers(model)
        )
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What to reproduce, on which data and how.

    Options that agree in everything but ``minutes`` and the amount to measure share their runs.

    Raises:
        ValueError: If an option is not allowed.

    Example:
        >>> options = StudyOptions(data="scenes", out=Path("paper"), sizes=("ti", "s"), minutes=60)
        >>> made = reproduce("accuracy", options)  # doctest: +SKIP
    """

    data: str
    """Anything that `bcosvit.data.open_source` takes."""
    out: Path
    """A folder for the runs, and one folder per figure."""
    sizes: tuple[str, ...] | None = None
    """Of the transformers; None stands for those of the paper's figure."""
    taps: tuple[str, ...] | None = None
    """The numbers of backbone layers; None stands for those of the paper's figure."""
    seeds: int = 1
    """How often every transformer is trained; backbones are trained once, with seed 0."""
    recipe: str = "paper"
    """A schedule, see `bcosvit.paper.schedule`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to all recipes; with a prefix to the transformers (``model.``), the backbones
    (``densenet.``), the recipes of backbones (``backbone.``) or those of one kind of run."""
    flavor: str = "v2"
    """Of the B-cos backbone."""
    backbones: Mapping[str, str] = field(default_factory=dict)
    """Weights of backbones that are not to be trained, by the backbone's name: files, or anything
    else that `bcosvit.load` takes."""
    weights: tuple[str, ...] = ()
    """Models that are measured as they are, instead of training the paper's: anything that
    `bcosvit.load` takes."""
    methods: tuple[str, ...] | None = None
    """Explanation methods to compare, each where it applies; None stands for the paper's."""
    grids: int = 250
    """How many grids the grid pointing game has."""
    images: int = 250
    """How many images are perturbed."""
    limit: int | None = None
    """How many validation images are drawn; None stands for all."""
    batch_size: int | None = None
    """Of measurements; None stands for as many images as suit the device."""
    device: str = "auto"
    minutes: float | None = None
    """How long training and measuring may take; None stands for as long as it takes."""
    tune: bool = False
    """Whether learning rates are chosen on a split of the training set first."""

    def __post_init__(self) -> None:
        known = {"sizes": tuple(SIZES), "taps": tuple(TAPS), "methods": explainers()}
        for name, allowed in known.items():
            given = getattr(self, name)
            if given is not None:
                pick(",".join(given), allowed, name.rstrip("s"))
        for name in ("seeds", "grids", "images", "batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} is not allowed: give an integer >= 1.")
        if self.flavor not in FLAVORS:
            raise ValueError(
                f"flavor = {self.flavor!r} is not allowed: choose from {', '.join(FLAVORS)}."
            )
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"budget = {self.minutes} is not allowed: give minutes above 0.")
        pick(",".join(self.backbones) or "all", tuple(BACKBONES), "backbone")
        self._check_settings()
        if self.weights:
            self._check_weights()

    def _check_weights(self) -> None:
        training = {
            "sizes": self.sizes,
            "taps": self.taps,
            "seeds": self.seeds > 1,
            "tune": self.tune,
            "backbones": self.backbones,
            **{f"the setting {key}": True for key in self.settings if key != "num_workers"},
        }
        for name, given in training.items():
            if given:
                raise ValueError(
                    f"Given weights are measured as they are, and {name} is about training: leave "
                    f"out one of the two."
                )

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Study(StudyOptions):
    """A reproduction at work; `Study.open` makes one."""

    source: Source
    """The data, opened."""
    fingerprint: str
    """Of the data."""
    recipes: Mapping[str, Recipe]
    """By kind of run."""
    log: Callable[[str], None] = print
    """Is called with a line about each step."""
    folder: str = "runs"
    """The folder of the runs below ``out``."""
    began: float = field(default_factory=time.monotonic)
    missing: dict[str, str] = field(default_factory=dict)
    """Runs and measurements that could not be made, with the reason."""
    used: dict[RunSpec, None] = field(default_factory=dict)
    """Runs that were measured or drawn; an ordered set."""
    given: tuple[GivenModel, ...] = ()
    """The models of ``weights``."""

    @classmethod
    def open(cls, options: StudyOptions, log: Callable[[str], None] = print) -> "Study":
        """Opens the data and resolves the recipes.

        Args:
            options: What was asked for.
            log: A function that is called with a line about each step.

        Returns:
            The study; nothing is written yet.

        Raises:
            ValueError: If the data, the recipe or the weights of a backbone cannot be used.
        """
        recipes = resolve_recipes(options.recipe, options.settings)
        for weights in options.backbones.values():
            # Weights that do not exist are better found before anything is trained.
            locate(weights)
        recipe = recipes["bcos_vit"]
        models = given_models(options.weights)
        source = open_source(
            options.data,
            val_fraction=recipe.val_fraction,
            max_skipped=recipe.max_skipped,
            only_val=bool(models),
        )
        given = {each.name: getattr(options, each.name) for each in _option_fields()}
        return cls(
            **given,
            source=source,
            fingerprint=source.fingerprint(),
            recipes=recipes,
            log=log,
            given=models,
        )

    def options(self) -> dict[str, Any]:
        """Returns what was asked for, fit for JSON."""
        given = {each.name: getattr(self, each.name) for each in _option_fields()}
        return {**given, "out": str(self.out), "settings": dict(self.settings)}

    def seconds_left(self, share: float = 1.0) -> float:
        """Returns how many seconds are left of the first ``share`` of the minutes."""
        if self.minutes is None:
            return math.inf
        return 60 * share * self.minutes - (time.monotonic() - self.began)

    def configurations(
        self,
        family: str,
        *,
        sizes: Iterable[str] = tuple(SIZE_NAMES),
        taps: Iterable[str] = ("13", "38", "87"),
        **options: Any,
    ) -> list[RunSpec]:
        """Returns one transformer per size and tap, or the part that was asked for, without seeds.

        ``options`` say where the model differs from the paper's default. Where weights are given,
        these are returned instead.
        """
        if self.weights:
            return [model for model in self.given if model.family == family]
        chosen = [size for size in SIZES if size in (self.sizes or tuple(sizes))]
        depths = [tap for tap in TAPS if tap in (self.taps or tuple(taps))]
        return [RunSpec.vit(family, size, tap, **options) for size, tap in product(chosen, depths)]

    def both_families(self) -> list[RunSpec]:
        """Returns the transformers of both families in turn, with their seeds."""
        both = self.configurations("bcos"), self.configurations("conventional")
        pairs = zip_longest(*both)
        return self.with_seeds(spec for pair in pairs for spec in pair if spec is not None)

    def with_seeds(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        """Returns every seed of every run; all first seeds come first, in case time is short."""
        specs = list(specs)
        return [replace(spec, seed=seed) for seed in range(self.seeds) for spec in specs]


def _option_fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(StudyOptions)

"""The plan of a run: everything that was asked for, resolved, and its record ``run.yaml``.

A run that resumes reads its plan from the record, and may not deviate from it.
"""

import dataclasses
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import bcosvit
from bcosvit.data.sources import Source, is_drawn, open_source
from bcosvit.files import atomic
from bcosvit.models.bcosify import converted_part
from bcosvit.models.config import BcosifiedConfig, Config, DenseNetConfig, ModelConfig
from bcosvit.models.hub import is_file
from bcosvit.models.registry import from_dict, needs_backbone, to_dict
from bcosvit.models.weights import (
    check_class_names,
    class_names,
    named_config,
    read_metadata,
    with_backbone,
)
from bcosvit.train.checkpoints import config_of
from bcosvit.train.losses import LOSSES
from bcosvit.train.recipe import RECIPES, RENAMED_FIELDS, Recipe, get_recipe

RECORD = "run.yaml"
DEFAULT_RECIPE, TRANSFER_RECIPE = "quick", "transfer"
"""The recipes where none is named: for a model that is named, or for drawn images; and for images
of your own, which need more than a small model from scratch."""
SPLIT_SEED = 0
"""Seed of the validation split where the data have none: the same for all seeds of a recipe, so
that results can be compared."""

CHOSEN_FIELDS = ("cache_views", "accumulate_grad_batches", "num_workers")
"""What a recipe may leave open, for `fit_to_machine` to choose."""

NEUTRAL_FIELDS = frozenset(
    {
        "num_workers",
        "checkpoint_epochs",
        "checkpoint_steps",
        "checkpoint_minutes",
        "explain_every",
        "localize_every",
        "cache_folder",
        "cache_gigabytes",
        "cache_on_device",
        "cuda_graphs",
    }
)
"""Fields of a recipe that do not change the result, so that a resumed run may change them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a run."""

    data: str
    """What the images were opened with."""
    fingerprint: str
    """Digest of the images' names and labels."""
    classes: tuple[str, ...]
    train_images: int
    val_images: int
    model: Config
    recipe_name: str
    """``own`` for a recipe that is not registered."""
    recipe: Recipe
    init: str | None
    """The weights file that the model starts from."""

    @property
    def image_size(self) -> int:
        """Side of the model's square input."""
        if "image_size" not in self.model.fields() and self.recipe.image_size is not None:
            return self.recipe.image_size
        return self.model.image_size[0]

    def write(self, folder: Path, trainer: dict[str, Any]) -> None:
        """Writes ``run.yaml``; ``trainer`` and versions are for the reader only."""
        values = {
            "data": {
                "source": self.data,
                "train_images": self.train_images,
                "val_images": self.val_images,
                "fingerprint": self.fingerprint,
                "classes": list(self.classes),
            },
            "model": _plain(to_dict(self.model)),
            "init": self.init,
            "recipe": {"name": self.recipe_name, **_plain(dataclasses.asdict(self.recipe))},
            "trainer": trainer,
            "versions": {
                "bcosvit": bcosvit.__version__,
                "revision": _revision(),
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
            },
        }
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        with atomic(folder / RECORD) as temporary:
            temporary.write_text(text, "utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Reads the plan of the run in ``folder``; fields may have their former names.

        Raises:
            ValueError: There is no run, or its record cannot be read.
        """
        path = folder / RECORD
        if not path.is_file():
            raise ValueError(
                f"There is no run to resume in {folder}, which has no {RECORD}; "
                f"start one without --resume."
            )
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
            data: dict[str, Any] = values["data"]
            recipe: dict[str, Any] = dict(values["recipe"])
            name = recipe.pop("name")
            return cls(
                data=data["source"],
                fingerprint=data["fingerprint"],
                classes=tuple(data["classes"]),
                train_images=data["train_images"],
                val_images=data["val_images"],
                model=from_dict(values["model"]),
                recipe_name=name,
                recipe=Recipe(**{RENAMED_FIELDS.get(k, k): v for k, v in recipe.items()}),
                init=values["init"],
            )
        except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not the record of a run ({type(error).__name__}: {error}); "
                f"restore it, or start a new run in another folder."
            ) from error

    def differences(self, other: "Plan") -> list[str]:
        """Lists what changes the result: 'epochs was 100 and is 200', ..."""
        before, after = self._settings(), other._settings()
        return [
            f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
            for key in dict.fromkeys([*before, *after])
            if before.get(key) != after.get(key)
        ]

    def _settings(self) -> dict[str, Any]:
        recipe = dataclasses.asdict(self.recipe)
        return {
            "data": self.data,
            "the images' fingerprint": self.fingerprint,
            "init": self.init,
            **{f"model.{key}": value for key, value in to_dict(self.model).items()},
            **{key: value for key, value in recipe.items() if key not in NEUTRAL_FIELDS},
        }


def resolve(
    data: str | Path | Source | None,
    model: str | Config | None,
    recipe: str | Recipe | None,
    settings: Mapping[str, Any],
    init: str | Path | None,
    previous: Plan | None,
) -> tuple[Plan, Source]:
    """Resolves the arguments of `train`; what is not given is taken from the plan of a run that
    resumes.

    Raises:
        ValueError: Something is missing, is not allowed, or deviates from the previous plan.
    """
    if data is None:
        if previous is None:
            raise ValueError("There is nothing to train on: give a folder of images, or 'scenes'.")
        data = previous.data
    model_options = {k[6:]: v for k, v in settings.items() if k.startswith("model.")}
    fields = {k: v for k, v in settings.items() if not k.startswith("model.")}
    if recipe is None and previous is None and not _is_drawn(data) and model is None:
        recipe = TRANSFER_RECIPE
    recipe_name, recipe = _recipe(recipe, fields, previous)
    source = (
        data
        if isinstance(data, Source)
        else open_source(
            data,
            val_fraction=recipe.val_fraction,
            seed=SPLIT_SEED,
            max_skipped=recipe.max_skipped,
        )
    )
    init = str(init) if init is not None else previous.init if previous is not None else None
    if model is None and previous is not None:
        model = previous.model
    classes = source.classes
    if getattr(LOSSES.get(recipe.loss), "needs_teacher", False):
        recipe, classes = _taught(recipe, init, source)
    elif not classes:
        raise ValueError(
            f"The images of {source.name} have no labels, which the loss {recipe.loss} needs; sort "
            f"them into one folder per class, or let a teacher label them: --recipe bcosify."
        )
    # They are written into the weights, which are refused with names that cannot be shown.
    check_class_names(classes, source.name)
    if model is None and init is None and recipe_name in RECIPES:
        init = RECIPES.get(recipe_name).init
    if model is None and init is not None:
        model = config_of(init)
    if model is None and recipe_name in RECIPES:
        model = RECIPES.get(recipe_name).model
    if init is not None and isinstance(model, str) and needs_backbone(model):
        model_options.setdefault("backbone", init)
    if init is None and is_file(model_options.get("backbone")):
        init = str(model_options["backbone"])
    model_options = with_backbone(model_options)
    plan = Plan(
        data=source.name,
        fingerprint=source.fingerprint(),
        classes=classes,
        train_images=len(source.train),
        val_images=len(source.val),
        model=_model(model, model_options, recipe, source.name, len(classes)),
        recipe_name=recipe_name,
        recipe=recipe,
        init=init,
    )
    if previous is None:
        _check_backbone(plan)
    elif changed := previous.differences(plan):
        raise ValueError(
            f"The run cannot be resumed with other settings: {'; '.join(changed)}. "
            f"Leave them out, or start a new run in another folder."
        )
    return plan, source


def _recipe(
    recipe: str | Recipe | None, fields: Mapping[str, Any], previous: Plan | None
) -> tuple[str, Recipe]:
    if recipe is None and previous is not None:
        return previous.recipe_name, previous.recipe.change(**fields)
    name = "own" if isinstance(recipe, Recipe) else recipe or DEFAULT_RECIPE
    found = recipe.change(**fields) if isinstance(recipe, Recipe) else get_recipe(name, **fields)
    if previous is not None:
        # What was chosen for the machine when the run began stays.
        known = {each: getattr(previous.recipe, each) for each in CHOSEN_FIELDS}
        found = found.change(**{k: v for k, v in known.items() if getattr(found, k) is None})
    return name, found


def _is_drawn(data: str | Path | Source) -> bool:
    if isinstance(data, Source):
        return data.train.reader.drawn
    return isinstance(data, str) and is_drawn(data)


def _model(
    model: str | Config | None, options: dict[str, Any], recipe: Recipe, data: str, classes: int
) -> Config:
    if model is None:
        raise ValueError("There is no model to train: name one, e.g. bcos_vit_ti_38.")
    if options.setdefault("num_classes", classes) != classes:
        raise ValueError(
            f"num_classes = {options['num_classes']} is not allowed: {data} has {classes}."
        )
    given = {name: options[name] for name in ("backbone",) if name in options}
    kind = named_config(model, **given) if isinstance(model, str) else model
    if isinstance(kind, BcosifiedConfig) and kind.num_classes != classes:
        # Its layers are described one by one, the last one with its size.
        model = kind = kind.with_classes(classes)
    if "image_size" in kind.fields() and recipe.image_size is not None:
        options.setdefault("image_size", recipe.image_size)
    if recipe.train_backbone is not None:
        if "train_backbone" not in kind.fields():
            raise ValueError(
                f"train_backbone is not allowed for a {kind.noun}, which has no separate backbone; "
                f"leave it out."
            )
        options.setdefault("train_backbone", recipe.train_backbone)
    config = named_config(model, **options) if isinstance(model, str) else model.replace(**options)
    if recipe.fade_until is not None:
        _check_fading(config, recipe.fade_until)
    if config.image_size[0] != config.image_size[1]:
        raise ValueError(
            f"image_size = {config.image_size} is not allowed: training images are square."
        )
    return config


def _check_fading(config: Config, fade_until: float) -> None:
    converted = converted_part(config)
    if converted is None or not converted.bcos:
        raise ValueError(
            f"fade_until = {fade_until} is not allowed for a {config.noun}: it needs a network "
            f"with B-cos layers that bcosvit bcosify converted; give its file as --init."
        )
    if isinstance(config, ModelConfig) and not config.train_backbone:
        raise ValueError(
            f"fade_until = {fade_until} is not allowed with a frozen backbone, which could not "
            f"learn to do without its constants; set train_backbone=True."
        )


def _taught(recipe: Recipe, init: str | None, source: Source) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with its teacher, and the names of the classes that the teacher knows."""
    teacher = recipe.teacher or init
    if teacher is None:
        raise ValueError(
            f"The loss {recipe.loss} has no teacher: give the weights of a converted network with "
            f"--init, which then teaches, or those of another model with --set teacher=FILE."
        )
    config = config_of(teacher)
    if config is None:
        raise ValueError(
            f"{teacher} cannot teach: it is no weights file of this package; convert the model "
            f"with bcosvit bcosify first."
        )
    recipe = recipe.change(teacher=teacher)
    if not source.classes:
        if recipe.label_weight:
            raise ValueError(
                f"label_weight = {recipe.label_weight} is not allowed: the images of "
                f"{source.name} have no labels; leave it out."
            )
        names = class_names(read_metadata(teacher), teacher)
        return recipe, tuple(names or map(str, range(config.num_classes)))
    if len(source.classes) != config.num_classes:
        raise ValueError(
            f"{source.name} has {len(source.classes)} classes, but the teacher knows "
            f"{config.num_classes}; give images of its classes, or leave out the labels: "
            f"unlabeled:FOLDER."
        )
    return recipe, source.classes


def _check_backbone(plan: Plan) -> None:
    model = plan.model
    if (
        isinstance(model, ModelConfig)
        and isinstance(model.backbone, DenseNetConfig | BcosifiedConfig)
        and not model.train_backbone
        and plan.init is None
    ):
        raise ValueError(
            "The model's backbone is frozen and would keep its random weights: give trained "
            "weights with --init, or train the backbone with --set train_backbone=True."
        )


def _plain(value: Any) -> Any:
    """Turns tuples into lists, since YAML would write tuples as Python objects."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _revision() -> str | None:
    """Returns the git commit of this package, where it runs from a checkout of its own."""
    here = Path(__file__)
    command = ["git", "-C", str(here.parent)]
    try:
        # A virtual environment may lie inside another repository.
        subprocess.run(
            [*command, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True
        )
        described = subprocess.run(
            [*command, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()

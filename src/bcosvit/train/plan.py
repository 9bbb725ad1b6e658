"""From what was asked for to a plan in which nothing is left open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcosvit.data.dataset import Source, open_source
from bcosvit.models.config import Config, DenseNetConfig, ModelConfig
from bcosvit.models.registry import model_config
from bcosvit.train.initialize import config_in
from bcosvit.train.recipe import QUICK_MODEL, Recipe, change, find_recipe
from bcosvit.train.record import Plan, differences

SPLIT_SEED = 0
"""Of the validation split where the data have none: the same for all of a recipe's seeds, so that
their results can be compared."""


def resolve(
    data: str | Path | Source | None,
    model: str | Config | None,
    recipe: str | Recipe | None,
    settings: Mapping[str, Any],
    init: str | Path | None,
    then: Plan | None,
) -> tuple[Plan, Source]:
    """The plan, and the opened data. ``then`` is the plan of a run that resumes: what is not given
    is taken from it, and what is given must agree with it."""
    if data is None:
        if then is None:
            raise ValueError("There is nothing to train on: give a folder of images, or 'scenes'.")
        data = then.data
    recipe_name, recipe = _recipe(recipe, _without(settings, "model."), then)
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
    init = str(init) if init is not None else then.init if then is not None else None
    plan = Plan(
        data=source.name,
        fingerprint=source.fingerprint(),
        classes=source.classes,
        train_images=len(source.train),
        val_images=len(source.val),
        model=_model(model, _only(settings, "model."), recipe_name, recipe, source, init, then),
        recipe_name=recipe_name,
        recipe=recipe,
        init=init,
    )
    if then is None:
        _check_backbone(plan)
    elif changed := differences(then, plan):
        raise ValueError(
            f"The run cannot be resumed with other settings: {'; '.join(changed)}. "
            f"Leave them out, or start a new run in another folder."
        )
    return plan, source


def _recipe(
    recipe: str | Recipe | None, settings: Mapping[str, Any], then: Plan | None
) -> tuple[str, Recipe]:
    if isinstance(recipe, Recipe):
        return "own", change(recipe, **settings)
    if recipe is None and then is not None:
        return then.recipe_name, change(then.recipe, **settings)
    recipe = recipe or "quick"
    return recipe, find_recipe(recipe, **settings)


def _model(
    model: str | Config | None,
    options: dict[str, Any],
    recipe_name: str,
    recipe: Recipe,
    source: Source,
    init: str | None,
    then: Plan | None,
) -> Config:
    if model is None and then is not None:
        model = then.model
    if model is None and init is not None:
        model = config_in(init)
    if model is None and recipe_name == "quick":
        model = QUICK_MODEL
    if model is None:
        raise ValueError("There is no model to train: name one, e.g. bcos_vit_ti_38.")
    classes = len(source.classes)
    if options.setdefault("num_classes", classes) != classes:
        raise ValueError(
            f"num_classes = {options['num_classes']} is not allowed: {source.name} has {classes}."
        )
    transformer = not (isinstance(model, DenseNetConfig) or "densenet" in str(model))
    if transformer and recipe.image_size is not None:
        options.setdefault("image_size", recipe.image_size)
    if recipe.train_backbone is not None:
        if not transformer:
            raise ValueError(
                "train_backbone is not allowed for a DenseNet, which is all backbone; leave it out."
            )
        options.setdefault("train_backbone", recipe.train_backbone)
    config = model_config(model, **options) if isinstance(model, str) else model.replace(**options)
    if isinstance(config, ModelConfig) and config.image_size[0] != config.image_size[1]:
        raise ValueError(
            f"image_size = {config.image_size} is not allowed: training pictures are square."
        )
    return config


def _check_backbone(plan: Plan) -> None:
    model = plan.model
    if (
        isinstance(model, ModelConfig)
        and isinstance(model.backbone, DenseNetConfig)
        and not model.train_backbone
        and plan.init is None
    ):
        raise ValueError(
            "The model's backbone is frozen, and would stay as chance made it: give its weights "
            "with --init, or train it as well with --set train_backbone=True."
        )


def _only(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}


def _without(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if not k.startswith(prefix)}

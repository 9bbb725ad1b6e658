"""How the four kinds of run are trained: B-cos and conventional transformers, and their backbones.

``paper`` is the paper's own schedule. ``small`` is for data sets of some thousand images, where a
hundred epochs of the paper's schedule would be few steps: it has smaller batches and cosine decay,
and everything but the loss is equal for both families. Any recipe of ``bcosvit train`` may be named
instead and then serves all four kinds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bcosvit.messages import unknown
from bcosvit.train.recipe import BCOS_ADAM_EPS, RECIPES, Recipe, get_recipe

KINDS = ("bcos_densenet121", "densenet121", "bcos_vit", "vit")
"""The kinds of run; each has its own recipe."""

TRANSFORMER_FIELDS = frozenset({"cache_views", "train_backbone"})
"""Fields of recipes that do not apply to a backbone on its own."""

Schedule = Mapping[str, Recipe]
"""A recipe per kind of run."""


def schedule_names() -> tuple[str, ...]:
    """Returns the names that `get_schedule` knows."""
    return ("paper", "small", *RECIPES)


def get_schedule(name: str) -> Schedule:
    """Returns the recipe of each kind of run, by a name of `schedule_names`.

    Example:
        >>> get_schedule("paper")["vit"].batch_size
        1024
    """
    if name == "paper":
        return {
            # The paper used published backbones; these are trained by the longer public schedule.
            **_both_families(get_recipe("paper-backbone")),
            "bcos_vit": get_recipe("paper-bcos"),
            "vit": get_recipe("paper-conventional"),
        }
    if name == "small":
        small = get_recipe("small-bcos", epochs=60, warmup_epochs=3, explain_every=0)
        # Writing a checkpoint takes as long as an epoch of so few images.
        small = replace(small, checkpoint_epochs=10)
        # Backbones are trained from scratch, at the learning rate of the longer schedule.
        fast = replace(small, learning_rate=get_recipe("paper-backbone").learning_rate)
        vits = {kind: each for kind, each in _both_families(small).items() if kind.endswith("vit")}
        return {**_both_families(fast), **vits}
    if name not in RECIPES:
        raise ValueError(unknown("schedule", name, schedule_names()))
    return _both_families(get_recipe(name))


def resolve_recipes(name: str, settings: Mapping[str, Any]) -> dict[str, Recipe]:
    """Returns the schedule of a name with other settings.

    Args:
        name: One of `schedule_names`.
        settings: Fields of all recipes, or of some after a prefix: ``backbone.`` for the recipes of
            backbones, or a kind of run, e.g. ``vit.``. Other prefixes are ignored.

    Example:
        >>> resolve_recipes("small", {"epochs": 20, "backbone.epochs": 30})["densenet121"].epochs
        30
    """
    shared = {key: value for key, value in settings.items() if "." not in key}
    backbones = {key: value for key, value in shared.items() if key not in TRANSFORMER_FIELDS}
    backbones |= with_prefix(settings, "backbone.")
    return {
        kind: recipe.change(
            **{
                **(backbones if "densenet" in kind else shared),
                **with_prefix(settings, f"{kind}."),
            }
        )
        for kind, recipe in get_schedule(name).items()
    }


def with_prefix(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the settings that begin with a prefix, without it."""
    found = ((key, value) for key, value in settings.items() if key.startswith(prefix))
    return {key.removeprefix(prefix): value for key, value in found}


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """Returns the recipe with another number of epochs; warmup takes the same share of them."""
    if epochs == recipe.epochs:
        return recipe
    return replace(
        recipe, epochs=epochs, warmup_epochs=recipe.warmup_epochs * epochs / recipe.epochs
    )


def with_learning_rate(recipe: Recipe, rate: float) -> Recipe:
    """Returns the recipe with another learning rate; the final one is scaled alike."""
    final = recipe.final_lr * rate / recipe.learning_rate
    return replace(recipe, learning_rate=rate, final_lr=final)


def _both_families(recipe: Recipe) -> dict[str, Recipe]:
    """The same recipe for all kinds, each family with its loss (the paper's experiments)."""
    bcos = replace(recipe, loss="bce", adam_eps=BCOS_ADAM_EPS)
    conventional = replace(recipe, loss="ce", adam_eps=1e-8)
    return {kind: bcos if kind.startswith("bcos") else conventional for kind in KINDS}

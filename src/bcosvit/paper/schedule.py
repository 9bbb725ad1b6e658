"""How the four kinds of run are trained: B-cos and conventional transformers, and their backbones.

``paper`` is the paper's own schedule. ``small`` is for data sets of some thousand pictures, where a
hundred epochs of the paper's would be few steps: smaller batches and cosine decay, and everything
but the loss equal for both families. Any recipe of ``bcosvit train`` may be named instead, and then
serves all four.
"""

from collections.abc import Mapping
from dataclasses import replace

from bcosvit.paper.study import KINDS, Study
from bcosvit.train.recipe import BCOS_ADAM_EPS, RECIPES, Recipe, get_recipe

OF_TRANSFORMERS = frozenset({"cache_views", "train_backbone"})
"""Fields of recipes that mean nothing to a backbone on its own."""

_SMALL = replace(
    get_recipe("small-bcos"),
    epochs=60,
    warmup_epochs=3,
    # Writing one takes as long as an epoch of so few pictures.
    checkpoint_epochs=10,
    explain_every=0,
)


def _families(recipe: Recipe) -> dict[str, Recipe]:
    """Both families by one recipe, each with its own loss (the paper's experimental setting)."""
    bcos = replace(recipe, loss="bce", adam_eps=BCOS_ADAM_EPS)
    plain = replace(recipe, loss="ce", adam_eps=1e-8)
    return {kind: bcos if kind.startswith("bcos") else plain for kind in KINDS}


SCHEDULES: Mapping[str, Mapping[str, Recipe]] = {
    "paper": {
        # The paper took published backbones; these are trained by the longer public schedule.
        **_families(get_recipe("paper-backbone")),
        "bcos_vit": get_recipe("paper-bcos"),
        "vit": get_recipe("paper-conventional"),
    },
    "small": {
        # From scratch, as fast as the longer schedule begins.
        **_families(replace(_SMALL, learning_rate=get_recipe("paper-backbone").learning_rate)),
        **{kind: recipe for kind, recipe in _families(_SMALL).items() if kind.endswith("vit")},
    },
    **{name: _families(found.recipe) for name, found in RECIPES.items()},
}


def recipes(study: Study) -> dict[str, Recipe]:
    """The recipe of each kind, with the study's settings."""
    if study.recipe not in SCHEDULES:
        raise ValueError(
            f"There is no schedule {study.recipe!r}; choose from {', '.join(SCHEDULES)}."
        )
    shared = {key: value for key, value in study.plain.items() if key not in OF_TRANSFORMERS}
    backbones = {**shared, **study.part("backbone.")}
    return {
        kind: recipe.change(
            **{**(backbones if "densenet" in kind else study.plain), **study.part(f"{kind}.")},
        )
        for kind, recipe in SCHEDULES[study.recipe].items()
    }


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """The same schedule, run through in fewer epochs."""
    if epochs == recipe.epochs:
        return recipe
    return replace(
        recipe, epochs=epochs, warmup_epochs=recipe.warmup_epochs * epochs / recipe.epochs
    )


def with_rate(recipe: Recipe, rate: float) -> Recipe:
    """The same schedule at another height."""
    final = recipe.final_lr * rate / recipe.learning_rate
    return replace(recipe, learning_rate=rate, final_lr=final)

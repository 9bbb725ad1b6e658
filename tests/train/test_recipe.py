"""What the recipes are: the paper's numbers, written out once more by hand."""

import math

import pytest

from bcosvit.train import RECIPES, Recipe
from bcosvit.train.recipe import change, find_recipe


def test_the_papers_recipes():
    bcos, conventional = RECIPES["paper-bcos"], RECIPES["paper-conventional"]
    assert (bcos.loss, bcos.batch_size) == ("bce", 256)
    assert (conventional.loss, conventional.batch_size) == ("ce", 1024)
    for recipe in (bcos, conventional):
        assert (recipe.epochs, recipe.learning_rate, recipe.weight_decay) == (100, 2.5e-4, 0)
        assert (recipe.rand_augment, recipe.crop, recipe.flip) == ((2, 9), (0.08, 1), 0.5)
        assert recipe.eval_crop == 224 / 256
        # ÷ 10 after epoch 60: epochs 1 to 60 are numbered 0 to 59.99… here.
        assert recipe.rate_at(0) == recipe.rate_at(59.99) == 2.5e-4
        assert recipe.rate_at(60) == recipe.rate_at(99.99) == 2.5e-5


def test_the_backbones_recipe():
    recipe = RECIPES["paper-backbone"]
    assert (recipe.loss, recipe.epochs, recipe.batch_size) == ("bce", 200, 128)
    assert recipe.rate_at(0.01) == pytest.approx(1e-6)
    assert recipe.rate_at(5) == pytest.approx(5e-4)
    assert recipe.rate_at(10) == pytest.approx(1e-3)
    # A quarter of the way down: (1 + cos 45°) / 2 of the swing.
    quarter = 1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2
    assert recipe.rate_at(10 + 190 / 4) == pytest.approx(quarter)
    assert recipe.rate_at(200) == pytest.approx(1e-4)


def test_a_shorter_run_keeps_the_schedules_shape():
    recipe = find_recipe("paper-bcos", epochs=10)
    assert recipe.rate_at(5.9) == 2.5e-4
    assert recipe.rate_at(6) == 2.5e-5


def test_settings_from_a_file_or_the_command_line_are_taken():
    recipe = change(Recipe(), precision=32, crop=[0.5, 1.0], betas=[0.9, 0.99])
    assert (recipe.precision, recipe.crop, recipe.betas) == ("32", (0.5, 1.0), (0.9, 0.99))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "mse"}, "loss = 'mse' is not allowed: choose from bce, ce"),
        ({"epochs": 0}, "epochs = 0 is not allowed: give an integer >= 1"),
        ({"epochs": 1.5}, "epochs = 1.5 is not allowed"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast' is not allowed"),
        ({"learning_rate": math.nan}, "learning_rate = nan is not allowed"),
        ({"flip": 2}, "flip = 2 is not allowed: give a number >= 0 and <= 1"),
        ({"ema": 0}, "ema = 0 is not allowed"),
        ({"ema": "long"}, "ema = 'long' is not allowed"),
        ({"compile": "yes"}, "compile = 'yes' is not allowed: choose from True, False"),
        ({"crop": 0.5}, "crop = 0.5 is not allowed: give two numbers"),
        ({"eval_crop": 0}, "eval_crop = 0 is not allowed: give a number > 0 and <= 1"),
        ({"warmup_epochs": 100}, "the run has only 100 epochs"),
        ({"final_lr": 1}, "give at most learning_rate"),
        ({"accumulate": 3}, "it must divide batch_size = 256"),
        ({"graphs": True, "accumulate": 2}, "it needs compile=False and accumulate=1"),
        ({"precision": "int8"}, "choose from 32, bf16, fp16"),
        ({"lr": 1}, "no field 'lr'; they have loss, epochs"),
    ],
)
def test_what_cannot_be_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        change(Recipe(), **settings)


def test_unknown_recipes_are_refused():
    with pytest.raises(ValueError, match="choose from paper-bcos, paper-conventional"):
        find_recipe("slow")

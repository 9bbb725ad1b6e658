"""What the recipes are: the paper's numbers, written out once more by hand."""

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcosvit.cli import app
from bcosvit.train import QUICK_MODEL, RECIPES, Recipe, get_recipe, register_recipe
from bcosvit.train.plan import Plan
from bcosvit.train.recipe import RENAMED_FIELDS


def test_the_papers_recipes():
    bcos, conventional = get_recipe("paper-bcos"), get_recipe("paper-conventional")
    assert (bcos.loss, bcos.batch_size) == ("bce", 256)
    assert (conventional.loss, conventional.batch_size) == ("ce", 1024)
    for recipe in (bcos, conventional):
        assert (recipe.epochs, recipe.learning_rate, recipe.weight_decay) == (100, 2.5e-4, 0)
        assert (recipe.rand_augment, recipe.crop, recipe.flip) == ((2, 9), (0.08, 1), 0.5)
        assert recipe.eval_crop == 224 / 256
        # ÷ 10 after epoch 60: epochs 1 to 60 are numbered 0 to 59.99… here.
        assert recipe.lr_at(0) == recipe.lr_at(59.99) == 2.5e-4
        assert recipe.lr_at(60) == recipe.lr_at(99.99) == 2.5e-5


def test_the_backbones_recipe():
    recipe = get_recipe("paper-backbone")
    assert (recipe.loss, recipe.epochs, recipe.batch_size) == ("bce", 200, 128)
    assert recipe.lr_at(0.01) == pytest.approx(1e-6)
    assert recipe.lr_at(5) == pytest.approx(5e-4)
    assert recipe.lr_at(10) == pytest.approx(1e-3)
    # A quarter of the way down: (1 + cos 45°) / 2 of the swing.
    quarter = 1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2
    assert recipe.lr_at(10 + 190 / 4) == pytest.approx(quarter)
    assert recipe.lr_at(200) == pytest.approx(1e-4)


def test_a_shorter_run_keeps_the_schedules_shape():
    recipe = get_recipe("paper-bcos", epochs=10)
    assert recipe.lr_at(5.9) == 2.5e-4
    assert recipe.lr_at(6) == 2.5e-5


def test_settings_from_a_file_or_the_command_line_are_taken():
    recipe = Recipe().change(precision=32, crop=[0.5, 1.0], betas=[0.9, 0.99])
    assert (recipe.precision, recipe.crop, recipe.betas) == ("32", (0.5, 1.0), (0.9, 0.99))
    # A file may have the name of a number, and a path may be an object.
    recipe = Recipe(teacher=7, cache_folder=Path("features"))
    assert (recipe.teacher, recipe.cache_folder) == ("7", "features")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "mse"}, "no loss 'mse'.*bce, ce"),
        ({"loss": 3}, "no loss '3'.*bce, ce"),
        ({"rand_augment": (2.5, 9)}, r"rand_augment = \(2\.5, 9\) .*two integers"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0\.9, 1\.0\) .*< 1"),
        ({"ema": 1.0}, r"ema = 1\.0 .*< 1"),
        ({"epochs": 0}, "epochs = 0 .*>= 1"),
        ({"epochs": 1.5}, "epochs = 1.5"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast'"),
        ({"learning_rate": math.nan}, "learning_rate = nan"),
        ({"flip": 2}, "flip = 2 .*>= 0 and <= 1"),
        ({"ema": 0}, "ema = 0"),
        ({"ema": "long"}, "ema = 'long'"),
        ({"compile": "yes"}, "compile = 'yes' .*True, False"),
        ({"crop": 0.5}, "crop = 0.5 .*two numbers"),
        ({"eval_crop": 0}, "eval_crop = 0 .*> 0 and <= 1"),
        ({"warmup_epochs": 100}, "only 100 epochs"),
        ({"epochs": 1, "warmup_epochs": 1}, "only 1 epoch;"),
        ({"final_lr": 1}, "learning_rate"),
        ({"accumulate_grad_batches": 3}, "batch_size = 256"),
        ({"cuda_graphs": True, "accumulate_grad_batches": 2}, "cuda_graphs.*compile=False"),
        ({"precision": "int8"}, "32, bf16, fp16"),
        ({"lr": 1}, "no recipe field 'lr'.*learning_rate"),
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"workers": 1}, "now called num_workers"),
    ],
)
def test_what_cannot_be_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        Recipe().change(**settings)


def test_unknown_recipes_are_refused():
    with pytest.raises(ValueError, match="paper-bcos, paper-conventional"):
        get_recipe("slow")


def test_every_recipe_describes_itself():
    for name, registered in RECIPES.items():
        assert registered.name == name and registered.summary
        assert f"--recipe {name} " in registered.command


def test_a_recipe_is_added_by_registering_it(monkeypatch):
    monkeypatch.setattr(RECIPES, "_items", dict(RECIPES.items()))
    mine = Recipe(epochs=3, loss="ce")
    about = {"summary": "three epochs", "command": "bcosvit train photos/ --recipe mine"}
    # Help that was shown before does not hide what is registered later.
    CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300"})
    register_recipe("mine", mine, **about)
    assert get_recipe("mine") == mine
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300"})
    # The box around the text may be narrow, and then breaks the list.
    words = " ".join(shown.output.replace("│", " ").split())
    assert "mine." in words[words.index("--recipe") :]
    with pytest.raises(ValueError, match="already"):
        register_recipe("mine", Recipe(epochs=4), **about)


def test_records_of_older_runs_are_read(tmp_path):
    recipe = Recipe(num_workers=2, cuda_graphs=True, rand_augment=None, images_on_device=True)
    plan = Plan(
        data="scenes",
        fingerprint="0",
        classes=("a", "b"),
        train_images=4,
        val_images=2,
        model=QUICK_MODEL,
        recipe_name="own",
        recipe=recipe,
        init=None,
    )
    plan.write(tmp_path, {})
    assert Plan.read(tmp_path) == plan
    record = (tmp_path / "run.yaml").read_text()
    for old, new in RENAMED_FIELDS.items():
        assert f"  {new}: " in record
        record = record.replace(f"  {new}: ", f"  {old}: ")
    (tmp_path / "run.yaml").write_text(record)
    assert Plan.read(tmp_path) == plan

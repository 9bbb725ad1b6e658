"""Learning rates are chosen within the training set, with the same effort for both families."""

import json
from dataclasses import replace

from bcosvit.data.sources import open_source
from bcosvit.paper import RunSpec, Study, tuning
from bcosvit.paper.runs import run_backbone, run_recipe
from bcosvit.paper.tuning import RATES, held_out, representatives, tune_learning_rates
from bcosvit.train.task import DivergedError
from tests.paper.support import small_study, write_squares

SPECS = [
    RunSpec(model="bcos_densenet121"),
    RunSpec(model="densenet121"),
    RunSpec.vit("bcos", "ti", "38"),
    RunSpec.vit("bcos", "s", "38"),
    RunSpec.vit("conventional", "ti", "38"),
]


def keys(split) -> set[str]:
    return {split.key(position) for position in range(len(split))}


def test_no_validation_picture_takes_part(tmp_path):
    source = open_source(write_squares(tmp_path, train=10, val=4))
    inner = held_out(source)
    assert keys(inner.train) | keys(inner.val) == keys(source.train)
    assert not keys(inner.train) & keys(inner.val)
    assert not (keys(inner.train) | keys(inner.val)) & keys(source.val)
    # A tenth of each class.
    assert sorted(inner.val.labels()) == [0, 1, 2, 3, 4]


def test_the_best_rate_is_taken_and_all_are_recorded(tmp_path, monkeypatch):
    data = "scenes?size=32&train=40&val=8"
    options = small_study(data, tmp_path, recipe="small", settings={}, tune=True)
    study = Study.open(options, log=lambda _: None)
    best = {"bcos_densenet121": 1e-3, "densenet121": 3e-4, "bcos_vit": 1e-4, "vit": 3e-4}
    diverging = {"bcos_vit": 1e-3}
    tried: list[tuple[str, float, float | None]] = []

    def trial(study, spec):
        recipe = run_recipe(study, spec)
        assert len(study.source.val) == 8
        assert study.folder == "tuning"
        backbone = run_backbone(study, spec)
        below = None if backbone is None else run_recipe(study, backbone).learning_rate
        tried.append((spec.kind, recipe.learning_rate, below))
        if recipe.learning_rate == diverging.get(spec.kind):
            raise DivergedError("The loss is not finite.")

    def outcome(study, spec):
        rate = run_recipe(study, spec).learning_rate
        # All that are not best are equally good.
        return {"final_top1": 0.9 if rate == best[spec.kind] else 0.5}

    monkeypatch.setattr(tuning, "train_run", trial)
    monkeypatch.setattr(tuning, "run_record", outcome)
    tuned, record = tune_learning_rates(study, SPECS)
    chosen = tuned.recipes
    assert {kind: recipe.learning_rate for kind, recipe in chosen.items()} == best
    assert {kind: recipe.epochs for kind, recipe in chosen.items()} == dict.fromkeys(best, 60)
    assert [(kind, rate) for kind, rate, _ in tried] == [(k, r) for k in best for r in RATES]
    # Transformers are tried on the backbones of the trials.
    assert {below for kind, _, below in tried if kind == "bcos_vit"} == {1e-3}
    assert {below for kind, _, below in tried if kind == "vit"} == {3e-4}
    assert json.loads((tmp_path / "tuning.json").read_text()) == record
    assert {each["epochs"] for each in record.values()} == {24}
    assert record["vit"]["top1_by_rate"] == {"0.0001": 0.5, "0.0003": 0.9, "0.001": 0.5}
    # A run that diverges counts as never right.
    assert record["bcos_vit"]["top1_by_rate"] == {"0.0001": 0.9, "0.0003": 0.5, "0.001": 0.0}
    # Other figures of the folder use the same rates.
    tried.clear()
    assert tune_learning_rates(study, SPECS[:1])[0].recipes == chosen
    assert tried == []
    shorter = {kind: replace(recipe, epochs=30) for kind, recipe in study.recipes.items()}
    tune_learning_rates(replace(study, recipes=shorter), SPECS[:1])
    assert len(tried) == len(RATES)


def test_the_first_run_of_each_kind_stands_for_it():
    assert representatives(SPECS) == [SPECS[0], SPECS[1], SPECS[2], SPECS[4]]
    # But for variants, where there is the model itself.
    variant = RunSpec.vit("bcos", "ti", "38", position="none")
    assert representatives([variant, SPECS[3], SPECS[2]]) == [SPECS[3]]
    assert representatives([variant]) == [variant]

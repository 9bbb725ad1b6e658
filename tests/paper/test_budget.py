"""Minutes become epochs; what does not fit is said."""

import json
from dataclasses import replace

import pytest

from bcosvit.paper import RunSpec, Study, measure, runs, tuning
from bcosvit.paper.measure import measure_run
from bcosvit.paper.runs import Cost, remaining_seconds, run_cost, run_folder, train_runs
from bcosvit.paper.tuning import LEAST_EPOCHS, fit_epochs
from tests.paper.support import SETTINGS, small_study

BCOS, BACKBONE = RunSpec.vit("bcos", "ti", "38"), RunSpec(model="bcos_densenet121")
COST = Cost(start_seconds=2.0, seconds_per_image=0.1)


def study_of(tmp_path, **changes) -> Study:
    options = small_study("scenes?size=32&train=24&val=12", tmp_path, **changes)
    return Study.open(options, log=lambda _: None)


@pytest.fixture
def small(tmp_path, monkeypatch) -> Study:
    """Sixty epochs of 24 + 12/3 images, a tenth of a second each: 28 s every ten epochs."""
    for module in (runs, tuning):
        monkeypatch.setattr(module, "run_cost", lambda study, spec: COST)
    return study_of(tmp_path, recipe="small", settings={})


def with_minutes(study: Study, minutes: float, **changes) -> Study:
    """A study whose time has just begun, and stands still where the clock does."""
    return replace(study, minutes=minutes, began=100.0, **changes)


@pytest.fixture
def _still(monkeypatch):
    """Time stands still."""
    monkeypatch.setattr("bcosvit.paper.study.time.monotonic", lambda: 100.0)


@pytest.mark.usefixtures("_still")
def test_epochs_are_cut_to_what_fits(small):
    # Two runs of 2 s + 60·2.8 s; three quarters of four minutes are 180 s.
    cut, record = fit_epochs(with_minutes(small, 4), [BACKBONE, BCOS])
    share = (180 - 4) / (2 * 168)
    assert record["share"] == pytest.approx(share)
    assert record["uncut_minutes"] == pytest.approx(2 * 170 / 60)
    assert {recipe.epochs for recipe in cut.recipes.values()} == {int(share * 60)}
    # Warmup takes the same share of the run.
    assert cut.recipes["vit"].warmup_epochs == pytest.approx(3 * int(share * 60) / 60)
    kinds = ("bcos_densenet121", "bcos_vit")
    assert sum(COST.of_run(cut.recipes[kind], small.source) for kind in kinds) <= 180


@pytest.mark.usefixtures("_still")
def test_time_is_left_for_trials(small):
    _, record = fit_epochs(with_minutes(small, 4, tune=True), [BCOS])
    # Four starts, and 1 + 3 · 0.4 times the work of a run.
    assert record["share"] == pytest.approx((180 - 8) / (2.2 * 168))


@pytest.mark.usefixtures("_still")
def test_with_time_enough_nothing_is_cut(small):
    cut, record = fit_epochs(with_minutes(small, 1000), [BACKBONE, BCOS])
    assert record["share"] == 1
    assert cut.recipes == small.recipes


@pytest.mark.usefixtures("_still")
def test_there_is_a_least_number_of_epochs(small):
    cut, _ = fit_epochs(with_minutes(small, 0.01), [BACKBONE, BCOS])
    assert {recipe.epochs for recipe in cut.recipes.values()} == {LEAST_EPOCHS}


@pytest.mark.usefixtures("_still")
def test_a_folder_keeps_its_epochs(small):
    first, _ = fit_epochs(with_minutes(small, 4), [BACKBONE, BCOS])
    again, record = fit_epochs(with_minutes(small, 1000), [BACKBONE])
    assert again.recipes == first.recipes
    assert record["minutes"] == 4
    # Another schedule is fitted anew.
    longer = {kind: replace(recipe, epochs=80) for kind, recipe in small.recipes.items()}
    cut, _ = fit_epochs(with_minutes(small, 1000, recipes=longer), [BACKBONE])
    assert cut.recipes == longer


@pytest.mark.usefixtures("_still")
def test_what_would_take_too_long_is_left_out_with_its_reason(small, monkeypatch):
    trained = []
    monkeypatch.setattr(runs, "train_run", lambda study, spec: trained.append(spec))
    study = with_minutes(small, 1)
    train_runs(study, [BCOS])
    assert trained == []
    assert "2.8 minutes" in study.missing["bcos_densenet121"]
    assert "0.8 are left" in study.missing["bcos_densenet121"]
    assert "bcos_densenet121 is missing" in study.missing["bcos_vit_ti_38"]


def test_a_run_that_is_half_done_takes_half_as_long(small):
    whole = remaining_seconds(small, BACKBONE)
    folder = run_folder(small, BACKBONE)
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch\n" + "".join(f"{n}\n" for n in range(30)))
    assert remaining_seconds(small, BACKBONE) == pytest.approx((whole - 2) / 2 + 2)


def test_what_there_is_no_time_to_measure_is_missing(small, monkeypatch):
    monkeypatch.setattr(measure, "run_record", lambda study, spec: {})
    study = replace(small, minutes=1, began=-1e9)
    assert measure_run(study, BCOS, "accuracy") is None
    assert study.missing.keys() == {"accuracy of bcos_vit_ti_38"}


def test_costs_are_measured_once_by_training_itself(tmp_path, monkeypatch):
    study = study_of(tmp_path, settings={**SETTINGS, "batch_size": 4})
    cost = run_cost(study, BCOS)
    assert cost.start_seconds > 0
    assert cost.seconds_per_image > 0
    cached = json.loads((tmp_path / "throughput.json").read_text())["bcos_vit_ti_38"]
    assert cached["images_per_second"] == pytest.approx(1 / cost.seconds_per_image)
    assert [path.name for path in tmp_path.iterdir()] == ["throughput.json"]
    monkeypatch.setattr(runs, "train_model", None)
    assert run_cost(study, BCOS) == cost


@pytest.mark.parametrize(
    "old",
    [
        "half a fi",
        # As written by version 0.1.
        '{"bcos_vit_ti_38": {"conditions": {"workers": 0}, "seconds_per_picture": 1.0}}',
    ],
)
def test_costs_of_other_versions_are_measured_again(tmp_path, monkeypatch, old):
    study = study_of(tmp_path)
    (tmp_path / "throughput.json").write_text(old)
    monkeypatch.setattr(runs, "_probe", lambda study, spec: COST)
    assert run_cost(study, BCOS) == COST

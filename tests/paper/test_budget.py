"""Minutes become epochs; what does not fit is said."""

import json
from dataclasses import replace

import pytest

from bcosvit.data.dataset import open_source
from bcosvit.paper import budget
from bcosvit.paper.budget import Clock, Cost, cost_of, fitted, seconds_left
from bcosvit.paper.lab import Lab
from bcosvit.paper.runs import Runs
from bcosvit.paper.schedule import recipes
from bcosvit.paper.spec import RunSpec, vit
from tests.paper.support import SETTINGS, small_study

BCOS, BACKBONE = vit("bcos", "ti", "38"), RunSpec(model="bcos_densenet121")


def runs_of(tmp_path, **changes) -> Runs:
    study = small_study("scenes?size=32&train=24&val=12", tmp_path, **changes)
    source = open_source(study.data)
    return Runs(
        study=study,
        source=source,
        recipes=recipes(study),
        fingerprint=source.fingerprint(),
        say=lambda _: None,
    )


@pytest.fixture
def small(tmp_path, monkeypatch) -> Runs:
    """Sixty epochs of 24 + 12/3 pictures, a tenth of a second each: 28 s every ten epochs."""
    cost = Cost(start_seconds=2.0, seconds_per_picture=0.1)
    monkeypatch.setattr(budget, "cost_of", lambda runs, spec: cost)
    return runs_of(tmp_path, recipe="small", settings={})


def still(monkeypatch, seconds: float) -> None:
    """Time stands still."""
    monkeypatch.setattr(budget.time, "monotonic", lambda: seconds)


def test_epochs_are_cut_to_what_fits(small, monkeypatch):
    still(monkeypatch, 100.0)
    # Two runs of 2 s + 60·2.8 s; three quarters of four minutes are 180 s.
    clock = Clock(minutes=4, began=100.0)
    cut, record = fitted(small, [BACKBONE, BCOS], clock)
    share = (180 - 4) / (2 * 168)
    assert record["share"] == pytest.approx(share)
    assert record["uncut_minutes"] == pytest.approx(2 * 170 / 60)
    assert {recipe.epochs for recipe in cut.values()} == {int(share * 60)}
    # The rise takes the same share of the run.
    assert cut["vit"].warmup_epochs == pytest.approx(3 * int(share * 60) / 60)
    takes = sum(
        Cost(start_seconds=2.0, seconds_per_picture=0.1).run(cut[k], small.source)
        for k in ("bcos_densenet121", "bcos_vit")
    )
    assert takes <= 180


def test_time_is_left_for_trials(small, monkeypatch):
    still(monkeypatch, 100.0)
    trials = [(BCOS, 0.5)] * 2
    _, record = fitted(small, [BCOS], Clock(minutes=4, began=100.0), trials=trials)
    # Three starts, and twice the work of a run.
    assert record["share"] == pytest.approx((180 - 6) / (2 * 168))


def test_with_time_enough_nothing_is_cut(small):
    cut, record = fitted(small, [BACKBONE, BCOS], Clock(minutes=1000))
    assert record["share"] == 1
    assert cut == small.recipes


def test_there_is_a_least_number_of_epochs(small):
    cut, _ = fitted(small, [BACKBONE, BCOS], Clock(minutes=0.01))
    assert {recipe.epochs for recipe in cut.values()} == {budget.LEAST_EPOCHS}


def test_a_folder_keeps_its_epochs(small):
    first, _ = fitted(small, [BACKBONE, BCOS], Clock(minutes=4))
    again, record = fitted(small, [BACKBONE], Clock(minutes=1000))
    assert again == first
    assert record["minutes"] == 4
    # Another schedule is another matter.
    longer = replace(small, recipes={k: replace(r, epochs=80) for k, r in small.recipes.items()})
    assert fitted(longer, [BACKBONE], Clock(minutes=1000))[0] == longer.recipes


def test_what_would_take_too_long_is_left_out_with_its_reason(small, monkeypatch):
    trained = []
    monkeypatch.setattr(Runs, "train", lambda self, spec: trained.append(spec))
    lab = Lab(runs=small, clock=Clock(minutes=1))
    lab.train([BCOS])
    assert trained == []
    assert lab.missing["bcos_densenet121"].startswith("it would take 2.8 minutes, and 0.7")
    assert "backbone bcos_densenet121 is missing" in lab.missing["bcos_vit_ti_38"]


def test_a_run_that_is_half_done_takes_half_as_long(small):
    whole = seconds_left(small, BACKBONE)
    folder = small.folder(BACKBONE)
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch\n" + "".join(f"{n}\n" for n in range(30)))
    assert seconds_left(small, BACKBONE) == pytest.approx((whole - 2) / 2 + 2)


def test_what_there_is_no_time_to_measure_is_missing(small, monkeypatch):
    monkeypatch.setattr(Runs, "done", lambda self, spec: {})
    lab = Lab(runs=small, clock=Clock(minutes=1, began=-1e9))
    assert lab.measure(BCOS, "accuracy") is None
    assert lab.missing == {"accuracy of bcos_vit_ti_38": "the minutes were spent"}


def test_costs_are_measured_once_by_training_itself(tmp_path, monkeypatch):
    runs = runs_of(tmp_path, settings={**SETTINGS, "batch_size": 4})
    cost = cost_of(runs, BCOS)
    assert cost.start_seconds > 0
    assert cost.seconds_per_picture > 0
    kept = json.loads((tmp_path / "throughput.json").read_text())["bcos_vit_ti_38"]
    assert kept["pictures_per_second"] == pytest.approx(1 / cost.seconds_per_picture)
    assert [path.name for path in tmp_path.iterdir()] == ["throughput.json"]
    monkeypatch.setattr(budget, "train_run", None)
    assert cost_of(runs, BCOS) == cost

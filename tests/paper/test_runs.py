"""What a run is made of, and what its folder is called."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from bcosvit.files import locked_folder
from bcosvit.metrics import write_summary
from bcosvit.paper import RunSpec, Study, reproduce, reproduction, runs
from bcosvit.paper.runs import (
    DONE,
    run_backbone,
    run_config,
    run_folder,
    run_name,
    with_backbones,
)
from bcosvit.paper.schedule import get_schedule, resolve_recipes, schedule_names
from tests.paper.support import small_study

BCOS = RunSpec.vit("bcos", "ti", "38")


def study_of(tmp_path, **changes) -> Study:
    data = "scenes?size=32&train=16&val=8"
    return Study.open(small_study(data, tmp_path, **{"settings": {}, **changes}))


def test_a_name_depends_on_what_the_result_depends_on(tmp_path):
    study = study_of(tmp_path)

    def with_settings(**settings):
        recipes = resolve_recipes(study.recipe, settings)
        return replace(study, settings=settings, recipes=recipes)

    name = run_name(study, BCOS)
    assert name.startswith("bcos_vit_ti_38-seed0-")
    assert run_name(with_settings(num_workers=3, checkpoint_steps=5), BCOS) == name
    others = [
        with_settings(epochs=3),
        with_settings(**{"model.depth": 3}),
        # Of the backbone, and so of the transformer on it.
        with_settings(**{"backbone.epochs": 3}),
        with_settings(**{"densenet.growth": 8}),
        replace(study, flavor="v1"),
        replace(study, fingerprint="others"),
    ]
    names = {name, *(run_name(other, BCOS) for other in others)}
    assert len(names | {run_name(study, replace(BCOS, seed=1))}) == len(others) + 2


def test_a_given_backbone_enters_by_its_content(tmp_path):
    names = []
    for content in (b"one", b"two"):
        file = tmp_path / f"{content.decode()}.pt"
        file.write_bytes(content)
        study = study_of(tmp_path, backbones={"bcos_densenet121": str(file)})
        assert run_backbone(study, BCOS) is None
        assert with_backbones(study, [BCOS]) == [BCOS]
        names.append(run_name(study, BCOS))
    assert names[0] != names[1]


def test_models_are_the_papers_but_for_what_is_asked(tmp_path):
    study = study_of(tmp_path)
    config = run_config(study, RunSpec.vit("bcos", "s", "13", position="add"))
    assert (config.width, config.tap, config.position) == (384, 1, "add")
    assert (config.backbone.flavor, config.num_classes) == ("v2", 8)
    plain = run_config(study, RunSpec.vit("conventional", "b", "87"))
    assert plain.backbone.flavor == "conventional"
    old = replace(study, flavor="v1")
    assert run_config(old, RunSpec(model="bcos_densenet121")).flavor == "v1"
    # The option of a figure takes precedence over the settings.
    study = replace(study, settings={"model.position": "none"})
    assert run_config(study, BCOS).position == "none"
    assert run_config(study, RunSpec.vit("bcos", "ti", "38", position="add")).position == "add"


def test_of_several_processes_one_trains_a_run_and_the_others_wait(tmp_path, monkeypatch):
    said: list[str] = []
    study = replace(study_of(tmp_path), log=said.append)
    trained = []

    def train(study: Study, spec: RunSpec) -> None:
        trained.append(spec)
        # Until the other one waits.
        while len(said) < 1:
            time.sleep(0.01)
        write_summary(run_folder(study, spec) / DONE, {})

    monkeypatch.setattr(runs, "_train_run", train)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(runs.train_run, study, BCOS) for _ in range(2)]
        wait(jobs, timeout=30)
        assert [job.exception() for job in jobs] == [None, None]
    assert trained == [BCOS]
    assert said == ["Waiting for another process, which trains bcos_vit_ti_38"]


def test_where_the_disk_has_no_locks_runs_are_trained_all_the_same(tmp_path, monkeypatch):
    def acquire(self, timeout=None):
        raise NotImplementedError("FileSystem does not appear to support flock")

    trained = []
    monkeypatch.setattr(runs.FileLock, "acquire", acquire)
    monkeypatch.setattr(runs, "_train_run", lambda study, spec: trained.append(spec))
    runs.train_run(study_of(tmp_path), BCOS)
    assert trained == [BCOS]


def test_two_commands_may_make_parts_of_a_figure_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "train_runs", lambda study, specs: None)
    data = "scenes?size=32&train=16&val=8"
    with locked_folder(tmp_path):
        made = reproduce("accuracy", small_study(data, tmp_path, settings={}))
    assert made.page.is_file()


def test_seeds_share_the_backbone(tmp_path):
    specs = list(BCOS.with_seeds(3))
    expected = [RunSpec(model="bcos_densenet121"), *specs]
    assert with_backbones(study_of(tmp_path), specs) == expected


@pytest.mark.parametrize("name", schedule_names())
def test_families_differ_in_the_loss_alone(name):
    for bcos, plain in (("bcos_densenet121", "densenet121"), ("bcos_vit", "vit")):
        one, other = get_schedule(name)[bcos], get_schedule(name)[plain]
        assert (one.loss, other.loss) == ("bce", "ce")
        # The paper's batches differ, too.
        same = {} if name != "paper" or "vit" not in bcos else {"batch_size": one.batch_size}
        assert replace(other, loss=one.loss, adam_eps=one.adam_eps, **same) == one


def test_settings_of_backbones_are_theirs():
    recipes = resolve_recipes("quick", {"epochs": 7, "backbone.epochs": 9, "cache_views": 2})
    assert recipes["densenet121"].cache_views == 0
    assert recipes["vit"].cache_views == 2
    assert {kind: recipe.epochs for kind, recipe in recipes.items()} == {
        "bcos_densenet121": 9,
        "densenet121": 9,
        "bcos_vit": 7,
        "vit": 7,
    }


def test_settings_of_a_kind_are_its_own():
    rates = {"vit.learning_rate": 1e-3, "bcos_vit.learning_rate": 3e-4, "learning_rate": 1e-2}
    recipes = resolve_recipes("quick", rates)
    assert {kind: recipe.learning_rate for kind, recipe in recipes.items()} == {
        "bcos_densenet121": 1e-2,
        "densenet121": 1e-2,
        "bcos_vit": 3e-4,
        "vit": 1e-3,
    }


def test_small_transformers_start_slower_than_backbones():
    small = get_schedule("small")
    assert small["bcos_vit"].learning_rate == small["vit"].learning_rate
    assert small["bcos_vit"].learning_rate < small["bcos_densenet121"].learning_rate

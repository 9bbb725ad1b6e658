"""What a run is made of, and what its folder is called."""

from dataclasses import replace

import pytest

from bcosvit.data.dataset import open_source
from bcosvit.paper.runs import Runs
from bcosvit.paper.schedule import SCHEDULES, recipes
from bcosvit.paper.spec import RunSpec, vit
from tests.paper.support import small_study

BCOS = vit("bcos", "ti", "38")


def runs_of(tmp_path, **changes) -> Runs:
    study = small_study("scenes?size=32&train=16&val=8", tmp_path, settings={}, **changes)
    source = open_source(study.data)
    return Runs(
        study=study, source=source, recipes=recipes(study), fingerprint=source.fingerprint()
    )


def with_settings(runs: Runs, **settings) -> Runs:
    study = replace(runs.study, settings=settings)
    return replace(runs, study=study, recipes=recipes(study))


def test_a_name_depends_on_what_the_result_depends_on(tmp_path):
    runs = runs_of(tmp_path)
    name = runs.name(BCOS)
    assert name.startswith("bcos_vit_ti_38-seed0-")
    assert with_settings(runs, num_workers=3, checkpoint_steps=5).name(BCOS) == name
    others = [
        with_settings(runs, epochs=3),
        with_settings(runs, **{"model.depth": 3}),
        # Of the backbone, and so of what stands on it.
        with_settings(runs, **{"backbone.epochs": 3}),
        with_settings(runs, **{"densenet.growth": 8}),
        replace(runs, study=replace(runs.study, flavor="v1")),
        replace(runs, fingerprint="others"),
    ]
    names = {name, *(other.name(BCOS) for other in others), runs.name(replace(BCOS, seed=1))}
    assert len(names) == len(others) + 2


def test_a_given_backbone_enters_by_its_content(tmp_path):
    names = []
    for content in (b"one", b"two"):
        file = tmp_path / f"{content.decode()}.pt"
        file.write_bytes(content)
        runs = runs_of(tmp_path, given={"bcos_densenet121": str(file)})
        assert runs.backbone(BCOS) is None
        assert runs.needed([BCOS]) == [BCOS]
        names.append(runs.name(BCOS))
    assert names[0] != names[1]


def test_models_are_the_papers_but_for_what_is_asked(tmp_path):
    runs = runs_of(tmp_path)
    config = runs.config(vit("bcos", "s", "13", position="add"))
    assert (config.width, config.tap, config.position) == (384, 1, "add")
    assert (config.backbone.flavor, config.num_classes) == ("v2", 8)
    assert runs.config(vit("conventional", "b", "87")).backbone.flavor == "conventional"
    old = replace(runs, study=replace(runs.study, flavor="v1"))
    assert old.config(RunSpec(model="bcos_densenet121")).flavor == "v1"
    # A figure's own axis wins over the settings.
    set_ = with_settings(runs, **{"model.position": "none"})
    assert set_.config(BCOS).position == "none"
    assert set_.config(vit("bcos", "ti", "38", position="add")).position == "add"


def test_seeds_share_the_backbone(tmp_path):
    runs = runs_of(tmp_path)
    specs = [replace(BCOS, seed=seed) for seed in range(3)]
    assert runs.needed(specs) == [RunSpec(model="bcos_densenet121"), *specs]


@pytest.mark.parametrize("name", SCHEDULES)
def test_families_differ_in_the_loss_alone(name):
    for bcos, plain in (("bcos_densenet121", "densenet121"), ("bcos_vit", "vit")):
        one, other = SCHEDULES[name][bcos], SCHEDULES[name][plain]
        assert (one.loss, other.loss) == ("bce", "ce")
        # The paper's batches differ, too.
        same = {} if name != "paper" or "vit" not in bcos else {"batch_size": one.batch_size}
        assert replace(other, loss=one.loss, adam_eps=one.adam_eps, **same) == one


def test_settings_of_backbones_are_theirs(tmp_path):
    study = small_study(
        "scenes", tmp_path, settings={"epochs": 7, "backbone.epochs": 9, "cache_views": 2}
    )
    assert recipes(study)["densenet121"].cache_views == 0
    assert recipes(study)["vit"].cache_views == 2
    assert {kind: recipe.epochs for kind, recipe in recipes(study).items()} == {
        "bcos_densenet121": 9,
        "densenet121": 9,
        "bcos_vit": 7,
        "vit": 7,
    }


def test_settings_of_a_kind_are_its_own(tmp_path):
    rates = {"vit.learning_rate": 1e-3, "bcos_vit.learning_rate": 3e-4, "learning_rate": 1e-2}
    study = small_study("scenes", tmp_path, settings=rates)
    assert {kind: recipe.learning_rate for kind, recipe in recipes(study).items()} == {
        "bcos_densenet121": 1e-2,
        "densenet121": 1e-2,
        "bcos_vit": 3e-4,
        "vit": 1e-3,
    }


def test_small_transformers_start_slower_than_backbones(tmp_path):
    small = recipes(small_study("scenes", tmp_path, recipe="small", settings={}))
    assert small["bcos_vit"].learning_rate == small["vit"].learning_rate
    assert small["bcos_vit"].learning_rate < small["bcos_densenet121"].learning_rate

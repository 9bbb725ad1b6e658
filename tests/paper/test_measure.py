"""When a measurement is taken again, and the ratio of the two branches of an attention block."""

import json
from dataclasses import replace

import pytest
import torch

from bcosvit import create_model
from bcosvit.attribution import METHODS
from bcosvit.metrics import METRICS, Metric, NotDefinedError
from bcosvit.paper import RunSpec, Study, measure
from bcosvit.paper.measure import branch_ratios, measure_options, measure_run
from bcosvit.paper.runs import run_folder
from tests.conftest import randomize, small_config
from tests.paper.support import small_study

ALL = ("inherent", "ixg", "intgrad", "gradcam", "gradsam", "rollout", "finatt")
"""The methods that apply to a B-cos model."""

BCOS, CONVENTIONAL = RunSpec.vit("bcos", "ti", "38"), RunSpec.vit("conventional", "ti", "38")


def result(methods):
    """What a metric finds, with a table by method."""
    scores = {method: [len(method)] for method in methods}
    return {"summary": {"images": 1, "score": dict(scores)}, "scores": scores, "divisors": {}}


@pytest.fixture
def measured(monkeypatch) -> list[tuple[Metric, tuple[str, ...]]]:
    """All measurements that are taken, of runs that count as trained: metric and methods."""
    taken: list[tuple[Metric, tuple[str, ...]]] = []

    def take(study, spec, metrics, methods):
        taken.extend((metric, tuple(methods)) for metric in metrics)
        return [result(methods) for _ in metrics]

    monkeypatch.setattr(measure, "_evaluate", take)
    monkeypatch.setattr(measure, "run_record", lambda study, spec: {})
    return taken


@pytest.fixture
def study(tmp_path) -> Study:
    return Study.open(small_study("scenes", tmp_path), log=lambda _: None)


def test_a_measurement_is_taken_again_when_its_numbers_would_change(study, measured, monkeypatch):
    def taken(study, metric="localization"):
        measured.clear()
        found = measure_run(study, BCOS, metric)
        names = (study.methods or ALL) if metric == "localization" else ()
        assert found == result(names)
        return [methods for _, methods in measured]

    assert [taken(study), taken(study), taken(study, "accuracy")] == [[ALL], [], [()]]
    # What the metric does not depend on changes nothing.
    assert taken(replace(study, images=9, batch_size=2)) == []
    assert taken(replace(study, grids=9)) == [ALL]
    assert taken(replace(study, methods=("inherent", "ixg"))) == []
    assert taken(replace(study, methods=("libragrad", "ixg"))) == [("libragrad",)]
    assert taken(replace(study, limit=9)) == [ALL]
    monkeypatch.setattr(type(METHODS.get("rollout")), "version", 2)
    assert [taken(study), taken(study), taken(study, "accuracy")] == [[("rollout",)], [], []]
    monkeypatch.setattr(type(METHODS.get("plrp")), "version", 2)
    assert taken(study) == []
    monkeypatch.setattr(type(METRICS.get("localization")), "version", 99)
    assert taken(study) == [ALL]


def test_options_are_measured_once_each(study, measured):
    sets = [{}, {"output": "logit"}, {"smooth": 15}]
    assert measure_run(study, BCOS, "perturbation") is not None
    measured.clear()
    found = measure_options(study, BCOS, "perturbation", sets)
    assert [metric.smooth for metric, _ in measured] == [1, 15]
    assert found == [result(ALL)] * 3
    measured.clear()
    assert measure_options(study, BCOS, "perturbation", sets) == found
    assert measured == []


def test_sets_of_options_that_lack_the_same_methods_share_a_pass(study, measured):
    few, more = replace(study, methods=("ixg",)), replace(study, methods=("ixg", "rollout"))
    assert measure_options(few, BCOS, "perturbation", [{}]) == [result(("ixg",))]
    measured.clear()
    sets = [{}, {"output": "logit"}, {"smooth": 15}]
    assert measure_options(more, BCOS, "perturbation", sets) == [result(("ixg", "rollout"))] * 3
    assert [(metric.output, metric.smooth, methods) for metric, methods in measured] == [
        ("probability", 1, ("rollout",)),
        ("logit", 1, ("ixg", "rollout")),
        ("probability", 15, ("ixg", "rollout")),
    ]


def test_what_is_not_defined_is_missing_and_the_rest_is_measured(study, measured, monkeypatch):
    take = measure._evaluate

    def refuse(study, spec, metrics, methods):
        if any(metric.output == "logit" for metric in metrics):
            raise NotDefinedError("The mean logit is negative.")
        return take(study, spec, metrics, methods)

    monkeypatch.setattr(measure, "_evaluate", refuse)
    sets = [{}, {"output": "logit"}, {"smooth": 15}]
    assert measure_options(study, BCOS, "perturbation", sets) == [result(ALL), None, result(ALL)]
    assert study.missing == {
        "perturbation (output=logit) of bcos_vit_ti_38": "The mean logit is negative."
    }


def test_where_no_method_applies_it_says_so(study, measured):
    none = replace(study, methods=("plrp",))
    assert measure_run(none, BCOS, "perturbation") is None
    assert "none of the methods" in none.missing["perturbation of bcos_vit_ti_38"]
    assert measured == []


def test_methods_are_compared_where_they_apply(study, measured):
    def methods(spec):
        measure_run(study, spec, "perturbation")
        files = (run_folder(study, spec) / "measured").glob("perturbation-*")
        kept = {
            name for file in files for name in json.loads(file.read_text())["settings"]["method"]
        }
        ((_, taken),) = measured
        assert kept == set(taken)
        measured.clear()
        return list(taken)

    attention = ["ixg", "intgrad", "gradcam", "gradsam", "rollout", "finatt"]
    assert methods(BCOS) == ["inherent", *attention]
    assert methods(CONVENTIONAL) == [*attention, "cheferlrp", "plrp"]


def test_files_of_other_versions_are_not_used(study, measured):
    folder = run_folder(study, BCOS) / "measured"
    folder.mkdir(parents=True)
    old = {"settings": {"metric": "accuracy"}, "result": {"pictures": 3}, "machine": "cpu"}
    (folder / "accuracy-0b5a1c2d.json").write_text(json.dumps(old))
    (folder / "predictions-0b5a1c2d.json").write_text("half a fi")
    assert measure_run(study, BCOS, "accuracy") == result(())
    assert measure.measured_on(study, BCOS) != []


def test_data_that_a_metric_cannot_measure_are_said_to_be_so(study, measured):
    few = replace(study, source=replace(study.source, classes=study.source.classes[:3]))
    assert measure_run(few, BCOS, "localization") is None
    assert "4 different classes" in few.missing["localization of bcos_vit_ti_38"]
    assert measured == []


def test_ratios_are_those_of_the_branches(model, images):
    ratios = branch_ratios(model, images)
    tokens = model.position(model.tokens(images))
    for layer, block in enumerate(model.blocks):
        added = block.attention(tokens)
        expected = (tokens.norm(dim=-1) / added.norm(dim=-1)).log().mean(1)
        assert torch.allclose(ratios[:, layer], expected, rtol=1e-9)
        tokens = block(tokens)
    assert ratios.shape == (len(images), len(model.blocks))


def test_nothing_is_left_on_the_model(images):
    model = randomize(create_model(small_config(attention="standard"))).double().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    branch_ratios(model, images)
    assert all(not module._forward_hooks and module.training for module in model.modules())
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_branch_that_adds_nothing_has_a_finite_ratio(images):
    model = create_model(small_config(attention="standard")).double()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.project.weight)
        torch.nn.init.zeros_(block.attention.project.bias)
    ratios = branch_ratios(model, images)
    assert ratios.isfinite().all()
    assert (ratios > 100).all()

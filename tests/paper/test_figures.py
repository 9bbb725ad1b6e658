"""The numbers of the tables, against what they are by hand."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from bcosvit.metrics import Bootstrap, Estimate
from bcosvit.paper import FIGURES, RunSpec, Study, faithfulness, figures
from bcosvit.paper.charts import grouped_bars, method_markers
from bcosvit.paper.figures import Top1, best_post_hoc, branch_ratio, mean_scores, measure_scores
from tests.paper.support import small_study


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """Makes a study in which everything was measured already."""

    def study(answers, **options) -> Study:
        def measured(study, spec, metric, options=({},)):
            return [answers.get((spec.label, metric)) for _ in options]

        monkeypatch.setattr(figures, "measure_options", measured)
        for module in (figures, faithfulness):
            monkeypatch.setattr(module, "measure_run", lambda *args: measured(*args)[0])
        return Study.open(small_study("scenes", tmp_path, **options))

    return study


def scores(**methods):
    """By method: a constant score on Ti-38 and S-38."""
    return {
        method: {
            "Ti-38": Bootstrap().resample([first] * 4),
            "S-38": Bootstrap().resample([second] * 4),
        }
        for method, (first, second) in methods.items()
    }


def test_localization_is_compared_with_the_best_mean_over_models():
    # Rollout is best on average, IxG on the second model.
    found = scores(inherent=(0.8, 0.6), rollout=(0.5, 0.2), ixg=(0.2, 0.4), random=(0.9, 0.9))
    assert best_post_hoc(found) == "rollout"
    outcome = FIGURES.get("localization").outcome(found)
    ratio, each, inherent = outcome.headlines
    assert ratio.value.value == pytest.approx(0.7 / 0.35)
    assert ratio.ours.startswith("2.00 [2.00, 2.00] (Rollout)")
    assert each.value.value == pytest.approx((0.8 / 0.5 + 0.6 / 0.4) / 2)
    assert inherent.value.value == pytest.approx(0.7)
    (mean,) = [r for r in outcome.rows if r["method"] == "rollout" and r["model"] == "mean of 2"]
    assert mean["localization"] == pytest.approx(0.35)
    assert mean["÷ inherent"] == pytest.approx((0.5 / 0.8 + 0.2 / 0.6) / 2)
    assert mean["÷ inherent low"] == pytest.approx(mean["÷ inherent"])


def test_areas_are_normalized_per_model_before_they_are_averaged():
    found = scores(inherent=(0.4, 0.1), rollout=(0.1, 0.06), ixg=(0.2, 0.0))
    # Relative to inherent: rollout 0.25 and 0.6, IxG 0.5 and 0; the means are 0.425 and 0.25.
    (line,) = FIGURES.get("perturbation").outcome(found).headlines
    assert line.value.value == pytest.approx(1 / 0.425)
    assert "Rollout" in line.ours
    assert "1.99" in line.paper


def test_rollout_is_compared_even_where_another_method_is_best():
    found = scores(inherent=(0.4, 0.1), rollout=(0.1, 0.05), ixg=(0.8, 0.2))
    # Relative to inherent: rollout 0.25 and 0.5, IxG 2 and 2.
    best, rollout = FIGURES.get("perturbation").outcome(found).headlines
    assert best.value.value == pytest.approx(1 / 2)
    assert rollout.claim.startswith("Inherent ÷ Rollout")
    assert rollout.value.value == pytest.approx(1 / 0.375)
    *_, rollout = FIGURES.get("localization").outcome(found).headlines
    assert rollout.value.value == pytest.approx(0.25 / 0.075)
    assert rollout.paper == "2.47"


def test_areas_are_also_those_of_the_logit(tmp_path, monkeypatch):
    def measured(study, spec, metric, options):
        assert metric == "perturbation"
        values = {"probability": {"inherent": [0.2], "ixg": [0.4]}}
        values["logit"] = {"inherent": [0.6], "ixg": [0.4]}
        return [
            {"scores": values[each.get("output", "probability")], "divisors": {}}
            for each in options
        ]

    monkeypatch.setattr(figures, "measure_options", measured)
    outcome = FIGURES.get("perturbation").make(Study.open(small_study("scenes", tmp_path)))
    by_probability, by_logit = outcome.headlines
    assert by_probability.value.value == pytest.approx(1 / 2)
    assert by_logit.value.value == pytest.approx(3 / 2)
    assert by_logit.claim.endswith("by the logit")
    assert by_logit.paper == "not given"
    found = {(r["output"], r["method"]): r["ABC"] for r in outcome.rows if r["model"] == "Ti-38"}
    assert found == pytest.approx(
        {
            ("probability", "inherent"): 0.2,
            ("probability", "ixg"): 0.4,
            ("logit", "inherent"): 0.6,
            ("logit", "ixg"): 0.4,
        }
    )
    # The plot is the paper's.
    assert "0.5" in outcome.charts[0].inline
    assert len(outcome.charts) == 1


@pytest.mark.parametrize(
    ("inherent", "says"),
    [((-0.1, 0.2), "inherent area is not positive on Ti-38"), ((0.1, 0.2), "is not above zero")],
)
def test_a_ratio_that_means_nothing_is_not_given(inherent, says):
    (line,) = (
        FIGURES.get("perturbation").outcome(scores(inherent=inherent, ixg=(-0.1, -0.1))).headlines
    )
    assert line.value is None
    assert says in line.ours


def test_nothing_is_divided_by_what_may_as_well_be_zero():
    def resampled(*values):
        return {"Ti-38": Bootstrap().resample(list(values))}

    found = {"inherent": resampled(0.5, 0.6, 0.4), "rollout": resampled(0.2, -0.15, 0.1)}
    assert mean_scores(found)["rollout"].value > 0
    (line,) = FIGURES.get("perturbation").outcome(found).headlines
    assert line.value is None
    assert "the best post-hoc method, Rollout, is not above zero" in line.ours
    ixg = {"ixg": resampled(0.3, 0.3, 0.3)}
    best, rollout = FIGURES.get("perturbation").outcome(found | ixg).headlines
    assert best.value.value == pytest.approx(5 / 3)
    assert rollout.value is None
    assert "Rollout's mean is not above zero" in rollout.ours


def test_conventional_models_are_compared_by_their_own_best_method():
    bcos = scores(inherent=(0.9, 0.7), rollout=(0.3, 0.3))
    plain = scores(intgrad=(0.4, 0.3), rollout=(0.2, 0.3))
    areas = scores(inherent=(0.4, 0.2)), scores(finatt=(0.1, 0.1), ixg=(0.05, 0.1))
    found = {"localization": (bcos, plain), "perturbation": areas}
    outcome = FIGURES.get("conventional").outcome(found)
    localization, perturbation = outcome.headlines
    assert localization.value.value == pytest.approx(0.8 / 0.35)
    assert localization.ours.endswith("(IntGrad)")
    assert perturbation.value.value == pytest.approx(0.3 / 0.1)
    assert [chart.name for chart in outcome.charts] == [
        "localization-families",
        "perturbation-families",
    ]
    # On the right FinAtt is at 1/3 of the inherent explanations' 1.
    assert "FinAtt 0.333" in outcome.charts[1].inline
    # Two sides are not squeezed into a column.
    assert all(chart.wide for chart in outcome.charts)
    assert {row["model"] for row in outcome.means} == {"mean of 2"}


def test_scores_are_averaged_over_seeds_and_models_are_independent(answered):
    answers = {
        ("bcos_vit_ti_38", "localization"): {"scores": {"ixg": [0.1, 0.3]}, "divisors": {}},
        ("bcos_vit_ti_38, seed 1", "localization"): {"scores": {"ixg": [0.6]}, "divisors": {}},
        ("bcos_vit_s_38", "localization"): {"scores": {"ixg": [0.1, 0.3]}, "divisors": {}},
        ("bcos_vit_b_38", "localization"): {"scores": {}, "divisors": {}},
    }
    study = answered(answers, seeds=2, sizes=("ti", "s", "b"))
    found = measure_scores(study, "bcos", "localization")["ixg"]
    assert found["Ti-38"].value == pytest.approx((0.2 + 0.6) / 2)
    assert found.keys() == {"Ti-38", "S-38"}
    assert "too few" in study.missing["localization of bcos_vit_b_38"]
    apart = (found["S-38"] - found["Ti-38"]).estimate()
    assert apart.high - apart.low > 0.1


def test_areas_are_divided_by_the_mean_start(answered):
    result = {"scores": {"ixg": [0.1, 0.2]}, "divisors": {"ixg": [0.5, 1.0]}}
    study = answered({("bcos_vit_ti_38", "perturbation"): result})
    (found,) = measure_scores(study, "bcos", "perturbation")["ixg"].values()
    assert found.value == pytest.approx(0.15 / 0.75)


def test_gaps_are_between_the_same_images(answered):
    answers = {
        ("bcos_vit_ti_38", "accuracy"): {"correct": "1101"},
        ("bcos_vit_ti_38, seed 1", "accuracy"): {"correct": "1111"},
        ("vit_ti_38", "accuracy"): {"correct": "1001"},
        ("vit_ti_38, seed 1", "accuracy"): {"correct": "1001"},
    }
    outcome = FIGURES.get("accuracy").make(answered(answers, seeds=2))
    ahead, gap, best = outcome.headlines
    assert ahead.ours == "1 of 1"
    assert gap.value.value == pytest.approx(7 / 8 - 1 / 2)
    # Both are right on the first and last image: only the other two distinguish them.
    assert gap.value.estimate().low == pytest.approx(0)
    assert best.value.value == pytest.approx(7 / 8)
    bcos, plain = outcome.rows
    assert bcos["seed deviation"] == pytest.approx(0.25 / 2**0.5)
    assert plain["seed deviation"] == 0
    assert bcos["B-cos − conventional"] == pytest.approx(3 / 8)


def test_the_prior_is_compared_with_the_best_other(answered):
    name = "bcos_vit_ti_38"
    answers = {
        (name, "accuracy"): {"correct": "1110"},
        (f"{name}, position=add", "accuracy"): {"correct": "1100"},
        (f"{name}, position=none", "accuracy"): {"correct": "1000"},
    }
    (line,) = FIGURES.get("positional").make(answered(answers)).headlines
    assert line.value.value == pytest.approx(0.25)
    assert "over add" in line.ours


def test_seeds_that_are_missing_are_left_out(answered):
    study = answered({("bcos_vit_ti_38, seed 1", "accuracy"): {"correct": "10"}}, seeds=2)
    found = Top1.of(study, RunSpec.vit("bcos", "ti", "38"))
    assert found.by_seed == {1: 0.5}
    assert found.row()["seed deviation"] is None
    assert Top1.of(study, RunSpec.vit("bcos", "s", "38")) is None


def test_branch_ratios_are_geometric(answered):
    study = answered({("bcos_vit_ti_38", "norms"): {"log_ratio": [0.0, 2.0]}})
    ratio = branch_ratio(study, RunSpec.vit("bcos", "ti", "38"))
    assert ratio.value == pytest.approx(2.718281828)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_measured_is_said(answered, name):
    outcome = FIGURES.get(name).make(answered({}))
    assert not outcome.rows
    assert not outcome.charts
    assert not outcome.panels
    assert {line.ours for line in outcome.headlines} == {"not measured"}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("positional", 12),
        ("accuracy", 18),
        ("localization", 9),
        ("perturbation", 9),
        ("conventional", 18),
        ("attention", 9),
        ("maxout", 27),
        ("qualitative", 2),
        ("normalization", 1),
        ("options", 18),
        ("faithfulness", 18),
    ],
)
def test_the_papers_own_axes(tmp_path, name, count):
    study = Study.open(small_study("scenes", tmp_path, sizes=None, taps=None))
    runs = FIGURES.get(name).runs(study)
    assert len(runs) == len(set(runs)) == count
    if name == "positional":
        assert {spec.short for spec in runs} == {"Ti-87", "S-87", "B-87"}
    if name == "attention":
        assert {spec.short for spec in runs} == {"S-13", "S-38", "S-87"}
    if name in ("qualitative", "normalization"):
        assert {spec.short for spec in runs} == {"B-38"}


@pytest.mark.parametrize("sides", [1, 2])
def test_legends_of_all_models_fit(sides):
    """Nothing touches the edge of the picture."""
    models = {f"{size}-{tap}": 0.5 for size in ("Ti", "S", "B") for tap in ("13", "38", "87")}
    chart = method_markers(
        "all", "All.", "score", {f"side {n}": {"ixg": models} for n in range(sides)}
    )
    with Image.open(io.BytesIO(chart.png)) as image:
        pixels = np.asarray(image.convert("L"))
    for edge in (pixels[:, 0], pixels[:, -1], pixels[0], pixels[-1]):
        assert (edge == 255).all()


def test_series_keep_their_order_and_short_logarithmic_axes_have_plain_numbers():
    groups = {
        "one": {"first": Estimate(mean=0.4, low=0.3, high=0.5, count=4)},
        "two": {"second": Estimate(mean=3.0, low=2.9, high=3.1, count=4)},
    }
    chart = grouped_bars("b", "Bars.", "×", groups, series=["second", "none"], logarithmic=True)
    texts = re.findall(r"<text[^>]*>([^<]*)<", chart.svg.decode())
    assert texts == ["one", "two", "0.5", "1", "2", "×", "second", "first"]


def test_slopes_of_all_methods_are_part_of_the_table(answered):
    slope = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": 4}
    result = {
        "scores": {"inherent": [0.2] * 4, "ixg": [0.1] * 4},
        "divisors": {},
        "summary": {"slope": {"inherent": slope, "ixg": {**slope, "mean": -2.0}}},
    }
    answers = {("bcos_vit_ti_38", "additivity"): result}
    outcome = FIGURES.get("faithfulness").make(answered(answers, sizes=("ti",), taps=("38",)))
    rows = [row for row in outcome.rows if row["metric"] == faithfulness.SLOPE]
    assert [(row["method"], row["score"]) for row in rows] == [("inherent", 0.5), ("ixg", -2.0)]
    assert all(list(row) == list(outcome.rows[0]) for row in outcome.rows)
    assert outcome.headlines[-1].ours == "0.50"

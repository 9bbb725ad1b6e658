"""Intervals against what is known of means."""

import math

import pytest
import torch

from bcosvit.metrics import Bootstrap, Estimate


def test_a_zero_that_is_negative_by_rounding_has_no_minus():
    assert str(Estimate(mean=-1e-9, low=-0.0004, high=0.0, count=2)) == "0.000 [0.000, 0.000]"
    assert str(Estimate(mean=-0.25, low=-math.inf, high=math.nan, count=2)) == "-0.250 [-inf, nan]"


def test_interval_of_a_normal_mean():
    values = 3 + 2 * torch.randn(400, dtype=torch.float64)
    found = Bootstrap(samples=20_000).mean(values)
    half = 1.96 * float(values.std()) / math.sqrt(400)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.mean - half, abs=0.05 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.05 * half)
    assert found.count == 400


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for _ in range(200):
        found = Bootstrap(samples=300).mean(torch.rand(60, dtype=torch.float64))
        covered += found.low <= 0.5 <= found.high
    assert 180 <= covered <= 198


def test_ratio_of_means():
    values, per = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 7.0])
    found = Bootstrap().mean(values, per)
    assert found.mean == 0.5
    # The possible resamples: both the first, one of each, both the second.
    assert found.low == pytest.approx(3 / 7)
    assert found.high == 1.0


def test_seeded_and_in_chunks(monkeypatch):
    values = torch.rand(50, 2)
    whole = Bootstrap(seed=1).means(values)
    assert Bootstrap(seed=1).means(values) == whole
    assert Bootstrap(seed=2).means(values) != whole
    assert Bootstrap(seed=1).mean(values[:, 1]) == whole[1]
    monkeypatch.setattr("bcosvit.metrics.statistics.AT_ONCE", 1000)
    assert Bootstrap(seed=1).means(values) == whole


def test_one_value_and_a_wider_level():
    one = Bootstrap().mean([0.25])
    assert (one.mean, one.low, one.high) == (0.25, 0.25, 0.25)
    values = torch.rand(50)
    half, most = Bootstrap(level=0.5).mean(values), Bootstrap(level=0.99).mean(values)
    assert most.low < half.low < half.high < most.high


@pytest.mark.parametrize(
    ("values", "message"), [([], "nothing to average"), ([1.0, math.nan], "NaN or infinity")]
)
def test_what_has_no_mean_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Bootstrap().mean(values)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="samples = 0"):
        Bootstrap(samples=0)
    with pytest.raises(ValueError, match=r"level = 95"):
        Bootstrap(level=95)


def test_one_resampling_is_the_fewest():
    assert Bootstrap(samples=1).mean([1.0, 2.0]).count == 2
    with pytest.raises(ValueError, match="samples = 0 is not allowed"):
        Bootstrap(samples=0)

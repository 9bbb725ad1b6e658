"""Numbers that are computed from means, with their resamplings."""

import math

import pytest
import torch

from bcosvit.metrics import Bootstrap, Resampled

VALUES = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()


def sampled(values, seed=0) -> Resampled:
    return Bootstrap(seed=seed).resample(values)


def test_a_mean_has_the_interval_that_evaluation_gives_it():
    ours, theirs = sampled(VALUES).estimate(), Bootstrap().mean(VALUES)
    assert (ours.mean, ours.low, ours.high, ours.count) == pytest.approx(
        (theirs.mean, theirs.low, theirs.high, theirs.count), rel=1e-12
    )


def test_a_ratio_of_means_does_too():
    per = [1 + value**2 for value in VALUES]
    ours = (sampled(VALUES) / sampled(per)).estimate()
    theirs = Bootstrap().mean(VALUES, torch.tensor(per))
    assert (ours.mean, ours.low, ours.high) == pytest.approx(
        (theirs.mean, theirs.low, theirs.high), rel=1e-6
    )


def test_what_two_have_in_common_cancels_with_one_seed_alone():
    shifted = sampled([value + 1 for value in VALUES]) - sampled(VALUES)
    assert shifted.estimate().high - shifted.estimate().low == pytest.approx(0, abs=1e-12)
    apart = sampled([value + 1 for value in VALUES], seed=1) - sampled(VALUES)
    assert apart.value == pytest.approx(1)
    assert apart.estimate().high - apart.estimate().low > 0.1


def test_a_power_of_e_is_taken_of_every_resampling():
    ours = sampled(VALUES).exp()
    assert ours.value == pytest.approx(math.exp(sampled(VALUES).value), rel=1e-12)
    torch.testing.assert_close(ours.draws, sampled(VALUES).draws.exp())


def test_each_number_of_a_mean_counts_alike():
    both = Resampled.mean_of([sampled([1.0, 3.0]), sampled([10.0] * 50)])
    assert both.value == 6
    assert both.count == 2
    # Of the first, a half: from 1 to 3.
    assert (both.estimate().low, both.estimate().high) == (5.5, 6.5)


def test_nothing_divided_by_nothing_has_no_bound():
    ratio = sampled([1.0, 1.0]) / sampled([0.0, 0.0])
    assert ratio.value == math.inf
    found = (sampled([0.0]) / sampled([0.0])).estimate()
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="nothing to average"):
        sampled([])


def test_an_interval_holds_95_percent_unless_told():
    draws = torch.arange(1001, dtype=torch.float64)
    found = Resampled(value=500.0, draws=draws, count=9).estimate()
    assert (found.low, found.high) == pytest.approx((25, 975))

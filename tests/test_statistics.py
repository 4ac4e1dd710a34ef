"""Intervals and win rates against closed forms, tables worked by hand and simulation."""

import numpy as np
import pytest
from conftest import fails
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.evaluation.statistics import (
    Interval,
    bootstrap_mean,
    final_score,
    paired_bootstrap,
    trailing_mean,
    updates_to_reach,
    wilson,
    win_rate,
)

SCORES = np.random.default_rng(7).normal(1.5, 2.0, 60)
numbers = st.floats(-1e3, 1e3)
lists = st.lists(numbers, min_size=1, max_size=30)


def test_bootstrap_agrees_with_a_plain_loop():
    generator = np.random.default_rng(3)
    means = sorted(
        np.mean([SCORES[generator.integers(60)] for _ in range(60)]) for _ in range(4000)
    )
    found = bootstrap_mean(SCORES)
    assert found.mean == pytest.approx(SCORES.mean())
    tolerance = 0.2 * SCORES.std() / 60**0.5
    assert (found.low, found.high) == pytest.approx((means[100], means[3900]), abs=tolerance)


@settings(max_examples=40, deadline=None)
@given(values=lists, shift=numbers)
def test_interval_lies_in_the_data_and_moves_with_it(values, shift):
    found = bootstrap_mean(values, n=200)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    moved = bootstrap_mean([value + shift for value in values], n=200)
    assert moved[:3] == pytest.approx([part + shift for part in found[:3]], abs=1e-6)


def test_one_value_two_values_and_a_small_spread_on_a_large_mean():
    assert bootstrap_mean([3.0]) == Interval(3.0, 3.0, 3.0, 0.95)
    # a resampled mean is 0, 1/2 or 1: chances 1/4, 1/2, 1/4
    assert bootstrap_mean([0, 1]) == Interval(0.5, 0.0, 1.0)
    small = bootstrap_mean(SCORES - SCORES.mean())
    large = bootstrap_mean(SCORES - SCORES.mean() + 1e6)
    assert large.high - large.low == pytest.approx(small.high - small.low, rel=1e-6)


def test_pairs_share_their_prompts():
    easy = np.random.default_rng(2).normal(0, 10, 80)
    a, b = easy + 0.5, easy + np.random.default_rng(3).normal(0, 0.1, 80)
    found = paired_bootstrap(a, b)
    assert found == bootstrap_mean(a - b)
    assert 0 < found.low < found.high < 1
    backward = paired_bootstrap(b, a)
    assert backward.mean == pytest.approx(-found.mean)
    assert (backward.low, backward.high) == pytest.approx((-found.high, -found.low), abs=1e-2)


@pytest.mark.parametrize("bad", [[], [1, None], [1, float("inf")], [[1.0], [2.0]]])
def test_values_that_are_no_finite_numbers_are_refused(bad):
    fails(lambda: bootstrap_mean(bad), "values")
    fails(lambda: paired_bootstrap([1.0, 2.0, 3.0], bad), "b")
    fails(lambda: final_score([1.0, None, None], 2), "values")


def test_updates_to_reach_counts_whole_windows_from_one():
    curve = [3, 0, 0, 1, 2, 3, 3, 3]
    assert updates_to_reach(curve, 2, window=3) == 6
    assert updates_to_reach(curve, 3, window=1) == 1
    assert updates_to_reach(curve, 3, window=3) == 8
    assert updates_to_reach(curve, 3.01, window=3) is None
    assert updates_to_reach(curve, -5, window=3) == 3
    assert updates_to_reach([1, 3], 2, window=5) == 2
    assert updates_to_reach([1, None, 3, 5], 4, window=2) == 4
    assert trailing_mean([4, None, 2, None, None], 2)[:4].tolist() == [4, 4, 2, 2]


# Win rates

Z = 1.959963984540054


@given(n=st.integers(1, 3000), share=st.floats(0, 1))
def test_wilson_ends_solve_its_equation(n, share):
    """Its ends are the p whose distance to the share is z standard errors *at p*."""
    wins = round(share * n * 2) / 2
    found = wilson(wins, n)
    assert found.mean == wins / n and 0 <= found.low <= found.mean <= found.high <= 1
    for p in (found.low, found.high):
        assert (wins / n - p) ** 2 == pytest.approx(Z**2 * p * (1 - p) / n, abs=1e-9)


# Newcombe (1998), table I, method 3
@pytest.mark.parametrize(
    "wins, n, low, high",
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_by_numbers(wins, n, low, high):
    assert wilson(wins, n)[1:3] == pytest.approx((low, high), abs=5e-5)


def test_win_rates_count_ties_as_half():
    found = win_rate(["first"] * 6 + ["tie"] * 2 + ["second"] * 2 + ["malformed", None, "skipped"])
    assert found[1:] == (6, 2, 2, 3) and found.rate == wilson(7, 10)


def test_there_must_be_something_to_count():
    fails(lambda: win_rate(["skipped", None]), "no verdict")

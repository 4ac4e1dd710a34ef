"""Win rates and agreement against closed forms, tables worked by hand and simulation."""

import math
from math import comb

import numpy as np
import pytest
from conftest import fails
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from marlhf_lite.evaluation.statistics import wilson, win_rate
from marlhf_lite.lab.figures.agreement import (
    agree,
    agreement_table,
    kappa,
    pairs_for_win_rate,
    verdicts_of_scores,
)

# Intervals

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
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_by_numbers(wins, n, low, high):
    assert wilson(wins, n)[1:3] == pytest.approx((low, high), abs=5e-5)


def test_win_rates_count_ties_as_half():
    found = win_rate(["first"] * 6 + ["tie"] * 2 + ["second"] * 2 + ["malformed", None, "skipped"])
    assert found[1:] == (6, 2, 2, 3) and found.rate == wilson(7, 10)


# Agreement


def raters(table, names):
    """Two raters' verdicts with these counts: rows are the first one's, columns the other's."""
    pairs = [(a, b) for a, line in zip(names, table) for b, count in zip(names, line) for _ in range(count)]
    return [{str(i): pair[side] for i, pair in enumerate(pairs)} for side in (0, 1)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=3))
def test_kappa_is_that_of_the_textbook(table):
    n = sum(map(sum, table))
    assume(n)
    p_o = sum(table[i][i] for i in range(3)) / n
    p_e = sum(sum(table[i]) * sum(line[i] for line in table) for i in range(3)) / n**2
    expected = (p_o - p_e) / (1 - p_e) if p_e < 1 else math.nan
    assert float(kappa(np.array(table))) == pytest.approx(expected, abs=1e-9, nan_ok=True)
    found = agree(*raters(table, ["second", "tie", "first"]))
    assert found.kappa.mean == pytest.approx(expected, abs=1e-9, nan_ok=True) and found.pairs == n


def test_bootstrap_of_kappa_is_that_of_a_plain_loop():
    one, other = raters([[20, 5], [10, 15]], ["first", "second"])
    pairs, generator, drawn = list(one), np.random.default_rng(5), []
    for _ in range(1500):
        counts = np.zeros((2, 2))
        for pair in (pairs[i] for i in generator.integers(50, size=50)):
            counts[int(one[pair] == "first"), int(other[pair] == "first")] += 1
        drawn.append(float(kappa(counts)))
    found = agree(one, other).kappa
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)


def test_table_one():
    one, other = raters([[20, 5], [10, 15]], ["first", "second"])
    table = agreement_table({"RM": one, "GPT-4": other, "Human": one})
    assert [(row["a"], row["b"]) for row in table] == [("RM", "GPT-4"), ("RM", "Human"), ("GPT-4", "Human")]
    assert table[0]["agreement"] == wilson(35, 50)._asdict() and table[0]["kappa"]["mean"] == pytest.approx(0.4)
    assert table[1]["kappa"]["mean"] == pytest.approx(1)
    some = agree({"a": "first", "b": "tie", "c": "second", "d": "malformed"}, {"b": "tie", "c": "first", "d": "first"})
    assert (some.pairs, some.left_out, some.agreement.mean) == (2, 2, 0.5)


# How many pairs


def power_of(n, p):
    """Chance that a two-sided z test of wins against one half rejects, exactly, without ties."""
    return sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1) if abs(k / n - 0.5) > Z * 0.5 / n**0.5)


@pytest.mark.parametrize("rate", [0.6, 0.65, 0.75])
def test_that_many_pairs_have_a_power_of_80_percent(rate):
    n = pairs_for_win_rate(rate)
    assert np.mean([power_of(m, rate) for m in range(n - 4, n + 5)]) == pytest.approx(0.8, abs=0.025)
    assert pairs_for_win_rate(1 - rate) == n


def test_there_must_be_something_to_count():
    fails(lambda: wilson(3, 2), "3 wins of 2 pairs")
    fails(lambda: wilson(0, 0), "at least one pair")
    fails(lambda: win_rate(["skipped", None]), "no verdict")
    fails(lambda: verdicts_of_scores([1.0], [1.0, 2.0]), "second")
    fails(lambda: agree({"a": "first"}, {"b": "first"}), "no pair of 2")

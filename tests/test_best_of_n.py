"""Best-of-N against every subset, one by one, in float64."""

import math
from itertools import combinations

import numpy as np
import pytest
from conftest import fails
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.evaluation.best_of_n import best_of_n, best_weights
from marlhf_lite.evaluation.statistics import bootstrap_mean


def every_subset(scores, other, n):
    """Means over all n-subsets of the best score, and of `other` at the best (of equal ones, their mean)."""
    best, picked = [], []
    for subset in combinations(range(len(scores)), n):
        top = max(scores[i] for i in subset)
        best.append(top)
        picked.append(np.mean([other[i] for i in subset if scores[i] == top]))
    return np.mean(best), np.mean(picked)


cases = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(-3, 3).map(float), min_size=size, max_size=size),  # few values: ties
        st.lists(st.floats(-5, 5), min_size=size, max_size=size),
        st.integers(1, size),
    )
)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_weights_are_shares_of_subsets(case):
    scores, other, n = case
    weights = best_weights(scores, n)
    assert weights.sum() == pytest.approx(1, abs=1e-12) and (weights >= 0).all()
    best, picked = every_subset(scores, other, n)
    assert weights @ scores == pytest.approx(best, abs=1e-12)
    assert weights @ other == pytest.approx(picked, abs=1e-12)


def rows(scores, gold=None, method="PPO", temperature=0.8):
    """scores: [prompt][sample]."""
    return [
        {"id": f"p{i}", "prompt": f"prompt {i}", "method": method, "temperature": temperature, "sample": k,
         "response": f"{i}{k}", "rm_score": x} | ({} if gold is None else {"gold": gold[i][k]})
        for i, line in enumerate(scores) for k, x in enumerate(line)
    ]  # fmt: skip


SCORES = np.random.default_rng(2).normal(size=(5, 6)).round(1).tolist()
GOLD = np.random.default_rng(3).normal(size=(5, 6)).tolist()


def test_a_cell_for_every_method_temperature_and_n():
    """Greedy answers have one sample, and N = 1 alone."""
    greedy = rows([line[:1] for line in SCORES], temperature=0.0)
    cells = best_of_n(rows(SCORES, GOLD) + greedy + rows(GOLD, SCORES, "SFT", 1.2), sizes=(1, 3, 6))
    named = [(c["method"], c["temperature"], c["n"]) for c in cells]
    assert named == [
        *(("PPO", 0.8, n) for n in (1, 3, 6)),
        ("PPO", 0.0, 1),
        *(("SFT", 1.2, n) for n in (1, 3, 6)),
    ]
    assert "gold" not in cells.pop(3)
    for cell in cells:
        first, other = (GOLD, SCORES) if cell["method"] == "SFT" else (SCORES, GOLD)
        best, picked = zip(*(every_subset(a, b, cell["n"]) for a, b in zip(first, other)))
        assert cell["rm_score"] == pytest.approx(bootstrap_mean(best, 2000)._asdict())
        assert cell["gold"] == pytest.approx(bootstrap_mean(picked, 2000)._asdict())
        assert (cell["samples"], cell["prompts"]) == (6, 5)
    assert [c["kl_bound"] for c in cells[:2]] == pytest.approx([0, math.log(3) - 2 / 3])


def test_bad_input_is_named():
    fails(lambda: best_of_n(rows(SCORES), (1, 8)), "--eval_samples 8")
    fails(lambda: best_of_n(rows(SCORES), (0,)), "best_of 0")
    fails(lambda: best_of_n(rows(SCORES)[1:], (1,)), "PPO")
    fails(lambda: best_of_n([{"method": "PPO", "prompt": "x", "response": ""}], (1,)), "rm_score")

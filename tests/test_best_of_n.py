"""Best-of-N against every subset, one by one, in float64."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.evaluation.best_of_n import best_of_n, best_weights, pick_best
from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.utils.errors import InputError


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


@settings(max_examples=150, deadline=None)
@given(cases)
def test_weights_are_shares_of_subsets(case):
    scores, other, n = case
    weights = best_weights(scores, n)
    assert weights.sum() == pytest.approx(1, abs=1e-12) and (weights >= 0).all()
    best, picked = every_subset(scores, other, n)
    assert weights @ scores == pytest.approx(best, abs=1e-12)
    assert weights @ other == pytest.approx(picked, abs=1e-12)


def test_no_bias_over_many_draws():
    """Its mean over sets of 6 samples is E[max of 4], which for uniform numbers is 4/5; the plain maximum is not."""
    draws = np.random.default_rng(0).random((4000, 6))
    found = np.array([best_weights(row, 4) @ row for row in draws])
    assert found.mean() == pytest.approx(0.8, abs=4 * found.std() / 4000**0.5)
    assert found.std() < draws[:, :4].max(1).std()  # and it varies less than the best of the first four


def test_ends_and_large_sets():
    scores = np.random.default_rng(1).normal(size=300)
    assert best_weights(scores, 1) == pytest.approx(np.full(300, 1 / 300))
    assert best_weights(scores, 300).nonzero()[0].tolist() == [scores.argmax()]
    i = np.argsort(scores)[250]  # has 250 below it
    assert best_weights(scores, 32)[i] == pytest.approx(math.comb(250, 31) / math.comb(300, 32), rel=1e-10)


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
    answers = rows(SCORES, GOLD) + rows(SCORES, GOLD, temperature=1.2) + rows(GOLD, SCORES, "SFT", 1.2)
    cells = best_of_n(answers, sizes=(1, 3, 6))
    assert [(c["method"], c["temperature"], c["n"]) for c in cells] == [
        (m, t, n) for m, t in (("PPO", 0.8), ("PPO", 1.2), ("SFT", 1.2)) for n in (1, 3, 6)
    ]
    for cell in cells:
        first, other = (GOLD, SCORES) if cell["method"] == "SFT" else (SCORES, GOLD)
        best, picked = zip(*(every_subset(a, b, cell["n"]) for a, b in zip(first, other)))
        assert cell["rm_score"] == pytest.approx(bootstrap_mean(best, 2000)._asdict())
        assert cell["gold"] == pytest.approx(bootstrap_mean(picked, 2000)._asdict())
        assert (cell["samples"], cell["prompts"]) == (6, 5)
    assert [c["kl_bound"] for c in cells[:2]] == pytest.approx([0, math.log(3) - 2 / 3])


def test_without_gold_and_greedy():
    answers = rows(SCORES) + rows([[x[0]] for x in SCORES], temperature=0.0)
    cells = best_of_n(answers, sizes=(1, 4))
    assert [(c["temperature"], c["n"]) for c in cells] == [(0.8, 1), (0.8, 4), (0.0, 1)]
    assert all("gold" not in cell for cell in cells)
    assert best_of_n(rows([[1.0]], temperature=0.0), sizes=(4,)) == []


def test_the_best_of_the_first_n_is_picked():
    answers = rows([[1.0, 3.0, 3.0, 9.0], [2.0, 0.0, 1.0, 2.0]])
    best = pick_best(answers[::-1], 3)
    assert best[["id", "sample"]].to_numpy().tolist() == [["p1", 0], ["p0", 1]]
    assert set(best["method"]) == {"PPO best-of-3"}
    assert pick_best(answers, 4, "best")["rm_score"].tolist() == [9.0, 2.0]
    assert pick_best(answers, 1)["response"].tolist() == ["00", "10"] and not len(pick_best([], 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: best_of_n(rows(SCORES), (1, 8)), "best_of 8: PPO at temperature 0.8 has 6 samples.*--eval_samples 8"),
        (lambda: best_of_n(rows(SCORES), (0,)), "best_of 0: give at least 1"),
        (lambda: best_of_n(rows(SCORES)[1:], (1,)), r"PPO: prompts have \[5, 6\] samples"),
        (lambda: pick_best(rows(SCORES), 7), "best_of 7: PPO has 6"),
        (lambda: pick_best(rows(SCORES) + rows(SCORES, method="SFT"), 2), "rows of PPO, SFT: give one method"),
        (lambda: pick_best(rows(SCORES) + rows(SCORES, temperature=1.0), 2), "one temperature"),
        (lambda: best_weights([1.0, 2.0], 3), "best_of 3"),
        (lambda: best_weights([1.0, math.nan], 1), r"scores\[1\] is nan"),
        (lambda: best_of_n([{"method": "PPO", "prompt": "x", "response": ""}]), "PPO: a response without rm_score"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call()

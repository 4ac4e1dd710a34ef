"""Agreement of raters and people against closed forms, tables worked by hand and simulation."""

import gzip
import json
import math
from collections import Counter
from math import comb
from pathlib import Path

import numpy as np
import pytest
from conftest import fails
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from marlhf_lab.figures.agreement import (
    agree,
    agree_in_groups,
    agreement_table,
    kappa,
    pairs_for_win_rate,
    verdicts_of_scores,
)
from marlhf_lab.studies import people
from marlhf_lite.evaluation.statistics import wilson

Z = 1.959963984540054


def raters(table, names):
    """Two raters' verdicts with these counts: rows are the first one's, columns the other's."""
    pairs = [
        (a, b)
        for a, line in zip(names, table)
        for b, count in zip(names, line)
        for _ in range(count)
    ]
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
    assert [(row["a"], row["b"]) for row in table] == [
        ("RM", "GPT-4"),
        ("RM", "Human"),
        ("GPT-4", "Human"),
    ]
    assert table[0]["agreement"] == wilson(35, 50)._asdict() and table[0]["kappa"][
        "mean"
    ] == pytest.approx(0.4)
    assert table[1]["kappa"]["mean"] == pytest.approx(1)
    some = agree(
        {"a": "first", "b": "tie", "c": "second", "d": "malformed"},
        {"b": "tie", "c": "first", "d": "first"},
    )
    assert (some.pairs, some.left_out, some.agreement.mean) == (2, 2, 0.5)


# People

SAYS = {"first": 0, "tie": 1, "second": 2}


def people_by_hand():
    """[(instruction, verdicts of three people, those of GPT-3.5 and PandaLM-7B)] from the file itself."""
    path = Path(__file__).resolve().parents[2] / "data" / "pandalm" / "verdicts.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    judges = ("GPT-3.5", "PandaLM-7B")
    return [
        (r["instruction"], [r[f"person {k}"] for k in (1, 2, 3)], [r[name] for name in judges])
        for r in rows
    ]


def loop_of_kappas(couples):
    """Agreement and κ from a list of two verdicts each: chance from the pooled frequencies of either side."""
    couples = [(a, b) for a, b in couples if a in SAYS and b in SAYS]
    shares = [[sum(c[side] == v for c in couples) / len(couples) for v in SAYS] for side in (0, 1)]
    p_o, p_e = (
        sum(a == b for a, b in couples) / len(couples),
        sum(x * y for x, y in zip(*shares, strict=True)),
    )
    return p_o, (p_o - p_e) / (1 - p_e)


def test_the_kappa_of_three_people_is_that_of_fleiss():
    """Fleiss (1971): the mean over pairs of the share of couples of raters that agree, and the pooled frequencies."""
    counts = np.array([[said.count(v) for v in SAYS] for _, said, _ in people_by_hand()])
    p_o, p_e = ((counts**2).sum(1) - 3).mean() / 6, ((counts.sum(0) / counts.sum()) ** 2).sum()
    found = people.with_a_person()[0]
    assert found["agreement"]["mean"] == pytest.approx(p_o)
    assert found["kappa"]["mean"] == pytest.approx((p_o - p_e) / (1 - p_e))


def test_judges_and_people_by_a_plain_loop():
    pairs = people_by_hand()
    most = [max(SAYS, key=said.count) for _, said, _ in pairs]
    assert Counter(most) == {"tie": 105, "first": 422, "second": 472}, (
        "the labels that PandaLM's README counts"
    )
    said = {"GPT-3.5": [x[2][0] for x in pairs], "PandaLM-7B": [x[2][1] for x in pairs]}
    said |= {"always second": ["second"] * len(pairs), "most of the three": most}
    rows = {row["judge"]: row for row in people.with_a_person()}
    for name, verdicts in said.items():
        couples = [
            (x, person)
            for x, (_, three, _) in zip(verdicts, pairs, strict=True)
            for person in three
        ]
        expected = loop_of_kappas(couples)
        found = rows[name]["agreement"]["mean"], rows[name]["kappa"]["mean"]
        assert found == pytest.approx(expected, abs=1e-12) and rows[name][
            "pairs"
        ] == 999 - verdicts.count(None)
    best = np.mean([max(Counter(three).values()) / 3 for _, three, _ in pairs])
    assert rows["most of the three"]["agreement"]["mean"] == pytest.approx(best), (
        "what no judge can exceed"
    )
    others = [
        (three[k] == three[k - 1]) / 2 + (three[k] == three[k - 2]) / 2
        for _, three, _ in pairs
        for k in range(3)
    ]
    assert rows["another person"]["agreement"]["mean"] == pytest.approx(np.mean(others)), (
        "one of the two others"
    )


def test_kappas_of_any_two_of_them_are_cohen_s():
    raters = people.verdicts()
    for row in people.each_with_each():
        plain = agree(raters[row["a"]], raters[row["b"]])
        assert (
            row["kappa"]["mean"] == pytest.approx(plain.kappa.mean) and row["pairs"] == plain.pairs
        )
        assert (
            row["agreement"]["mean"] == plain.agreement.mean and row["left_out"] == plain.left_out
        )


def test_the_interval_draws_instructions_and_not_pairs():
    by_instruction, generator, drawn = {}, np.random.default_rng(3), []
    for instruction, three, (_, judge) in people_by_hand():
        by_instruction.setdefault(instruction, []).extend((judge, person) for person in three)
    groups = list(by_instruction.values())
    for _ in range(300):
        chosen = generator.integers(len(groups), size=len(groups))
        drawn.append(loop_of_kappas([couple for i in chosen for couple in groups[i]]))
    row = next(row for row in people.with_a_person() if row["judge"] == "PandaLM-7B")
    for name, values in zip(("agreement", "kappa"), zip(*drawn, strict=True), strict=True):
        low, high = np.quantile(values, [0.025, 0.975])
        assert (row[name]["low"], row[name]["high"]) == pytest.approx((low, high), abs=0.02)


# How many pairs


def power_of(n, p):
    """Chance that a two-sided z test of wins against one half rejects, exactly, without ties."""
    return sum(
        comb(n, k) * p**k * (1 - p) ** (n - k)
        for k in range(n + 1)
        if abs(k / n - 0.5) > Z * 0.5 / n**0.5
    )


@pytest.mark.parametrize("rate", [0.6, 0.65, 0.75])
def test_that_many_pairs_have_a_power_of_80_percent(rate):
    n = pairs_for_win_rate(rate)
    assert np.mean([power_of(m, rate) for m in range(n - 4, n + 5)]) == pytest.approx(
        0.8, abs=0.025
    )
    assert pairs_for_win_rate(1 - rate) == n


def test_there_must_be_something_to_compare():
    fails(lambda: verdicts_of_scores([1.0], [1.0, 2.0]), "second")
    fails(lambda: agree({"a": "first"}, {"b": "first"}), "no pair of 2")
    fails(lambda: agree_in_groups([({"a": "first"}, {"b": "first"})], {"a": 0, "b": 1}), "no pair")

"""Statistics of a segmentation, agreement of two, and the check of a rule of the user's own."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import MacroActions, boundary_f1, describe

parts = st.lists(st.lists(st.integers(1, 6), max_size=6), max_size=5)


@settings(max_examples=100, deadline=None)
@given(parts, st.integers(0, 3))
def test_describe_matches_a_loop(lists, tail):
    got = describe(MacroActions.from_lengths(lists, max(map(sum, lists), default=0) + tail))
    flat = [n for row in lists for n in row]
    assert got["responses"] == len(lists) and got["tokens"] == sum(flat) and got["macro_actions"] == len(flat)
    assert got["macro_actions_per_response"] == (len(flat) / len(lists) if lists else 0)
    assert got["mean_length"] == (sum(flat) / len(flat) if flat else 0)
    assert got["single_share"] == (flat.count(1) / len(flat) if flat else 0)
    assert got["histogram"] == {n: flat.count(n) for n in sorted(set(flat))}
    assert list(got["histogram"]) == sorted(got["histogram"])
    json.dumps(got)


def cuts(lists):
    return {(row, sum(one[:k])) for row, one in enumerate(lists) for k in range(1, len(one))}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5), st.data())
def test_boundary_f1_matches_a_loop(totals, data):
    def draw():
        lists = []
        for total in totals:
            lists.append([])
            while sum(lists[-1]) < total:
                lists[-1].append(data.draw(st.integers(1, min(5, total - sum(lists[-1])))))
        return lists

    a, b = draw(), draw()
    left, right = (MacroActions.from_lengths(lists, max(totals, default=0) + 1) for lists in (a, b))
    mine, theirs = cuts(a), cuts(b)
    # 2 P R / (P + R), micro-averaged: pooled over responses, not a mean of their scores
    expected = 2 * len(mine & theirs) / (len(mine) + len(theirs)) if mine or theirs else 1.0
    assert boundary_f1(left, right) == pytest.approx(expected) == boundary_f1(right, left)
    assert boundary_f1(left, left) == 1.0

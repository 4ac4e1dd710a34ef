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
    found = set()
    for row, one in enumerate(lists):
        place = 0
        for n in one[:-1]:
            place += n
            found.add((row, place))
    return found


@settings(max_examples=150, deadline=None)
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
    T = max(totals, default=0) + 1
    left, right = MacroActions.from_lengths(a, T), MacroActions.from_lengths(b, T)
    mine, theirs = cuts(a), cuts(b)
    hits = len(mine & theirs)
    if not mine and not theirs:
        expected = 1.0
    elif not hits:
        expected = 0.0
    else:
        precision, recall = hits / len(mine), hits / len(theirs)
        expected = 2 * precision * recall / (precision + recall)
    assert boundary_f1(left, right) == pytest.approx(expected) == boundary_f1(right, left)
    assert boundary_f1(left, left) == 1.0


def test_boundary_f1_by_hand():
    a = MacroActions.from_lengths([[2, 2, 2], [4]])
    b = MacroActions.from_lengths([[2, 4], [1, 3]], 6)
    # inner boundaries {2, 4} and {} against {2} and {1}: one in common of two and two
    assert boundary_f1(a, b) == 0.5
    # micro-averaged: pooled over responses, not a mean of their scores
    assert boundary_f1(a, MacroActions.from_lengths([[2, 4], [4]])) == pytest.approx(2 / 3)
    assert boundary_f1(MacroActions.from_lengths([[3]]), MacroActions.from_lengths([[1, 1, 1]])) == 0.0

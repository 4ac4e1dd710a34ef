"""Termination by perplexity against loops written from its definitions, in exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import MacroActions, Perplexity

RULES = ("macro", "prefix", "token")
# Few distinct values, so that equal ones, where a perplexity stays the same, are common.
nlls = st.lists(
    st.lists(st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.3]), st.floats(0, 30, width=32)), max_size=25), max_size=5
)


def mean(xs):
    return sum(xs, Fraction(0)) / len(xs)


def loop(rule, row):
    """Lists of NLLs, one a macro action. A perplexity is exp of a mean NLL: comparing those is the same."""
    row = [Fraction(float(torch.tensor(x))) for x in row]
    out = []
    for t, x in enumerate(row):
        if t == 0:
            rises = True
        elif rule == "macro":
            rises = mean([*out[-1], x]) > mean(out[-1])
        elif rule == "prefix":
            rises = mean(row[: t + 1]) > mean(row[:t])
        else:
            rises = x > row[t - 1]
        if rises:
            out.append([])
        out[-1].append(x)
    return out


def batch(rows, tail=2):
    """mask and log-probabilities, NaN on padding."""
    width = max(map(len, rows), default=0) + tail
    mask = torch.tensor([[t < len(r) for t in range(width)] for r in rows], dtype=torch.bool).reshape(len(rows), width)
    x = torch.tensor([[-v for v in r] + [math.nan] * (width - len(r)) for r in rows]).reshape(len(rows), width)
    return mask, x


def lengths(macro):
    return [[b - a for a, b in row] for row in macro.spans()]


@settings(max_examples=300, deadline=None)
@given(nlls, st.sampled_from(RULES))
def test_matches_a_loop(rows, rule):
    mask, logprobs = batch(rows)
    macro = Perplexity(rule)(mask, ref_logprobs=logprobs)
    assert isinstance(macro, MacroActions) and torch.equal(macro.token_mask, mask)
    assert lengths(macro) == [[len(w) for w in loop(rule, row)] for row in rows]


@settings(max_examples=100, deadline=None)
@given(nlls, st.sampled_from(RULES))
def test_early_begins_one_token_before(rows, rule):
    """As in the released code: all inner boundaries one token earlier, those at the second token fall away."""
    mask, logprobs = batch(rows)
    late = Perplexity(rule)(mask, ref_logprobs=logprobs).spans()
    early = Perplexity(rule, early=True)(mask, ref_logprobs=logprobs).spans()
    for row, a, b in zip(rows, late, early):
        starts = sorted({s - 1 for s, _ in a[1:]} - {0})
        assert [s for s, _ in b] == ([0, *starts] if row else [])


def test_by_hand():
    mask, logprobs = batch([[3, 1, 1.5, 2.5, 2.5, 0.1]])
    # macro: 3 | 1 joins, mean 2 | 1.5 joins, mean 11/6 | 2.5 rises | 2.5 joins, equal | 0.1 joins
    assert lengths(Perplexity("macro")(mask, ref_logprobs=logprobs)) == [[3, 3]]
    # prefix: means 3, 2, 11/6, 2, 2.1, 1.77: rises at 2.5 twice
    assert lengths(Perplexity("prefix")(mask, ref_logprobs=logprobs)) == [[3, 1, 2]]
    # token: rises at 1.5 and at the first 2.5
    assert lengths(Perplexity("token")(mask, ref_logprobs=logprobs)) == [[2, 1, 3]]
    assert lengths(Perplexity("token", early=True)(mask, ref_logprobs=logprobs)) == [[1, 1, 4]]


@pytest.mark.parametrize("rule", RULES)
def test_equal_tokens_are_one_macro_action(rule):
    """0.1 has no exact float: sums of it must not drift above or below their multiple."""
    for value in (0.1, 0.7, 1 / 3, 13.37):
        mask, logprobs = batch([[value] * 3000, [value] * 7])
        assert lengths(Perplexity(rule)(mask, ref_logprobs=logprobs)) == [[3000], [7]]
        assert lengths(Perplexity(rule)(mask, ref_logprobs=logprobs.bfloat16())) == [[3000], [7]]

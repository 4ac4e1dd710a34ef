"""Termination rules: n-grams, fixed, listed and randomized; the whole response; perplexity; the largest change."""

import itertools
import math
from fractions import Fraction

import pytest
import reference_macro as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import (
    FixedNGram,
    LargestChange,
    Listed,
    MacroActions,
    Perplexity,
    RandomizedNGram,
    Shuffled,
    TerminationRule,
    Whole,
    check_segmentation,
)

quick = settings(max_examples=60, deadline=None)
ragged = st.tuples(st.lists(st.integers(0, 80), max_size=6), st.integers(0, 5))


def mask_of(counts, tail=0):
    width = max(counts, default=0) + tail
    return torch.arange(width) < torch.tensor(counts, dtype=torch.int64)[:, None]


def lengths_of(macro: MacroActions):
    return [[b - a for a, b in row] for row in macro.spans()]


@quick
@given(ragged, st.one_of(st.integers(1, 90), st.just(math.inf)))
def test_fixed_matches_a_loop(shape, n):
    counts, tail = shape
    macro = FixedNGram(n)(mask_of(counts, tail))
    assert lengths_of(macro) == [ref.fixed_lengths(c, n) for c in counts]
    assert torch.equal(macro.token_mask, mask_of(counts, tail))


@quick
@given(ragged, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_listed_matches_a_loop(shape, lengths):
    counts, tail = shape
    expected = []
    for count in counts:
        left, row = count, []
        while left:
            row.append(min(left, lengths[min(len(row), len(lengths) - 1)]))
            left -= row[-1]
        expected.append(row)
    assert lengths_of(Listed(tuple(lengths))(mask_of(counts, tail))) == expected


def test_infinity_whole_and_large_n_agree():
    mask = mask_of([9, 1, 0, 5], tail=2)
    for rule in (FixedNGram(math.inf), Whole(), FixedNGram(9), FixedNGram(10**30)):
        assert lengths_of(rule(mask)) == [[9], [1], [], [5]]
    assert lengths_of(FixedNGram(1)(mask)) == [[1] * 9, [1], [], [1] * 5]


@quick
@given(
    ragged,
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(-(2**63), 2**64),
    st.integers(-(2**40), 2**40),
)
def test_randomized_is_a_shuffle_of_the_list_then_the_rest(shape, lengths, repeats, seed, step):
    counts, tail = shape
    macro = RandomizedNGram(lengths, repeats, seed)(mask_of(counts, tail), step=step)
    assert torch.equal(macro.token_mask, mask_of(counts, tail))
    bag = sorted(lengths * repeats)
    for count, got in zip(counts, lengths_of(macro)):
        assert sum(got) == count and 0 not in got
        if count > sum(bag):
            assert sorted(got[:-1]) == bag and got[-1] == count - sum(bag)
        elif count == sum(bag):
            assert sorted(got) == bag
        else:  # all but the last are drawn from the bag, the last is cut short or drawn too
            left = list(bag)
            for n in got[:-1]:
                left.remove(n)
            assert not got or got[-1] <= max(left)


def test_randomized_depends_on_seed_and_step():
    mask = mask_of([70, 40, 70, 0, 1, 70], tail=4)
    rule = RandomizedNGram(seed=5)
    whole = lengths_of(rule(mask))
    assert whole == lengths_of(rule(mask)) == lengths_of(RandomizedNGram(seed=5)(mask))
    assert whole[0] != whole[2]  # a row has an order of its own
    assert lengths_of(RandomizedNGram(seed=6)(mask))[0] != whole[0]
    assert lengths_of(rule(mask, step=1))[0] != whole[0]
    # each of several processes draws its own, the first one what one alone does
    shared = [lengths_of(RandomizedNGram(seed=5)(mask, process=process)) for process in range(3)]
    assert shared[0] == whole and shared[1][0] != whole[0] != shared[2][0] != shared[1][0]
    two = [lengths_of(Shuffled(starts_124, seed=2)(mask, process=process)) for process in (0, 1)]
    assert two[0] == lengths_of(Shuffled(starts_124, seed=2)(mask)) != two[1]
    # seed and step are not interchangeable
    assert lengths_of(RandomizedNGram(seed=1)(mask, step=2)) != lengths_of(
        RandomizedNGram(seed=2)(mask, step=1)
    )


def test_randomized_order_is_uniform():
    B, bag = 24_000, [2, 3, 5, 10]
    macro = RandomizedNGram()(torch.ones(B, 61, dtype=torch.bool))
    assert (
        macro.lengths.shape[1] == 13
        and (macro.lengths.sum(1) == 61).all()
        and (macro.lengths[:, 12] == 1).all()
    )
    for place in range(12):
        for n in bag:
            share = (macro.lengths[:, place] == n).float().mean().item()
            assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / B)
    # neighbours: without replacement, the same length again is a little rarer than one in four
    again = (macro.lengths[:, 0] == macro.lengths[:, 1]).float().mean().item()
    assert abs(again - 2 / 11) < 5 * math.sqrt(2 / 11 * 9 / 11 / B)
    assert len({tuple(row) for row in macro.lengths[:200].tolist()}) == 200


def starts_124(mask, **context):
    """Lengths 1, 2, 4, 1, 2, 4, ...: starts at 0, 1 and 3 of every seven tokens."""
    place = torch.arange(mask.shape[1]) % 7
    return MacroActions.from_starts(((place < 2) | (place == 3)).expand_as(mask), mask)


def test_shuffled_keeps_each_responses_lengths():
    mask = mask_of([40, 0, 21, 40, 1], tail=3)
    lengths, orders = lengths_of(starts_124(mask)), set()
    for step in range(4):
        macro = Shuffled(starts_124, seed=2)(mask, step=step)
        assert torch.equal(macro.token_mask, mask)
        assert [sorted(row) for row in lengths_of(macro)] == [sorted(row) for row in lengths]
        orders |= {tuple(lengths_of(macro)[0]), tuple(lengths_of(macro)[3])}
    assert len(orders) == 8  # another order for each response and update ...
    again = Shuffled(starts_124, seed=2)(mask, step=3)
    assert lengths_of(again) == lengths_of(macro)  # ... that seed and update tell
    assert lengths_of(Shuffled(starts_124, seed=3)(mask, step=3)) != lengths_of(macro)


class Counting(TerminationRule):
    """Whole responses, by a rule that uses every method."""

    needs_outputs = True

    def __init__(self):
        self.called = []

    def check(self):
        self.called.append("check")

    def metrics(self):
        return {"calls": float(len(self.called))}

    def __call__(self, mask, **context):
        return MacroActions.from_starts(torch.zeros_like(mask), mask)


def test_shuffled_does_what_its_rule_asks_for():
    rule = Counting()
    shuffled = Shuffled(rule)
    shuffled.check()
    assert (
        shuffled.needs_outputs and rule.called == ["check"] and shuffled.metrics() == {"calls": 1.0}
    )
    assert not Shuffled(starts_124).needs_outputs


# -- perplexity -------------------------------------------------------------------------------------------------------


RULES = ("macro", "prefix", "token")
# Few distinct values, so that equal ones, where a perplexity stays the same, are common.
nlls = st.lists(
    st.lists(
        st.one_of(st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.3]), st.floats(0, 30, width=32)),
        max_size=25,
    ),
    max_size=5,
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


def batch(rows):
    """mask and log-probabilities, NaN on padding."""
    mask = mask_of([len(row) for row in rows], tail=2)
    x = torch.full(mask.shape, math.nan)
    x[mask] = -torch.tensor([v for row in rows for v in row])
    return mask, x


@settings(max_examples=300, deadline=None)
@given(nlls, st.sampled_from(RULES))
def test_perplexity_matches_a_loop(rows, rule):
    mask, logprobs = batch(rows)
    macro = Perplexity(rule)(mask, ref_logprobs=logprobs)
    assert isinstance(macro, MacroActions) and torch.equal(macro.token_mask, mask)
    assert lengths_of(macro) == [[len(w) for w in loop(rule, row)] for row in rows]


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


@pytest.mark.parametrize("rule", RULES)
def test_equal_tokens_are_one_macro_action(rule):
    """0.1 has no exact float: sums of it must not drift above or below their multiple."""
    for value in (0.1, 0.7, 1 / 3, 13.37):
        mask, logprobs = batch([[value] * 3000, [value] * 7])
        assert lengths_of(Perplexity(rule)(mask, ref_logprobs=logprobs)) == [[3000], [7]]
        assert lengths_of(Perplexity(rule)(mask, ref_logprobs=logprobs.bfloat16())) == [[3000], [7]]


# -- the largest change of value or certainty -------------------------------------------------------------------------


def starts_by_loop(signal, n, of):
    """Rank all places but the first by the change there, and take the first ⌈length / n⌉ − 1."""
    change = (
        [abs(b - a) for a, b in itertools.pairwise(signal)]
        if of == "values"
        else [-x for x in signal[1:]]
    )
    order = sorted(range(1, len(signal)), key=lambda t: -change[t - 1])
    return sorted([0, *order[: max(math.ceil(len(signal) / n) - 1, 0)]]) if signal else []


@given(
    data=st.data(),
    n=st.sampled_from([1, 2, 3, 5, 8, math.inf]),
    of=st.sampled_from(["values", "logprobs"]),
)
def test_largest_change_matches_a_loop(data, n, of):
    lengths = data.draw(st.lists(st.integers(0, 17), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 2**31))
    mask = mask_of(lengths)
    signal = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    macro = LargestChange(of, n)(mask, **{of: signal.masked_fill(~mask, math.nan)})
    check_segmentation(macro, mask)
    for spans, row, length in zip(macro.spans(), signal, lengths):
        assert [a for a, _ in spans] == starts_by_loop(row[:length].tolist(), n, of)
    assert torch.equal(macro.mask.sum(1), FixedNGram(n)(mask).mask.sum(1))  # as many as n-grams

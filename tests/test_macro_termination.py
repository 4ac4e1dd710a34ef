"""Termination rules: fixed and randomized n-grams, the whole response."""

import math

import reference_macro as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import FixedNGram, Listed, MacroActions, RandomizedNGram, Shuffled, Whole

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
    # seed and step are not interchangeable
    assert lengths_of(RandomizedNGram(seed=1)(mask, step=2)) != lengths_of(RandomizedNGram(seed=2)(mask, step=1))


def test_randomized_order_is_uniform():
    B, bag = 24_000, [2, 3, 5, 10]
    macro = RandomizedNGram()(torch.ones(B, 61, dtype=torch.bool))
    assert macro.lengths.shape[1] == 13 and (macro.lengths.sum(1) == 61).all() and (macro.lengths[:, 12] == 1).all()
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

"""Termination rules: fixed and randomized n-grams, the whole response."""

import dataclasses
import math

import pytest
import reference_macro as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import FixedNGram, Listed, MacroActions, RandomizedNGram, Shuffled, TerminationRule, Whole

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


def test_fixed_by_hand_without_an_empty_last_macro_action():
    # 7 tokens at n=3, and 6: a multiple of n must not leave an empty macro action behind.
    assert FixedNGram(3)(mask_of([7, 6, 1, 0])).spans() == [[(0, 3), (3, 6), (6, 7)], [(0, 3), (3, 6)], [(0, 1)], []]
    for n in (1, 2, 3, 4, 12):
        assert FixedNGram(n)(mask_of([13])).lengths.min() >= 1


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


def test_randomized_depends_on_seed_step_and_row_alone():
    mask = mask_of([70, 40, 70, 0, 1, 70], tail=4)
    rule = RandomizedNGram(seed=5)
    whole = lengths_of(rule(mask))
    assert whole == lengths_of(rule(mask)) == lengths_of(RandomizedNGram(seed=5)(mask))
    assert whole[:3] == lengths_of(rule(mask[:3])) and whole[0] != whole[2]
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


@pytest.mark.parametrize("rule", [FixedNGram(3), FixedNGram(math.inf), Listed((1, 3)), RandomizedNGram(), Whole()])
def test_rules_share_the_protocol(rule):
    assert isinstance(rule, TerminationRule)
    mask = mask_of([4, 2])
    plain = rule(mask)
    context = {"token_ids": torch.zeros(2, 4).long(), "ref_logprobs": torch.full((2, 4), math.nan), "tokenizer": None}
    rich = rule(mask, **context, step=0)
    assert lengths_of(plain) == lengths_of(rich)
    assert eval(repr(rule), {**globals(), "inf": math.inf}) == rule and hash(rule) is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.n = 2
    for shape in ((0, 0), (0, 4), (2, 0), (2, 4)):
        assert lengths_of(rule(torch.zeros(shape, dtype=torch.bool))) == [[]] * shape[0]
    with pytest.raises(ValueError, match="mask: response 1 is not right-padded: position 1 is valid, position 0"):
        rule(torch.tensor([[True, True], [False, True]]))
    with pytest.raises(ValueError, match="mask: expected dtype torch.bool, got torch.int64"):
        rule(torch.ones(2, 2).long())
    with pytest.raises(ValueError, match=r"mask: expected 2 dimensions, got shape \(4,\)"):
        rule(torch.ones(4).bool())


def test_reprs():
    assert repr(FixedNGram(5)) == "FixedNGram(n=5)" and repr(Whole()) == "Whole()"
    assert repr(RandomizedNGram([2, 3])) == "RandomizedNGram(lengths=(2, 3), repeats=3, seed=0)"


@pytest.mark.parametrize("n", [0, -1, True, 2.5, 5.0, -math.inf, math.nan, "5", None])
def test_bad_n(n):
    with pytest.raises(ValueError, match=r"n: expected an integer >= 1, got .*; math.inf makes one macro action"):
        FixedNGram(n)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lengths": ()}, "lengths: expected at least one length"),
        ({"lengths": (2, 0)}, r"lengths\[1\]: expected an integer >= 1, got 0"),
        ({"lengths": (2.5,)}, r"lengths\[0\]: expected an integer >= 1, got 2.5"),
        ({"repeats": 0}, "repeats: expected an integer >= 1, got 0"),
        ({"seed": 0.5}, "seed: expected an integer, got 0.5"),
    ],
)
def test_bad_randomized(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomizedNGram(**arguments)


def test_bad_context():
    mask = mask_of([3, 2])
    with pytest.raises(ValueError, match="step: expected an integer, got 1.0"):
        RandomizedNGram()(mask, step=1.0)


def test_randomized_is_the_same_everywhere():
    """Pinned: another machine, device or release of torch must not change a run's macro actions."""
    rule = RandomizedNGram(seed=1234)
    macro = rule(mask_of([20, 20]), step=3)
    assert lengths_of(macro) == [[5, 3, 10, 2], [2, 10, 8]]


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

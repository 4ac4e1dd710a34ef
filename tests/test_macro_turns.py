"""Turns: masks with holes where an environment speaks. Every function against loops, and against what it was."""

import itertools
import math

import pytest
import reference_macro as ref
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import (
    FixedNGram,
    LargestChange,
    Listed,
    MacroActions,
    Perplexity,
    RandomizedNGram,
    Shuffled,
    Turn,
    Whole,
    as_rule,
    border_lam,
    boundary_f1,
    check_segmentation,
    describe,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
    whiten,
)
from marlhf_lite.parsing import Sentence

NAN = math.nan
quick = settings(max_examples=60, deadline=None)
masks = st.lists(st.lists(st.booleans(), max_size=24), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(
        [row + [False] * (max(map(len, rows)) - len(row)) for row in rows]
    ).bool()
)


def turns_of(mask):
    """For each row the (start, end) of its runs of True."""
    out = []
    for row in mask.tolist():
        edges = [t for t, (a, b) in enumerate(zip([False, *row], [*row, False])) if a != b]
        out.append(list(zip(edges[::2], edges[1::2])))
    return out


def noise(mask, seed):
    """Random numbers, NaN outside of the mask."""
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return x.masked_fill(~mask, NAN)


def every_second(mask, **context):
    """A function of a user who knows nothing of holes."""
    return MacroActions.from_starts(torch.arange(mask.shape[1]).expand_as(mask) % 2 == 0, mask)


RULES = [
    FixedNGram(1),
    FixedNGram(3),
    Listed((1, 4, 2)),
    Whole(),
    Perplexity("macro"),
    Perplexity("prefix"),
    Perplexity("token", early=True),
    LargestChange("values", 3),
    LargestChange("logprobs", 2),
    as_rule(every_second),
]


@quick
@given(masks, st.sampled_from(RULES), st.integers(0, 2**31))
# no tokens at all
@example(torch.zeros(1, 0, dtype=torch.bool), Perplexity("token", early=True), 0)
def test_every_rule_segments_each_turn_like_a_response(mask, rule, seed):
    context = {
        name: noise(mask, seed + i) for i, name in enumerate(("ref_logprobs", "logprobs", "values"))
    }
    expected = []
    for row, turns in enumerate(turns_of(mask)):
        expected.append([])
        for start, end in turns:
            alone = {name: x[row : row + 1, start:end] for name, x in context.items()}
            inside = rule(mask[row : row + 1, start:end], **alone).spans()[0]
            expected[-1] += [(start + a, start + b) for a, b in inside]
    macro = check_segmentation(rule(mask, **context), mask)
    assert macro.spans() == expected


@quick
@given(masks, st.integers(0, 2**31))
def test_rules_that_draw_do_so_within_each_turn(mask, seed):
    for rule in (RandomizedNGram((2, 3), seed=seed), Shuffled(Listed((1, 3, 2)), seed=seed)):
        macro = check_segmentation(rule(mask), mask)
        for spans, turns in zip(macro.spans(), turns_of(mask)):
            inside = [[(a, b) for a, b in spans if start <= a and b <= end] for start, end in turns]
            assert [*itertools.chain(*inside)] == spans  # none reaches over a hole
            assert all(b - a <= 3 or (a, b) == turn[-1] for turn in inside for a, b in turn)


@quick
@given(masks)
def test_turn_cuts_at_holes_alone(mask):
    macro = Turn()(mask)
    assert macro.spans() == turns_of(mask) == FixedNGram(3)(mask).turns.spans()
    assert torch.equal(macro.token_mask, mask)
    for row, turns in zip(macro.split_last_token().spans(), turns_of(mask)):
        if turns and turns[-1][1] - turns[-1][0] > 1:
            start, end = turns.pop()
            turns += [(start, end - 1), (end - 1, end)]
        assert row == turns


@quick
@given(masks, st.integers(1, 5))
def test_every_constructor_gives_the_same_partition(mask, n):
    macro = FixedNGram(n)(mask)
    lengths = [[b - a for a, b in row] for row in macro.spans()]
    starts = torch.zeros_like(mask)
    for row, spans in enumerate(macro.spans()):
        starts[row, [a for a, _ in spans]] = True
    for other in (
        MacroActions.from_starts(ref.starts(lengths, mask), mask),
        MacroActions.from_ids(macro.ids),
        MacroActions.from_starts(starts | ~mask, mask),
    ):
        assert torch.equal(other.ids, macro.ids)
    closed = MacroActions.from_lengths(lengths)  # the same without holes
    assert describe(closed) == describe(macro) and torch.equal(closed.lengths, macro.lengths)
    assert closed.single_tokens.mask.sum() == macro.single_tokens.mask.sum() == mask.sum()
    singles = [[(t, t + 1) for t, acted in enumerate(row) if acted] for row in mask.tolist()]
    assert macro.single_tokens.spans() == singles
    assert boundary_f1(macro, macro) == 1.0
    # Only cuts that a rule chose count: between neighbours of a turn.
    inner = [sum(b - a - 1 for a, b in turns) for turns in turns_of(mask)]
    chosen = [len(spans) - len(turns) for spans, turns in zip(macro.spans(), turns_of(mask))]
    f1 = 2 * sum(chosen) / (sum(chosen) + sum(inner)) if sum(inner) else 1.0
    assert boundary_f1(macro, macro.single_tokens) == pytest.approx(f1)


def test_text_rules_read_each_turn_alone():
    class Letters:
        def decode(self, ids, **options):
            return "".join(map(chr, ids))

    said = "Nothing. I g||||o on. Yes||It is. And"  # what the environment says are bars
    ids = torch.tensor([[ord(c) for c in said]])
    macro = Sentence()(ids != ord("|"), token_ids=ids, tokenizer=Letters())
    assert [said[a:b] for a, b in macro.spans()[0]] == [
        "Nothing.",
        " I g",
        "o on.",
        " Yes",
        "It is.",
        " And",
    ]


# -- estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options", [{}, {"rho": 0.9}, *({"pooling": "mean", "sigma": sigma} for sigma in ref.SIGMAS)]
)
def test_a_turns_reward_comes_with_its_last_macro_action(seed, options):
    batch = ref.Batch(seed)
    macro = MacroActions.from_starts(ref.starts(batch.parts, batch.mask), batch.mask)
    r = kl_rewards(batch.old_logprobs, batch.ref_logprobs, batch.mask, 0.05)
    width = max(map(len, batch.turns)) + 1
    scores = torch.randn(batch.B, width, generator=batch.generator)
    scores = scores.masked_fill(
        torch.arange(width) >= torch.tensor([[len(t)] for t in batch.turns]), NAN
    )
    got = macro_rewards(r, scores, macro, **options)
    rows = zip(batch.rows(r), scores.double().tolist(), batch.parts, batch.turns)
    expected = [ref.turn_rewards(x, s, n, turns, **options) for x, s, n, turns in rows]
    torch.testing.assert_close(
        got.double(), ref.padded(expected, got.shape[1]), rtol=1e-6, atol=1e-6
    )
    total = scores.nan_to_num(0.0).sum(1) + macro_rewards(
        r, torch.zeros(batch.B), macro, **options
    ).sum(1)
    torch.testing.assert_close(got.sum(1), total)


@quick
@given(
    masks,
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.integers(0, 2**31),
)
def test_a_token_follows_the_next_that_was_sampled(mask, gamma, lam, seed):
    rewards, values = noise(mask, seed), noise(mask, seed + 1)
    got = gae(rewards, values, mask, gamma, lam)
    for row, valid in enumerate(mask):
        expected = ref.gae(rewards[row][valid].tolist(), values[row][valid].tolist(), gamma, lam)
        for mine, theirs in zip(got, expected):
            theirs = torch.tensor(theirs, dtype=torch.float32)
            torch.testing.assert_close(mine[row][valid], theirs, rtol=2e-6, atol=1e-5)
            assert (mine[row][~valid] == 0).all()


@pytest.mark.parametrize("seed", [1, 3])
def test_tokens_with_borders_of_turns(seed):
    """SAE by turn: GAE over tokens whose λ fades at the last token of a turn alone, with holes and closed up."""
    batch = ref.Batch(seed)
    lam = border_lam(Turn()(batch.mask), 0.5)
    rewards, values = noise(batch.mask, seed), noise(batch.mask, seed + 1)
    got = gae(rewards, values, batch.mask, lam=lam)[0]
    rows = zip(batch.rows(rewards), batch.rows(values), batch.turns)
    expected = [
        ref.gae(r, v, lam=[x for n in turns for x in [1.0] * (n - 1) + [0.5]])[0]
        for r, v, turns in rows
    ]
    torch.testing.assert_close(got.double(), batch.on_mask(expected), rtol=2e-6, atol=1e-5)
    single = Turn()(batch.mask).single_tokens
    closed = gae(single.sum(rewards), single.sum(values), single.mask, lam=single.sum(lam))[0]
    assert torch.equal(single.broadcast(closed), got)


def test_whitening_leaves_holes_out():
    batch = ref.Batch(5)
    got = whiten(batch.values, batch.mask)
    kept = batch.values[batch.mask].double()
    torch.testing.assert_close(
        got[batch.mask].double(), (kept - kept.mean()) / kept.std(unbiased=False)
    )
    assert (got[~batch.mask] == 0).all()


# -- without holes nothing changes, bit by bit -------------------------------------------------------------------------


def gae_before(rewards, values, mask, gamma, lam):
    """GAE as it was when no mask had holes."""
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    advantage = following = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * following - values[:, step]
        advantages[:, step] = advantage = delta + gamma * lam[:, step] * advantage
        following = values[:, step]
    return advantages, advantages + values


@quick
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 2**31)
)
def test_without_holes_nothing_changes(counts, tail, seed):
    mask = torch.arange(max(counts) + tail) < torch.tensor(counts)[:, None]
    rewards, values = noise(mask, seed), noise(mask, seed + 1)
    lam = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    for mine, before in zip(
        gae(rewards, values, mask, 0.97, lam), gae_before(rewards, values, mask, 0.97, lam)
    ):
        assert torch.equal(mine, before)
    begins = lam > 0.6
    macro = MacroActions.from_starts(begins, mask)
    begins[:, :1] = True
    assert torch.equal(macro.ids, (begins.cumsum(1) - 1).masked_fill(~mask, -1))
    ends = macro.lengths.cumsum(1)
    pairs = torch.stack([ends - macro.lengths, ends], dim=2).tolist()
    assert macro.spans() == [[(a, b) for a, b in row if b > a] for row in pairs]
    place = torch.arange(mask.shape[1]).expand_as(mask)
    assert torch.equal(macro.single_tokens.ids, place.masked_fill(~mask, -1))
    starts = macro.broadcast(ends - macro.lengths)
    assert torch.equal(macro._offset, (place - starts).masked_fill(~mask, 0))
    last = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
    split = MacroActions.from_starts((macro._offset == 0).scatter(1, last, True), mask)
    assert torch.equal(macro.split_last_token().ids, split.ids)
    # One turn: its reward is the response's.
    scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(
        macro_rewards(rewards, scores, macro), macro_rewards(rewards, scores[:, None], macro)
    )
    assert torch.equal(Turn()(mask).ids, Whole()(mask).ids)


# -- faults that trainers of agents had --------------------------------------------------------------------------------

# Two turns of three and two tokens; the environment says four tokens in between, and one behind.
DIALOGUE = torch.tensor([[True] * 3 + [False] * 4 + [True] * 2 + [False] + [False] * 2])


def test_the_reward_at_the_end_is_neither_lost_nor_decayed_over_observations():
    """verl 7278 (lost, since the last token was the environment's), miles 1827 (decayed over its tokens)."""
    zeros = torch.zeros_like(DIALOGUE, dtype=torch.float32)
    for rule, steps in ((FixedNGram(1), 5), (FixedNGram(2), 3), (Turn(), 2)):
        macro = rule(DIALOGUE)
        rewards = macro_rewards(zeros, torch.tensor([1.0]), macro)
        assert rewards.tolist() == [[0.0] * (steps - 1) + [1.0]]
        advantages, _ = gae(rewards, macro_values(zeros, macro), macro.mask, gamma=0.5, lam=1.0)
        # one factor a step, none for the hole
        assert advantages.tolist() == [[0.5**k for k in reversed(range(steps))]]
    rewards = zeros.clone()
    rewards[0, 8] = 1.0
    advantages, _ = gae(rewards, zeros, DIALOGUE, gamma=0.5, lam=1.0)
    assert advantages[DIALOGUE].tolist() == [0.5**k for k in (4, 3, 2, 1, 0)]


def test_each_turn_has_its_own_advantage():
    """SkyRL 1492: every step got the advantages of the last one."""
    macro, zeros = Turn()(DIALOGUE), torch.zeros_like(DIALOGUE, dtype=torch.float32)
    rewards = macro_rewards(zeros, torch.tensor([[1.0, -3.0]]), macro)
    advantages, _ = gae(rewards, torch.zeros(1, 2), macro.mask, lam=0.5)
    assert advantages.tolist() == [[1.0 - 1.5, -3.0]]
    logprobs = zeros.clone().requires_grad_()
    policy_loss(logprobs, zeros, advantages, macro, normalizer=1)[0].backward()
    assert (-logprobs.grad).tolist() == [[-0.5] * 3 + [0.0] * 4 + [-3.0] * 2 + [0.0] * 3]


def test_the_critic_is_trained_where_it_was_read():
    """oat 67: its loss was taken at an index that was one turn old."""
    macro, zeros = Turn()(DIALOGUE), torch.zeros_like(DIALOGUE, dtype=torch.float32)
    values = zeros.clone().requires_grad_()
    value_loss(values, zeros, torch.tensor([[1.0, 2.0]]), macro, normalizer=1)[0].backward()
    assert (-values.grad).tolist() == [[1.0] * 3 + [0.0] * 4 + [2.0] * 2 + [0.0] * 3]

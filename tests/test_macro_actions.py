"""MacroActions: partitions, sums, pools, broadcasts; statistics of a segmentation, and agreement of two."""

import json

import pytest
import reference_macro as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import MacroActions, boundary_f1, describe

NAN = float("nan")
partitions = st.lists(st.lists(st.integers(1, 7), max_size=6), max_size=5)
quick = settings(max_examples=60, deadline=None)


def same(a: MacroActions, b: MacroActions) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("ids", "lengths", "mask"))


@quick
@given(partitions, st.integers(0, 4))
def test_every_constructor_gives_the_same_partition(lists, tail):
    T = max(map(sum, lists), default=0) + tail
    macro = MacroActions.from_lengths(lists, T)
    assert macro.ids.shape == (len(lists), T)
    assert [[b - a for a, b in row] for row in macro.spans()] == lists
    for row, one in zip(macro.ids.tolist(), lists):
        assert row == [i for i, n in enumerate(one) for _ in range(n)] + [-1] * (T - sum(one))
    for row, one in zip(macro.lengths.tolist(), lists):
        assert [n for n in row if n] == one and row[: len(one)] == one
    assert same(MacroActions.from_ids(macro.ids), macro)
    starts = macro.ids.diff(dim=1, prepend=torch.full((len(lists), 1), -1)) > 0
    assert same(MacroActions.from_starts(starts, macro.token_mask), macro)


def test_from_starts_begins_at_the_first_token_and_ignores_padding():
    starts = torch.tensor([[False, False, True, True], [True, True, True, True]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert MacroActions.from_starts(starts, mask).spans() == [[(0, 2), (2, 3)], [(0, 1)]]
    assert starts[0].tolist() == [False, False, True, True]  # the argument is left alone


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (3, 4)])
def test_batches_without_tokens(shape):
    for macro in (
        MacroActions.from_ids(torch.full(shape, -1)),
        MacroActions.from_lengths([[]] * shape[0], shape[1]),
        MacroActions.from_starts(
            torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        ),
    ):
        assert macro.lengths.shape == macro.mask.shape == (shape[0], 0)
        assert macro.spans() == [[]] * shape[0]
        x = torch.full(shape, NAN, requires_grad=True)
        for sigma in ref.SIGMAS:
            assert macro.pool(x, sigma).shape == (shape[0], 0)
            assert torch.equal(macro.weights(sigma), torch.zeros(shape))
        assert macro.sum(x).shape == (shape[0], 0)
        assert torch.equal(macro.broadcast(torch.zeros(shape[0], 0)), torch.zeros(shape))
        macro.sum(x).sum().backward()
        assert torch.equal(x.grad, torch.zeros(shape))


@pytest.mark.parametrize("seed", range(5))
def test_sum_pool_broadcast_match_loops(seed):
    batch = ref.Batch(seed)
    macro = MacroActions.from_starts(ref.starts(batch.parts, batch.mask), batch.mask)
    S = macro.lengths.shape[1]
    rows = batch.rows(batch.values)
    expected = ref.padded([[sum(p) for p in ref.split(x, n)] for x, n in zip(rows, batch.parts)], S)
    torch.testing.assert_close(macro.sum(batch.values).double(), expected, rtol=1e-6, atol=1e-6)
    for sigma in ref.SIGMAS:
        expected = ref.padded([ref.pool(x, n, sigma) for x, n in zip(rows, batch.parts)], S)
        torch.testing.assert_close(
            macro.pool(batch.values, sigma).double(), expected, rtol=1e-6, atol=1e-6
        )
        weights = [[w for k in n for w in ref.sigma_weights(k, sigma)] for n in batch.parts]
        torch.testing.assert_close(
            macro.weights(sigma).double(), batch.on_mask(weights), rtol=1e-6, atol=1e-7
        )
    y = batch.steps()
    expected = [
        [v for v, k in zip(row, n) for _ in range(k)]
        for row, n in zip(ref.valid(y, batch.parts), batch.parts)
    ]
    assert torch.equal(macro.broadcast(y).double(), batch.on_mask(expected))
    assert torch.equal(macro.broadcast(macro.lengths).gt(0), macro.token_mask)
    assert macro.broadcast(macro.mask).dtype == torch.bool


@quick
@given(partitions, st.sampled_from(ref.SIGMAS), st.integers(0, 2**31))
def test_weights_sum_to_one_and_sums_keep_the_total(lists, sigma, seed):
    macro = MacroActions.from_lengths(lists, max(map(sum, lists), default=0) + 2)
    torch.testing.assert_close(macro.sum(macro.weights(sigma)), macro.mask.float())
    x = torch.randn(macro.ids.shape, generator=torch.Generator().manual_seed(seed))
    kept = x.masked_fill(~macro.token_mask, 0.0)
    torch.testing.assert_close(macro.sum(x).sum(1), kept.sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(macro.pool(torch.ones_like(x), sigma), macro.mask.float())
    torch.testing.assert_close(
        macro.sum(macro.broadcast(macro.sum(x))), macro.sum(x) * macro.lengths
    )


def test_select_keeps_width_and_to_keeps_all():
    macro = MacroActions.from_lengths([[2, 3], [1], []], T=6)
    one = macro.select([1])
    assert (
        one.spans() == [[(0, 1)]] and one.lengths.tolist() == [[1, 0]] and one.ids.shape == (1, 6)
    )
    assert macro.select(slice(0, 2)).spans() == macro.spans()[:2]
    assert macro.select(torch.tensor([2, 0])).spans() == [[], [(0, 2), (2, 5)]]
    assert same(macro.to("cpu"), macro)
    with pytest.raises(AttributeError):
        macro.ids = None


# -- statistics -------------------------------------------------------------------------------------------------------


@quick
@given(partitions, st.integers(0, 3))
def test_describe_matches_a_loop(lists, tail):
    got = describe(MacroActions.from_lengths(lists, max(map(sum, lists), default=0) + tail))
    flat = [n for row in lists for n in row]
    assert (
        got["responses"] == len(lists)
        and got["tokens"] == sum(flat)
        and got["macro_actions"] == len(flat)
    )
    assert got["macro_actions_per_response"] == (len(flat) / len(lists) if lists else 0)
    assert got["mean_length"] == (sum(flat) / len(flat) if flat else 0)
    assert got["single_share"] == (flat.count(1) / len(flat) if flat else 0)
    assert got["histogram"] == {n: flat.count(n) for n in sorted(set(flat))}
    assert list(got["histogram"]) == sorted(got["histogram"])
    json.dumps(got)


def cuts(lists):
    return {(row, sum(one[:k])) for row, one in enumerate(lists) for k in range(1, len(one))}


@quick
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

"""MacroActions: partitions, sums, pools, broadcasts, and what it refuses."""

import pytest
import reference_macro as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.macro import MacroActions

NAN = float("nan")
partitions = st.lists(st.lists(st.integers(1, 7), max_size=6), max_size=5)
quick = settings(max_examples=60, deadline=None)


def same(a: MacroActions, b: MacroActions) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("ids", "lengths", "mask"))


def test_from_lengths_by_hand():
    macro = MacroActions.from_lengths([[2, 3], [1], []], T=6)
    assert macro.ids.tolist() == [[0, 0, 1, 1, 1, -1], [0, -1, -1, -1, -1, -1], [-1] * 6]
    assert macro.lengths.tolist() == [[2, 3], [1, 0], [0, 0]]
    assert macro.mask.tolist() == [[True, True], [True, False], [False, False]]
    assert macro.token_mask.sum(1).tolist() == [5, 1, 0]
    assert macro.spans() == [[(0, 2), (2, 5)], [(0, 1)], []]
    assert (macro.ids.dtype, macro.lengths.dtype, macro.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert repr(macro) == "MacroActions(responses=3, tokens=6, macro_actions=3)"


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
        MacroActions.from_starts(torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)),
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
    macro = MacroActions.from_lengths(batch.parts, batch.T)
    S = macro.lengths.shape[1]
    rows = batch.rows(batch.values)
    expected = ref.padded([[sum(p) for p in ref.split(x, n)] for x, n in zip(rows, batch.parts)], S)
    torch.testing.assert_close(macro.sum(batch.values).double(), expected, rtol=1e-6, atol=1e-6)
    for sigma in ref.SIGMAS:
        expected = ref.padded([ref.pool(x, n, sigma) for x, n in zip(rows, batch.parts)], S)
        torch.testing.assert_close(macro.pool(batch.values, sigma).double(), expected, rtol=1e-6, atol=1e-6)
        weights = [[w for k in n for w in ref.sigma_weights(k, sigma)] for n in batch.parts]
        torch.testing.assert_close(macro.weights(sigma).double(), ref.padded(weights, batch.T), rtol=1e-6, atol=1e-7)
    y = batch.steps()
    expected = [[v for v, k in zip(row, n) for _ in range(k)] for row, n in zip(ref.valid(y, batch.parts), batch.parts)]
    assert torch.equal(macro.broadcast(y).double(), ref.padded(expected, batch.T))
    assert torch.equal(macro.broadcast(macro.lengths).gt(0), macro.token_mask)
    assert macro.broadcast(macro.mask).dtype == torch.bool


def test_sigma_by_hand():
    macro = MacroActions.from_lengths([[3]])
    H = 1 + 1 / 2 + 1 / 3
    expected = {
        "equal": [1 / 3] * 3,
        "unit": [0, 0, 1],
        "position": [1 / 3 / H, 1 / 2 / H, 1 / H],  # the last token weighs most
        "position_reversed": [1 / H, 1 / 2 / H, 1 / 3 / H],
    }
    for sigma, weights in expected.items():
        torch.testing.assert_close(macro.weights(sigma), torch.tensor([weights]).float())


@quick
@given(partitions, st.sampled_from(ref.SIGMAS), st.integers(0, 2**31))
def test_weights_sum_to_one_and_sums_keep_the_total(lists, sigma, seed):
    macro = MacroActions.from_lengths(lists, max(map(sum, lists), default=0) + 2)
    torch.testing.assert_close(macro.sum(macro.weights(sigma)), macro.mask.float())
    x = torch.randn(macro.ids.shape, generator=torch.Generator().manual_seed(seed))
    kept = x.masked_fill(~macro.token_mask, 0.0)
    torch.testing.assert_close(macro.sum(x).sum(1), kept.sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(macro.pool(torch.ones_like(x), sigma), macro.mask.float())
    torch.testing.assert_close(macro.sum(macro.broadcast(macro.sum(x))), macro.sum(x) * macro.lengths)


def test_gradients_of_sum_pool_and_broadcast():
    batch = ref.Batch(3)
    macro = MacroActions.from_lengths(batch.parts, batch.T)
    weight = batch.steps().nan_to_num(0.0)
    for sigma in ref.SIGMAS:
        x = batch.values.clone().requires_grad_()
        (macro.pool(x, sigma) * weight).sum().backward()
        torch.testing.assert_close(x.grad, macro.weights(sigma) * macro.broadcast(weight))
    x = batch.values.clone().requires_grad_()
    (macro.sum(x) * weight).sum().backward()
    assert torch.equal(x.grad, macro.broadcast(weight))
    y = batch.steps().requires_grad_()
    (macro.broadcast(y) * 2).sum().backward()
    assert torch.equal(y.grad, 2.0 * macro.lengths)


def test_select_keeps_width_and_to_keeps_all():
    macro = MacroActions.from_lengths([[2, 3], [1], []], T=6)
    one = macro.select([1])
    assert one.spans() == [[(0, 1)]] and one.lengths.tolist() == [[1, 0]] and one.ids.shape == (1, 6)
    assert macro.select(slice(0, 2)).spans() == macro.spans()[:2]
    assert macro.select(torch.tensor([2, 0])).spans() == [[], [(0, 2), (2, 5)]]
    assert same(macro.to("cpu"), macro)
    with pytest.raises(AttributeError):
        macro.ids = None

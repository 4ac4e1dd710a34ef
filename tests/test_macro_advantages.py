"""GAE against the backward recursion, and whitening."""

import math

import pytest
import reference_macro as ref
import torch

from marlhf_lite.macro import MacroActions, border_lam, gae, whiten


def steps(counts, tail, seed):
    """Rewards, values with NaN on padding, and the mask."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(counts, default=0) + tail) < torch.tensor(counts, dtype=torch.int64)[:, None]
    return *(torch.randn(mask.shape, generator=g).masked_fill(~mask, math.nan) for _ in range(2)), mask


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("counts", [[5, 1, 0, 3], [600, 1, 0, 599], [1], [0]])
def test_gae_matches_the_recursion(counts, gamma, lam):
    rewards, values, mask = steps(counts, 2, seed=sum(counts))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    rows = [ref.gae(r[:n].tolist(), v[:n].tolist(), gamma, lam) for r, v, n in zip(rewards, values, counts)]
    S = mask.shape[1]
    for got, expected in ((advantages, [a for a, _ in rows]), (returns, [q for _, q in rows])):
        torch.testing.assert_close(got.double(), ref.padded(expected, S), rtol=2e-6, atol=1e-5)
        assert got.dtype == torch.float32 and (got[~mask] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_gae_with_a_lam_for_each_step_or_response(seed):
    rewards, values, mask = steps([70, 1, 0, 33, 8], 2, seed)
    drawn = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    for lam in (drawn, drawn[:, :1]):
        got = gae(rewards, values, mask, 0.9, lam)
        lams = lam.expand_as(drawn).double().tolist()
        rows = [
            ref.gae(r[:n].tolist(), v[:n].tolist(), 0.9, one[:n])
            for r, v, one, n in zip(rewards, values, lams, mask.sum(1).tolist())
        ]
        for ours, theirs in zip(got, zip(*rows)):
            torch.testing.assert_close(ours.double(), ref.padded(theirs, mask.shape[1]), rtol=2e-6, atol=1e-5)


def test_lam_at_borders_alone_counts_macro_actions():
    """SAE (arXiv 2601.07320): with a constant critic a token keeps λ to the number of borders that follow it."""
    macro = MacroActions.from_lengths([[2, 3, 1], [4], []], T=7)
    lam = border_lam(macro, 0.5)
    assert lam.tolist() == [[1, 0.5, 1, 1, 0.5, 0.5, 1], [1, 1, 1, 0.5, 1, 1, 1], [1] * 7]
    rewards = torch.zeros(3, 7)
    rewards[0, 5], rewards[1, 3] = 1.0, 1.0
    advantages, _ = gae(rewards, torch.zeros(3, 7), macro.token_mask, lam=lam)
    assert advantages.tolist() == [[0.25, 0.25, 0.5, 0.5, 0.5, 1, 0], [1, 1, 1, 1, 0, 0, 0], [0] * 7]
    each = border_lam(macro, torch.tensor([[0.5], [0.25], [0.0]]))
    assert each[1].tolist() == [1, 1, 1, 0.25, 1, 1, 1]


def test_gae_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[0.5, 0.25, 9.0]])
    mask = torch.tensor([[True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.5)
    # δ_1 = 2 − 0.25, the value after the end being 0; δ_0 = 1 + 0.25 − 0.5
    assert advantages.tolist() == [[0.75 + 0.5 * 1.75, 1.75, 0.0]]
    assert returns.tolist() == [[1.625 + 0.5, 2.0, 0.0]]
    plain = gae(rewards, values, mask, lam=1.0)
    assert plain[1].tolist() == [[3.0, 2.0, 0.0]]  # λ=1: the sum of the rewards to come
    assert torch.equal(gae(rewards, values, mask)[0], gae(rewards, values, mask, 1.0, 0.95)[0])


@pytest.mark.parametrize("shift, scale", [(0.0, 1.0), (100.0, 1e-2), (-3.0, 1e4), (0.0, 1e-6)])
def test_whiten(shift, scale):
    x, _, mask = steps([40, 1, 0, 17], 3, seed=1)
    x = shift + scale * x
    got = whiten(x, mask)
    kept = x[mask].double()
    expected = (kept - kept.mean()) / kept.std(unbiased=False)
    torch.testing.assert_close(got[mask].double(), expected, rtol=1e-4, atol=1e-5)
    assert abs(got[mask].mean()) < 1e-5 and abs(got[mask].std(unbiased=False) - 1) < 1e-5
    assert (got[~mask] == 0).all() and got.dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6, 1e-8])
def test_whiten_of_equal_or_single_or_no_elements_is_zero(value):
    mask = torch.arange(1001) < torch.tensor([[1001], [333], [0]])
    x = torch.full((3, 1001), value).masked_fill(~mask, math.nan)
    assert torch.equal(whiten(x, mask), torch.zeros(3, 1001))
    assert torch.equal(whiten(x[:1, :1], mask[:1, :1]), torch.zeros(1, 1))
    for shape in ((0, 0), (2, 3)):
        assert torch.equal(
            whiten(torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)), torch.zeros(shape)
        )

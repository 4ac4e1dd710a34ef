"""Rewards of macro actions, GAE against the backward recursion, and whitening."""

import math

import pytest
import reference_macro as ref
import torch

from marlhf_lite.macro import (
    MacroActions,
    adaptive_lam,
    border_lam,
    gae,
    kl_rewards,
    macro_rewards,
    whiten,
)

NAN = math.nan
POOLS = [{"pooling": "mean", "sigma": sigma} for sigma in ref.SIGMAS]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("options", [{}, *({"rho": rho} for rho in (0.9, 0.0)), *POOLS])
def test_rewards_match_loops(seed, options):
    batch = ref.Batch(seed)
    macro = MacroActions.from_starts(ref.starts(batch.parts, batch.mask), batch.mask)
    r = kl_rewards(batch.old_logprobs, batch.ref_logprobs, batch.mask, 0.05)
    # the score of nothing is not used
    scores = batch.scores.masked_fill(torch.tensor(batch.counts) == 0, NAN)
    got = macro_rewards(r, scores, macro, **options)
    rows = zip(
        batch.rows(batch.old_logprobs),
        batch.rows(batch.ref_logprobs),
        batch.scores.double(),
        batch.parts,
    )
    expected = [
        ref.rewards([-0.05 * (a - b) for a, b in zip(x, y)], s, n, **options) for x, y, s, n in rows
    ]
    torch.testing.assert_close(
        got.double(), ref.padded(expected, got.shape[1]), rtol=1e-6, atol=1e-6
    )


def test_kl_rewards():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    new, old = torch.full((2, 3), NAN), torch.full((2, 3), math.inf)
    new[0, :2], old[0, :2] = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_rewards(new, old, mask, 0.1).tolist() == [
        pytest.approx([-0.05, 0.1, 0.0]),
        [0.0, 0.0, 0.0],
    ]
    k3 = [-0.1 * (math.exp(-d) - 1 + d) for d in (0.5, -1.0)]
    assert kl_rewards(new, old, mask, 0.1, "k3").tolist() == [
        pytest.approx([*k3, 0.0]),
        [0.0, 0.0, 0.0],
    ]
    assert (kl_rewards(new, old, mask, 0) == 0).all()
    assert kl_rewards(new.bfloat16(), old.double(), mask, 0.1).dtype == torch.float32


# -- advantages and returns -------------------------------------------------------------------------------------------


def steps(counts, tail, seed):
    """Rewards, values with NaN on padding, and the mask."""
    g = torch.Generator().manual_seed(seed)
    mask = (
        torch.arange(max(counts, default=0) + tail)
        < torch.tensor(counts, dtype=torch.int64)[:, None]
    )
    return *(
        torch.randn(mask.shape, generator=g).masked_fill(~mask, math.nan) for _ in range(2)
    ), mask


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(
    ("counts", "tail"), [([5, 1, 0, 3], 2), ([600, 1, 0, 599], 0), ([1], 0), ([0], 2)]
)
def test_gae_matches_the_recursion(counts, tail, gamma, lam):
    # tail 0: a row that fills the batch
    rewards, values, mask = steps(counts, tail, seed=sum(counts))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    rows = [
        ref.gae(r[:n].tolist(), v[:n].tolist(), gamma, lam)
        for r, v, n in zip(rewards, values, counts)
    ]
    S = mask.shape[1]
    for got, expected in ((advantages, [a for a, _ in rows]), (returns, [q for _, q in rows])):
        torch.testing.assert_close(got.double(), ref.padded(expected, S), rtol=2e-6, atol=1e-5)
        assert got.dtype == torch.float32 and (got[~mask] == 0).all()


def test_lam_at_borders_alone_counts_macro_actions():
    """SAE (arXiv 2601.07320): with a constant critic a token keeps λ to the number of borders that follow it."""
    macro = MacroActions.from_lengths([[2, 3, 1], [4], []], T=7)
    lam = border_lam(macro, 0.5)
    assert lam.tolist() == [[1, 0.5, 1, 1, 0.5, 0.5, 1], [1, 1, 1, 0.5, 1, 1, 1], [1] * 7]
    rewards = torch.zeros(3, 7)
    rewards[0, 5], rewards[1, 3] = 1.0, 1.0
    advantages, _ = gae(rewards, torch.zeros(3, 7), macro.token_mask, lam=lam)
    assert advantages.tolist() == [
        [0.25, 0.25, 0.5, 0.5, 0.5, 1, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0] * 7,
    ]
    each = border_lam(macro, torch.tensor([[0.5], [0.25], [0.0]]))
    assert each[1].tolist() == [1, 1, 1, 0.25, 1, 1, 1]


def test_lam_by_length():
    """VAPO (arXiv 2504.05118): 1 - 1 / (alpha l) of l macro actions; a short response has 0, and an empty one, too."""
    mask = torch.arange(16) < torch.tensor([[16], [8], [4], [1], [0]])
    assert adaptive_lam(mask, 0.25).tolist() == [[0.75], [0.5], [0.0], [0.0], [0.0]]


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


def test_whiten_around_a_mean_that_is_no_float32():
    """The mean lies between two neighbours of 2^14; what its rounding leaves counts neither in mean nor in variance."""
    x = 2.0**14 + torch.tensor([[0.0, 29.0]]) * 2.0**-9
    torch.testing.assert_close(
        whiten(x, torch.ones(1, 2, dtype=torch.bool)),
        torch.tensor([[-1.0, 1.0]]),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6, 1e-8])
def test_whiten_of_equal_or_single_or_no_elements_is_zero(value):
    mask = torch.arange(1001) < torch.tensor([[1001], [333], [0]])
    x = torch.full((3, 1001), value).masked_fill(~mask, math.nan)
    assert torch.equal(whiten(x, mask), torch.zeros(3, 1001))
    assert torch.equal(whiten(x[:1, :1], mask[:1, :1]), torch.zeros(1, 1))
    for shape in ((0, 0), (2, 3)):
        assert torch.equal(
            whiten(torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)),
            torch.zeros(shape),
        )

"""Credit in closed form: the chain with known truth, and the share of a signal that estimates keep."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lab.credit.chain_mdp import Chain, Critic, estimate
from marlhf_lab.credit.signal_kept import break_even, signal_kept
from marlhf_lite.macro import FixedNGram


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_truth_by_enumeration(p):
    """Values and advantages are conditional expectations over all 2^T answers."""
    chain = Chain(T=4, p=p, noise=0.0)
    every = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)))
    weights = torch.where(every == 1, p, 1 - p).prod(1)
    scores = chain.credit * (every - p).sum(1)
    assert math.isclose((weights * scores**2).sum().item(), 1.0, rel_tol=1e-5)
    episodes = chain.sample(32, generator())
    for n, t in itertools.product(range(32), range(4)):
        same = [(every[:, :k] == episodes.actions[n, :k]).all(1) for k in (t, t + 1)]
        before, after = ((weights * scores)[rows].sum() / weights[rows].sum() for rows in same)
        assert torch.allclose(episodes.values[n, t], before, atol=1e-5)
        assert torch.allclose(episodes.advantages[n, t], after - before, atol=1e-5)
    direct = (weights[:, None] * scores[:, None] * (every - p)).sum(0)
    assert torch.allclose(direct, torch.full((4,), chain.gradient), atol=1e-6)


def test_critic_is_as_stated():
    values = Chain(T=20).sample(20_000, generator()).values
    assert torch.equal(Critic()(values), values)
    guess = Critic(sees=0.5, offset=0.3, noise=0.4, smooth=0.9)(values, generator(1))
    left = guess - 0.5 * values - 0.3
    assert abs(left.mean()) < 0.02 and abs(left.std() - 0.4) < 0.01
    assert abs((left[:, 1:] * left[:, :-1]).mean() / 0.16 - 0.9) < 0.02


@pytest.mark.parametrize("n", [1, 3, 5, math.inf])
def test_blind_critic_fades_by_macro_actions(n):
    chain = Chain(T=12)
    episodes = chain.sample(6, generator())
    macro = FixedNGram(n)(episodes.mask)
    found = estimate(episodes.scores, torch.zeros(6, 12), macro, lam=0.9)
    ahead = macro.mask.sum(1, keepdim=True) - 1 - macro.ids
    assert torch.allclose(found, 0.9**ahead * episodes.scores[:, None], atol=1e-5)


# -- the formula of kept credit against loops -------------------------------------------------------------------------


def advantage(index, length, n, lam, seen, sigma):
    """The advantage of the macro action that holds the token `index`, which earns 1; a loop over macro actions."""
    values = [seen if t > index else 0.0 for t in range(length)]  # V(s_t), before the token t
    n = min(n, length)
    runs = [range(a, min(a + n, length)) for a in range(0, length, n)]
    weights = {
        "equal": lambda run: [1 / len(run)] * len(run),
        "start": lambda run: [1.0] + [0.0] * (len(run) - 1),
    }
    pooled = [sum(w * values[t] for w, t in zip(weights[sigma](run), run)) for run in runs] + [0.0]
    following, found = 0.0, None
    for k in reversed(range(len(runs))):
        delta = float(k == len(runs) - 1) + pooled[k + 1] - pooled[k]
        following = delta + lam * following
        if index in runs[k]:
            found = following
    return found


def segment_borders(index, length, n, lam, seen):
    """Token steps with λ only at the last token of a segment, 1 inside (arXiv 2601.07320)."""
    values = [seen if t > index else 0.0 for t in range(length)] + [0.0]
    following = 0.0
    for t in reversed(range(index, length)):
        delta = float(t == length - 1) + values[t + 1] - values[t]
        following = delta + (lam if t % n == n - 1 else 1.0) * following
    return following


CASES = st.integers(1, 60).flatmap(
    lambda length: st.tuples(st.integers(0, length - 1), st.just(length))
)


@given(CASES, st.integers(1, 70), st.floats(0, 1), st.floats(0, 1))
def test_kept_signal_is_the_advantage(place, n, lam, seen):
    for sigma in ("equal", "start"):
        expected = advantage(*place, n, lam, seen, sigma)
        assert signal_kept(*place, n, lam, seen, sigma) == pytest.approx(expected, abs=1e-9)
    assert signal_kept(*place, n, lam, seen, "start") == pytest.approx(
        segment_borders(*place, n, lam, seen), abs=1e-9
    )


@given(CASES, st.integers(2, 20))
def test_macro_actions_and_tokens_keep_the_same_at_break_even(place, n):
    share = break_even(*place, n, 0.95)
    if share < 1:
        assert signal_kept(*place, n, 0.95, share) == pytest.approx(
            signal_kept(*place, 1, 0.95, share)
        )
        assert signal_kept(*place, n, 0.95, 1.0) < signal_kept(*place, 1, 0.95, 1.0)
    else:
        assert signal_kept(*place, n, 0.95, 1.0) == pytest.approx(1.0)

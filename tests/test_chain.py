"""The chain with known truth: its closed forms, its critics, and what estimates must do on it."""

import itertools
import math

import pytest
import torch

from marlhf_lite.lab.credit.chain_mdp import Chain, Critic, correlated, cosine, estimate, gradient
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


@pytest.mark.parametrize("smooth", [0.0, 0.5, 0.9])
def test_correlated_against_its_covariance(smooth):
    """A linear map L of independent noise has covariance L Lᵀ, here smooth^|i − j|."""
    L = correlated(torch.eye(37), smooth).T
    distance = (torch.arange(37)[:, None] - torch.arange(37)).abs()
    assert torch.allclose(L @ L.T, smooth**distance, atol=1e-5)


def test_critic_is_as_stated():
    values = Chain(T=20).sample(20_000, generator()).values
    assert torch.equal(Critic()(values), values)
    guess = Critic(sees=0.5, offset=0.3, noise=0.4, smooth=0.9)(values, generator(1))
    left = guess - 0.5 * values - 0.3
    assert abs(left.mean()) < 0.02 and abs(left.std() - 0.4) < 0.01
    assert abs((left[:, 1:] * left[:, :-1]).mean() / 0.16 - 0.9) < 0.02


def test_perfect_critic_and_zero_lambda_give_the_truth():
    episodes = Chain(T=12, noise=0.0).sample(50, generator())
    found = estimate(episodes.scores, episodes.values, FixedNGram(1)(episodes.mask), lam=0.0)
    assert torch.allclose(found, episodes.advantages, atol=1e-5)
    single = gradient(found, episodes.actions, 0.5, batch=1)  # at p = 1/2 even one answer's gradient is the true one
    assert torch.allclose(single, torch.full_like(single, Chain(T=12).gradient), atol=1e-5)
    assert torch.allclose(cosine(single), torch.ones(50), atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 5, math.inf])
def test_blind_critic_fades_by_macro_actions(n):
    chain = Chain(T=12)
    episodes = chain.sample(6, generator())
    macro = FixedNGram(n)(episodes.mask)
    found = estimate(episodes.scores, torch.zeros(6, 12), macro, lam=0.9)
    ahead = macro.mask.sum(1, keepdim=True) - 1 - macro.ids
    assert torch.allclose(found, 0.9**ahead * episodes.scores[:, None], atol=1e-5)

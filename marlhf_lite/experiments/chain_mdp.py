"""A chain of binary tokens whose true advantages are known: a place to measure errors of credit assignment.

``N`` episodes of ``T`` tokens. The score comes after the last token and depends on the tokens' sum alone, so every
token has earned the same: where an estimate treats near and far tokens differently, that is the estimate's doing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite.macro import MacroActions, gae, macro_rewards, macro_values
from marlhf_lite.utils.errors import InputError


@dataclass(frozen=True)
class Episodes:
    """N episodes of a chain. An episode's score is the only reward; all of it comes after its last token."""

    actions: Tensor  # [N,T] float32, 0 or 1
    scores: Tensor  # [N] float32
    values: Tensor  # [N,T] float32: V(s_t), the expected score before token t is drawn
    advantages: Tensor  # [N,T] float32: A(s_t, a_t), what the drawn token adds to it

    @property
    def mask(self) -> Tensor:
        """[N,T] bool: all True, for rules."""
        return torch.ones_like(self.actions, dtype=torch.bool)


@dataclass(frozen=True)
class Chain:
    """Token t is 1 with probability p = sigmoid(θ_t); the score is c·Σ(a_t − p) + noise·N(0, 1), with c = `credit`.

    Then V(s_t) = c·Σ_{k<t}(a_k − p) and A(s_t, a_t) = c·(a_t − p), with nothing left to estimate.
    """

    T: int = 100
    p: float = 0.5
    noise: float = 0.5  # standard deviation of the part of the score that no token earned

    def __post_init__(self) -> None:
        if self.T < 1 or not 0 < self.p < 1 or self.noise < 0:
            raise InputError(f"{self}: expected T >= 1, p between 0 and 1, noise >= 0")

    @property
    def credit(self) -> float:
        """c: what a 1 adds over a 0. It makes the variance of the earned part of the score 1, whatever T is."""
        return 1.0 / math.sqrt(self.T * self.p * (1 - self.p))

    @property
    def gradient(self) -> float:
        """∂E[score]/∂θ_t = c·p·(1 − p), the same for every token."""
        return self.credit * self.p * (1 - self.p)

    def sample(self, episodes: int, generator: torch.Generator | None = None) -> Episodes:
        """That many episodes with their truth."""
        actions = (torch.rand(episodes, self.T, generator=generator) < self.p).float()
        advantages = self.credit * (actions - self.p)
        after = advantages.cumsum(1)
        scores = after[:, -1] + self.noise * torch.randn(episodes, generator=generator)
        return Episodes(actions, scores, after - advantages, advantages)


@dataclass(frozen=True)
class Critic:
    """What a critic makes of the true values: V̂(s_t) = sees·V(s_t) + offset + noise·ε_t.

    ε is standard normal, independent of the tokens. Neighbours have correlation `smooth`, tokens k apart smooth^k.
    """

    sees: float = 1.0  # share of what the tokens so far have earned that it notices: 1 all, 0 only the mean
    offset: float = 0.0
    noise: float = 0.0
    smooth: float = 0.0

    def __post_init__(self) -> None:
        if self.noise < 0 or not 0 <= self.smooth < 1:
            raise InputError(f"{self}: expected noise >= 0 and smooth from 0 to below 1")

    def __call__(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """values: [N,T], the true ones → [N,T]."""
        fresh = torch.randn(values.shape, generator=generator)
        return self.sees * values + self.offset + self.noise * correlated(fresh, self.smooth)


def correlated(fresh: Tensor, smooth: float) -> Tensor:
    """Independent standard normals [N,T] → standard normals whose correlation falls as smooth^distance along T."""
    fresh = torch.cat([fresh[:, :1], math.sqrt(1 - smooth**2) * fresh[:, 1:]], dim=1)
    width, weight = 1, smooth
    while width < fresh.shape[1] and weight > 0:  # y_t = Σ_k smooth^k x_{t−k}, by doubling
        fresh = torch.cat([fresh[:, :width], fresh[:, width:] + weight * fresh[:, :-width]], dim=1)
        width, weight = 2 * width, weight * weight
    return fresh


def estimate(scores: Tensor, values: Tensor, macro: MacroActions, lam: float, sigma: str = "equal") -> Tensor:
    """Â of every token, [N,T], as MA-PPO has it without a KL penalty: GAE over macro actions, given to their tokens."""
    rewards = macro_rewards(torch.zeros_like(values), scores, macro)
    advantages, _ = gae(rewards, macro_values(values, macro, sigma), macro.mask, lam=lam)
    return macro.broadcast(advantages)


def gradient(advantages: Tensor, actions: Tensor, p: float, batch: int) -> Tensor:
    """Policy gradient [N/batch, T] for θ_t, one for each batch of episodes: the mean of Â_t·(a_t − p)."""
    return (advantages * (actions - p)).reshape(-1, batch, actions.shape[1]).mean(1)


def cosine(gradients: Tensor) -> Tensor:
    """[G,T] → [G]: cosine with the true gradient, which is the same for all tokens of a chain.

    A small step of a given length along such a gradient gains this share of what the best step gains.
    """
    return torch.nn.functional.cosine_similarity(gradients, torch.ones_like(gradients), dim=1)

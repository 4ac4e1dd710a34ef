"""A chain of binary tokens whose true advantages are known, to measure errors of credit assignment.

N episodes of T tokens. The score comes after the last token and depends on the sum of the tokens alone, so all tokens
contribute alike: an estimate that treats near and far tokens differently is wrong.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite.macro import MacroActions, gae, macro_rewards, macro_values


@dataclass(frozen=True)
class Episodes:
    """N episodes of a chain. An episode's score is the only reward; all of it comes after its last token."""

    actions: Tensor  # [N,T] float32, 0 or 1
    scores: Tensor  # [N] float32
    values: Tensor  # [N,T] float32: V(s_t), the expected score before token t is drawn
    advantages: Tensor  # [N,T] float32: A(s_t, a_t), what the drawn token adds to it

    @property
    def mask(self) -> Tensor:
        """[N,T] bool, all True: every token counts, for termination rules."""
        return torch.ones_like(self.actions, dtype=torch.bool)


@dataclass(frozen=True)
class Chain:
    """Token t is 1 with probability p = sigmoid(θ_t); the score is c·Σ(a_t − p) + noise·N(0, 1), with c = `credit`.

    0 < p < 1. Then V(s_t) = c·Σ_{k<t}(a_k − p) and A(s_t, a_t) = c·(a_t − p), with nothing left to estimate.
    """

    T: int = 100
    p: float = 0.5
    noise: float = 0.5  # standard deviation of the part of the score that depends on no token

    @property
    def credit(self) -> float:
        """c, how much more a 1 scores than a 0, chosen so that the score without noise has variance 1 for every T."""
        return 1.0 / math.sqrt(self.T * self.p * (1 - self.p))

    @property
    def gradient(self) -> float:
        """∂E[score]/∂θ_t = c·p·(1 − p), the same for every token."""
        return self.credit * self.p * (1 - self.p)

    def sample(self, episodes: int, generator: torch.Generator | None = None) -> Episodes:
        """Draw episodes, with their true values and advantages."""
        actions = (torch.rand(episodes, self.T, generator=generator) < self.p).float()
        advantages = self.credit * (actions - self.p)
        values_after = advantages.cumsum(1)  # V(s_{t+1}): each token adds its advantage
        scores = values_after[:, -1] + self.noise * torch.randn(episodes, generator=generator)
        return Episodes(
            actions=actions,
            scores=scores,
            values=values_after - advantages,
            advantages=advantages,
        )


@dataclass(frozen=True)
class Critic:
    """A critic with given errors: V̂(s_t) = sees·V(s_t) + offset + noise·z_t.

    z is standard normal, independent of the tokens. Neighbours have correlation `smooth` (0 to below 1), tokens k apart
    smooth^k.
    """

    sees: float = 1.0  # share of the true value that it recognises: 1 is all of it, 0 only the mean
    offset: float = 0.0
    noise: float = 0.0
    smooth: float = 0.0

    def __call__(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Estimate from the true `values` [N,T]: [N,T]."""
        fresh = torch.randn(values.shape, generator=generator)
        return self.sees * values + self.offset + self.noise * correlated(fresh, self.smooth)


def correlated(noise: Tensor, smooth: float) -> Tensor:
    """Turn independent standard normals [N,T] into ones whose correlation is smooth^distance along T (AR(1))."""
    columns = [noise[:, 0]]
    for fresh in noise.T[1:]:
        # The square root keeps the variance at 1.
        columns.append(smooth * columns[-1] + math.sqrt(1 - smooth**2) * fresh)
    return torch.stack(columns, dim=1)


def estimate(
    scores: Tensor, values: Tensor, macro: MacroActions, lam: float, sigma: str = "equal"
) -> Tensor:
    """Compute Â of every token [N,T] as MA-PPO does, without KL: GAE over macro actions, broadcast to their tokens.

    scores: [N]; values: [N,T].
    """
    rewards = macro_rewards(torch.zeros_like(values), scores, macro)
    advantages, _ = gae(rewards, macro_values(values, macro, sigma), macro.mask, lam=lam)
    return macro.broadcast(advantages)


def gradient(advantages: Tensor, actions: Tensor, p: float, batch: int) -> Tensor:
    """Compute the policy gradient for θ_t of each batch of episodes, the mean of Â_t·(a_t − p): [N/batch, T]."""
    return (advantages * (actions - p)).reshape(-1, batch, actions.shape[1]).mean(1)


def cosine(gradients: Tensor) -> Tensor:
    """Compare gradients [G,T] with the true one, which is the same for all tokens of a chain: cosines [G].

    A small step of a given length along such a gradient gains this share of what the best step gains.
    """
    return torch.nn.functional.cosine_similarity(gradients, torch.ones_like(gradients), dim=1)

"""What is recorded of an update. All means are over valid tokens, macro actions or responses, never over padding."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch
from torch import Tensor

from marlhf_lite.config import MacroOptions, PPOOptions
from marlhf_lite.macro import MacroActions
from marlhf_lite.rollouts import Rollout
from marlhf_lite.training.step import Estimate, Pass


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`(k1, k3)` [B] of each response: sum over tokens of log pi - log ref, and of ratio - 1 - log ratio, in nats.

    Both estimate KL(policy || reference) of the response; k1 has no bias and can be negative, k3 is never negative.
    """
    k1 = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    return k1.sum(1), ((-k1).exp() - 1 + k1).sum(1)


def norms(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """`(L2 norm of a response's [S] values, averaged over responses; root mean square per macro action)`."""
    x = x.masked_fill(~mask, 0.0)
    count = mask.sum().clamp(min=1)
    return x.norm(dim=1).mean().item(), (x.square().sum() / count).sqrt().item()


def explained_variance(values: Tensor, returns: Tensor, macro: MacroActions) -> float:
    """1 - Var(return - V) / Var(return) over tokens; 1 is a perfect critic, 0 no better than a constant."""
    mask = macro.token_mask
    target, guess = macro.broadcast(returns)[mask], values[mask]
    spread = target.var(correction=0)
    return (1 - (target - guess).var(correction=0) / spread).item() if spread > 1e-12 else 0.0


def measure(
    rollout: Rollout,
    macro: MacroActions,
    made: Estimate,
    before: Pass,
    how: MacroOptions,
    ppo: PPOOptions,
) -> dict[str, float]:
    """Metrics of one update: `before` and `made` are what the models said before its optimizer steps."""
    tokens = rollout.mask.sum().clamp(min=1)
    k1, k3 = kl_terms(before.logprobs, rollout.ref_logprobs, rollout.mask)
    per_macro = (rollout.mask.sum() / macro.mask.sum().clamp(min=1)).item()
    row = {
        "rm_score_mean": rollout.scores.mean().item(),
        "rm_score_std": rollout.scores.std(correction=0).item(),
        "kl_k1": k1.mean().item(),
        "kl_k3": k3.mean().item(),
        "response_length": rollout.lengths.float().mean().item(),
        "eos_rate": rollout.ended.float().mean().item(),
        "entropy": (before.entropy.masked_fill(~rollout.mask, 0.0).sum() / tokens).item(),
        "explained_variance": explained_variance(before.values, made.returns, macro),
        "macro_actions": macro.mask.sum(1).float().mean().item(),
        "macro_length": per_macro,
        # The released code's mean pooling divides each KL reward by the macro length.
        "effective_kl_coef": ppo.kl_coef / (per_macro if how.reward_pooling == "mean" else 1.0),
    }
    for name, x in (("advantage", made.advantages), ("q", made.returns)):
        row[f"{name}_norm"], row[f"{name}_rms"] = norms(x, macro.mask)
    return row


class Clock:
    """Seconds spent in each phase of an update."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str):
        """`with clock.phase("scoring"): ...` adds the time of the block to that phase."""
        start = _now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + _now() - start


def _now() -> float:
    if torch.cuda.is_available():  # kernels run behind Python's back
        torch.cuda.synchronize()
    return time.perf_counter()

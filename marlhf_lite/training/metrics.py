"""What is recorded of an update. All means are over valid tokens, macro actions or responses, never over padding."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from marlhf_lite.config.options import MacroConfig, PPOConfig
from marlhf_lite.macro import MacroActions
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.training.step import Estimate, Pass


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`(k1, k3)` [B] of each response: sum over tokens of log pi - log ref, and of ratio - 1 - log ratio, in nats.

    Both estimate KL(policy || reference) of the response; k1 has no bias and can be negative, k3 is never negative.
    """
    k1 = (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    return k1.sum(1), ((-k1).exp() - 1 + k1).sum(1)


def explained(count: float, goal: float, goal_square: float, gap: float, gap_square: float) -> float:
    """1 - Var(return - V) / Var(return), from sums over tokens; 1 is a perfect critic, 0 no better than a constant."""
    spread = goal_square / count - (goal / count) ** 2
    return 1 - (gap_square / count - (gap / count) ** 2) / spread if spread > 1e-12 * goal_square / count else 0.0


def totals(rollout: Rollout, macro: MacroActions, made: Estimate, before: Pass) -> dict[str, Tensor]:
    """Sums over this process's responses, float64: what adds up over processes to the metrics of an update."""
    mask, tokens = rollout.mask, macro.token_mask
    k1, k3 = kl_terms(before.logprobs, rollout.ref_logprobs, mask)
    goal = macro.broadcast(made.returns)[tokens].double()
    gap = goal - before.values[tokens].double()
    scores = rollout.scores.double()
    sums = {
        "responses": torch.tensor(len(rollout)),
        "tokens": mask.sum(),
        "actions": macro.mask.sum(),
        "ended": rollout.ended.sum(),
        "score": scores.sum(),
        "score_square": scores.square().sum(),
        "k1": k1.double().sum(),
        "k3": k3.double().sum(),
        "entropy": before.entropy.masked_fill(~mask, 0.0).double().sum(),
        "goal": goal.sum(),
        "goal_square": goal.square().sum(),
        "gap": gap.sum(),
        "gap_square": gap.square().sum(),
    }
    for name, x in (("advantage", made.advantages), ("q", made.returns)):
        x = x.masked_fill(~macro.mask, 0.0).double()
        sums |= {f"{name}_norm": x.norm(dim=1).sum(), f"{name}_square": x.square().sum()}
    return sums


def over_processes(sums: dict[str, Tensor | float], reduce: Callable[[Tensor], Tensor], device) -> dict[str, float]:
    """The named numbers, summed over processes in one call."""
    exact = torch.float32 if torch.device(device).type == "mps" else torch.float64
    stacked = torch.stack([torch.as_tensor(x, dtype=exact, device=device) for x in sums.values()])
    return dict(zip(sums, reduce(stacked).tolist(), strict=True))


def describe_update(sums: dict[str, float], how: MacroConfig, ppo: PPOConfig) -> dict[str, float]:
    """Metrics of one update from the sums of `totals` over all processes."""
    rows, tokens, actions = (max(sums[name], 1) for name in ("responses", "tokens", "actions"))
    mean = sums["score"] / rows
    row = {
        "rm_score_mean": mean,
        "rm_score_std": max(sums["score_square"] / rows - mean**2, 0.0) ** 0.5,
        "kl_k1": sums["k1"] / rows,
        "kl_k3": sums["k3"] / rows,
        "response_length": sums["tokens"] / rows,
        "eos_rate": sums["ended"] / rows,
        "entropy": sums["entropy"] / tokens,
        "explained_variance": explained(tokens, sums["goal"], sums["goal_square"], sums["gap"], sums["gap_square"]),
        "macro_actions": sums["actions"] / rows,
        "macro_length": sums["tokens"] / actions,
        "kl_coef": ppo.kl_coef,
        # The released code's mean pooling divides each KL reward by the macro length.
        "effective_kl_coef": ppo.kl_coef / (sums["tokens"] / actions if how.reward_pooling == "mean" else 1.0),
    }
    for name in ("advantage", "q"):
        row[f"{name}_norm"] = sums[f"{name}_norm"] / rows  # of a response's macro actions, averaged over responses
        row[f"{name}_rms"] = (sums[f"{name}_square"] / actions) ** 0.5
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

"""Rewards: anything that gives each response of a rollout one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marlhf_lite.roles import ScoreRole
from marlhf_lite.rollouts import Rollout


class ModelReward:
    """A reward model's score at the last response token, read on the very tokens that were sampled."""

    def __init__(self, role: ScoreRole, micro_batch_size: int = 64):
        self.role, self.micro_batch_size = role, micro_batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32."""
        self.role.eval()
        device, scores = next(self.role.parameters()).device, []
        for rows in torch.arange(len(rollout)).split(self.micro_batch_size):
            part = rollout.select(rows).trim()
            everywhere = self.role(part.tokens.to(device), part.attention_mask.to(device))
            scores.append(part.at_last_token(everywhere))
        return torch.cat(scores)


class FunctionReward:
    """Any function of texts: `function(prompts, responses) -> scores`. It must return one finite number each."""

    def __init__(self, function: Callable[[list[str], list[str]], Sequence[float]], name: str = ""):
        self.function, self.name = function, name or getattr(function, "__name__", "reward")

    def __call__(self, rollout: Rollout) -> Tensor:
        """[B] scores, float32. Raises `ValueError` for a wrong number of scores or one that is not a finite number."""
        given = self.function(rollout.prompts, rollout.responses)
        try:
            scores = list(given)
        except TypeError:
            raise ValueError(f"reward {self.name}: returned {given!r}: return one number a response") from None
        if len(scores) != len(rollout):
            raise ValueError(f"reward {self.name}: {len(scores)} scores for {len(rollout)} responses")
        bad = next((i for i, s in enumerate(scores) if not _finite(s)), None)
        if bad is not None:
            raise ValueError(f"reward {self.name}: score {scores[bad]} for response {bad}: return a finite number")
        return torch.tensor(scores, dtype=torch.float32, device=rollout.tokens.device)


def _finite(score) -> bool:
    try:
        return math.isfinite(score)
    except TypeError:
        return False

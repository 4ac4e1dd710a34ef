"""Tests on held-out prompts while training: scores, gold, win rate against the SFT model, and the best policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import set_seed

from marlhf_lite.evaluation.scores import answer
from marlhf_lite.models.actor_critic import PPOModels
from marlhf_lite.training.checkpoint import random_states, set_random_states
from marlhf_lite.training.rollout import Sampling


class HeldOutEvaluation:
    """Answers the same prompts with the same noise each time, and compares them with the SFT model's answers.

    Args:
        prompts: texts that are not trained on.
        reward, gold: as for `PPOTrainer`.
        seed: of sampling, and of rewards that draw. Training's own random state is left as it was.
        batch_size: prompts answered at a time.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        tokenizer,
        sampling: Sampling,
        reward: Callable,
        gold: Callable | None,
        accelerator: Accelerator,
        seed: int = 0,
        batch_size: int = 128,
    ):
        self.prompts, self.tokenizer, self.sampling, self.reward, self.gold = prompts, tokenizer, sampling, reward, gold
        self.accelerator, self.seed, self.batch_size, self.start = accelerator, seed, batch_size, None

    def __call__(self, roles: PPOModels) -> dict[str, float]:
        """Means over the prompts, and win rates (a tie counts half) by reward and by gold."""
        if self.start is None:
            self.start = self._rows(roles.reference, roles, "SFT")
        rows = self._rows(roles.policy, roles, "policy")
        out = {}
        for name in (n for n in ("rm_score", "gold") if n in rows[0]):
            ours, theirs = ([float(r[name]) for r in x] for x in (rows, self.start))
            wins = [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(ours, theirs, strict=True)]
            out |= {f"{name}_mean": _mean(ours), f"{name}_sft": _mean(theirs), f"{name}_win_rate": _mean(wins)}
        return out | {name: _mean([float(r[name]) for r in rows]) for name in ("kl", "tokens", "ended")}

    def _rows(self, policy, roles: PPOModels, name: str) -> list[dict]:
        rank, share = self.accelerator.process_index, self.accelerator.num_processes
        mine, training, states = self.prompts[rank::share], policy.model.training, random_states()
        set_seed((self.seed + rank) % 2**32)  # for rewards that draw; the noise of answers belongs to their prompts
        try:
            rows = answer(
                policy,
                roles.reference,
                self.tokenizer,
                mine,
                self.sampling,
                self.reward,
                self.gold,
                name=name,
                seed=self.seed,
                batch_size=self.batch_size,
            )
        finally:
            set_random_states(states)
            policy.train(training)
        return gather_object(rows)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)

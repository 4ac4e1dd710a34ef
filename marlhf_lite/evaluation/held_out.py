"""Evaluation on held-out prompts while training: scores, gold, and the win rate against the SFT model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import set_seed

from marlhf_lite.evaluation.responses import HeldOutPrompts, answer
from marlhf_lite.evaluation.scores import KLS, GoldScore, score_columns, to_frame
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels
from marlhf_lite.training.distributed import gathered_outside_layers, is_sharded
from marlhf_lite.utils.random_states import random_states, set_random_states


def numbers_of_tests(has_gold: bool) -> list[str]:
    """Return the names of the numbers that `HeldOutEvaluation` finds."""
    scores = ["score", "gold"] if has_gold else ["score"]
    parts = ("mean", "sft", "win_rate")
    return [*(f"{score}_{part}" for score in scores for part in parts), *KLS, "tokens", "ended"]


@dataclass
class HeldOutEvaluation:
    """Answers the same prompts with the same random numbers each time, and compares with the SFT model's answers.

    Args:
        held_out: the prompts. Their seed also serves rewards that draw; the random state of training is kept.
        reward, gold: as for `PPOTrainer`.
    """

    held_out: HeldOutPrompts
    reward: Callable
    gold: GoldScore | None = None
    start: pd.DataFrame | None = field(default=None, init=False)  # the SFT model's answers

    def __call__(self, models: PPOModels) -> dict[str, float]:
        """Return means over the prompts, and win rates (a tie counts half) by reward and by gold."""
        if self.start is None:
            self.start = self._answers(models.reference, models, "SFT")
        ours, metrics = self._answers(models.policy, models, "policy"), {}
        for column in score_columns(ours):
            scores, base = ours[column], self.start[column]
            # As in training, what the reward gives is the score, whatever the reward is.
            name = "gold" if column == "gold" else "score"
            metrics |= {f"{name}_mean": scores.mean(), f"{name}_sft": base.mean()}
            metrics[f"{name}_win_rate"] = (np.sign(scores - base) / 2 + 0.5).mean()
        metrics |= ours[[*KLS, "tokens", "ended"]].astype(float).mean()
        return {name: float(value) for name, value in metrics.items()}

    def _answers(self, policy: PolicyModel, models: PPOModels, name: str) -> pd.DataFrame:
        """Return answers to all prompts; each process gives its share of them."""
        processes = PartialState()
        rank, count = processes.process_index, processes.num_processes
        training, states = policy.model.training, random_states()
        # for rewards that draw; answers have their own
        set_seed((self.held_out.seed + 100_003 * rank) % 2**32)
        try:
            prompts = self.held_out.prompts
            share = prompts[rank::count]
            # If models are in shards, all processes answer the same number: those with one fewer repeat a prompt.
            missing = math.ceil(len(prompts) / count) - len(share) if is_sharded(policy) else 0
            ours = replace(self.held_out, prompts=[*share, *prompts[:1] * missing])
            with gathered_outside_layers(policy):
                rows = answer(policy, models.reference, ours, self.reward, self.gold, name).head(
                    len(share)
                )
        finally:
            set_random_states(states)
            policy.train(training)
        return to_frame(gather_object(rows.to_dict("records")))

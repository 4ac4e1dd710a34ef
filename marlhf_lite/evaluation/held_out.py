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
    """Return the names of the numbers that `HeldOutEvaluation` returns; those of gold only if there is a gold score."""
    names = []
    for score in ["score", "gold"] if has_gold else ["score"]:
        for part in ("mean", "sft", "win_rate"):
            names.append(f"{score}_{part}")
    return [*names, *KLS, "tokens", "ended"]


@dataclass
class HeldOutEvaluation:
    """Answers the same prompts with the same random numbers each time, and compares with the SFT model's answers.

    Args:
        held_out: the prompts. Its seed also serves rewards that draw; the random state of training is kept.
        reward, gold: as for `PPOTrainer`.
    """

    held_out: HeldOutPrompts
    reward: Callable
    gold: GoldScore | None = None
    start: pd.DataFrame | None = field(default=None, init=False)  # the SFT model's answers

    def __call__(self, models: PPOModels) -> dict[str, float]:
        """Return means over the prompts, and win rates against SFT (a tie counts half) by reward and by gold."""
        if self.start is None:  # the SFT model's answers never change
            self.start = self._answers(models.reference, models, "SFT")
        ours = self._answers(models.policy, models, "policy")
        metrics = {}
        for column in score_columns(ours):
            scores = ours[column]
            scores_of_sft = self.start[column]
            # As in training, what the reward gives is called score, whether the reward is a model or a function.
            name = "gold" if column == "gold" else "score"
            wins = np.sign(scores - scores_of_sft) / 2 + 0.5  # 1, 0.5 or 0
            metrics[f"{name}_mean"] = scores.mean()
            metrics[f"{name}_sft"] = scores_of_sft.mean()
            metrics[f"{name}_win_rate"] = wins.mean()
        metrics |= ours[[*KLS, "tokens", "ended"]].astype(float).mean()
        return {name: float(value) for name, value in metrics.items()}

    def _answers(self, policy: PolicyModel, models: PPOModels, name: str) -> pd.DataFrame:
        """Return a policy's answers to all prompts, in every process, although each process makes only its share.

        Random states and the policy's mode are restored, so that training continues as it would without this.
        """
        rank = PartialState().process_index
        count = PartialState().num_processes
        was_training = policy.model.training
        states = random_states()
        # The answers have seeds of their own; this one is for rewards that draw. The large step between processes keeps
        # their seeds apart from the seeds of other runs.
        set_seed((self.held_out.seed + 100_003 * rank) % 2**32)
        try:
            prompts = self.held_out.prompts
            share = prompts[rank::count]
            to_answer = share
            # Processes that share the weights must run equally many passes. One with a prompt less than others answers
            # the first prompt once more, and that answer is dropped below.
            is_one_short = len(share) < math.ceil(len(prompts) / count)
            if is_sharded(policy) and is_one_short:
                to_answer = [*share, prompts[0]]
            with gathered_outside_layers(policy):
                rows = answer(
                    policy,
                    models.reference,
                    replace(self.held_out, prompts=to_answer),
                    reward=self.reward,
                    gold=self.gold,
                    name=name,
                )
            rows = rows.head(len(share))
        finally:
            set_random_states(states)
            policy.train(was_training)
        return to_frame(gather_object(rows.to_dict("records")))

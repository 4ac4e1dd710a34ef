"""Evaluation on held-out prompts while training: scores, gold, and the win rate against the SFT model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import set_seed

from marlhf_lite.evaluation.responses import answer
from marlhf_lite.evaluation.scores import KLS, SCORES, GoldScore, to_frame
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels
from marlhf_lite.training.distributed import is_sharded, sampling_from
from marlhf_lite.training.rollout import Sampling
from marlhf_lite.utils.random_states import random_states, set_random_states


@dataclass
class HeldOutEvaluation:
    """Answers the same prompts with the same random numbers each time, and compares with the SFT model's answers.

    Args:
        prompts: texts that are not trained on.
        reward, gold: as for `PPOTrainer`.
        seed: of sampling, and of rewards that draw. Training's own random state is left as it was.
        batch_size: prompts answered at a time.
    """

    prompts: Sequence[str]
    tokenizer: object
    sampling: Sampling
    reward: Callable
    gold: GoldScore | None = None
    seed: int = 0
    batch_size: int = 128
    engine: object = None  # what samples in place of `generate`, see `answer`
    start: pd.DataFrame | None = field(default=None, init=False)  # the SFT model's answers

    def __call__(self, models: PPOModels) -> dict[str, float]:
        """Means over the prompts, and win rates (a tie counts half) by reward and by gold."""
        if self.start is None:
            self.start = self._answers(models.reference, models, "SFT")
        ours, metrics = self._answers(models.policy, models, "policy"), {}
        for name in (name for name in SCORES if name in ours):
            scores, base = ours[name], self.start[name]
            name = name.removeprefix("rm_")  # as in training, the score may be a function's
            metrics |= {f"{name}_mean": scores.mean(), f"{name}_sft": base.mean()}
            metrics[f"{name}_win_rate"] = (np.sign(scores - base) / 2 + 0.5).mean()
        metrics |= ours[[*KLS, "tokens", "ended"]].astype(float).mean()
        return {name: float(value) for name, value in metrics.items()}

    def _answers(self, policy: PolicyModel, models: PPOModels, name: str) -> pd.DataFrame:
        """Answers to all prompts; each process gives its share of them."""
        processes = PartialState()
        rank, count = processes.process_index, processes.num_processes
        training, states = policy.model.training, random_states()
        set_seed((self.seed + rank) % 2**32)  # for rewards that draw; the numbers of answers belong to their prompts
        try:
            share = self.prompts[rank::count]
            # Where the models are spread, all processes answer as many: those with one fewer answer another one again.
            missing = math.ceil(len(self.prompts) / count) - len(share) if is_sharded(policy) else 0
            arguments = ([*share, *self.prompts[:1] * missing], self.sampling, self.reward, self.gold)
            options = {"name": name, "seed": self.seed, "batch_size": self.batch_size, "engine": self.engine}
            with sampling_from(policy):
                rows = answer(policy, models.reference, self.tokenizer, *arguments, **options).head(len(share))
        finally:
            set_random_states(states)
            policy.train(training)
        return to_frame(gather_object(rows.to_dict("records")))

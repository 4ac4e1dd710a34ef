"""RLOO and GRPO through TRL: groups of responses to a prompt, judged against each other, in place of a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from peft import PeftModel
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from marlhf_lite.config.options import CheckpointConfig, GroupConfig, GRPOStageConfig, RLOOStageConfig, RolloutConfig
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.dpo import common_arguments, sample_rows
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens, prompt_stream
from marlhf_lite.training.sft import quiet_arguments
from marlhf_lite.training.step import shape_scores
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

# TRL's name in a log of a step -> PPO's in a row of metrics. The rest of a row comes from `SampledReward`.
NAMES = {
    "loss": "policy_loss",
    "grad_norm": "policy_grad_norm",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "completions/mean_length": "response_length",
} | {name: name for name in ("rm_score_mean", "rm_score_std", "gold_mean", "eos_rate")}


def check_groups(group: GroupConfig, processes: int = 1) -> None:
    """Raises `InputError` where an update cannot be made of whole groups."""
    size = group.batch_size
    if size % group.num_generations:
        raise InputError(
            f"--num_generations {group.num_generations}: --batch_size {size} holds no whole number of groups: give "
            f"a multiple of {group.num_generations}"
        )
    if size % processes:
        raise InputError(f"--batch_size {size}: {processes} processes cannot share it: make it a multiple of that")


class SampledReward:
    """A reward of ours as TRL calls one. It scores the very tokens that were sampled, EOS included, and logs them.

    Args:
        reward: rollout -> [B] scores (`ModelReward`, `FunctionReward`, or your own).
        model: the policy, for what ends a response.
        options: what shapes scores; see `shape_scores`.
        count: how many responses a sample in samples.jsonl has: one group.
        gold: (prompts, responses) -> true scores, recorded but never trained on.
        run: where samples go, at the first update and at every `every`-th; None: nowhere.
    """

    def __init__(
        self,
        reward: Callable[[Rollout], Tensor],
        model: PeftModel,
        tokenizer,
        options: RolloutConfig,
        count: int,
        gold: Callable[[list[str], list[str]], list[float]] | None = None,
        run: RunFolder | None = None,
        every: int = 10,
    ):
        self.reward, self.tokenizer, self.options, self.count, self.every = reward, tokenizer, options, count, every
        self.ends, self.gold, self.run = end_of_text(model, tokenizer), gold, run

    def __call__(self, prompts, completions, completion_ids, trainer_state, log_metric, **unused) -> list[float]:
        """Shaped scores, one a response; the arguments are TRL's."""
        rollout = from_tokens(self.tokenizer, prompts, completion_ids, self.ends).to(PartialState().device)
        rollout = replace(rollout, scores=self.reward(rollout).to(rollout.tokens.device))
        for name, value in self._measure(rollout).items():
            log_metric(name, value)  # TRL averages it over processes
        update = trainer_state.global_step + 1
        if self.run is not None and trainer_state.is_world_process_zero and (update == 1 or update % self.every == 0):
            shown = rollout.select(slice(0, self.count))
            self.run.log_samples(sample_rows(update, shown, score=shown.scores.tolist()))
        return shape_scores(rollout, self.options).tolist()

    def _measure(self, rollout: Rollout) -> dict[str, float]:
        row = {
            "rm_score_mean": rollout.scores.mean().item(),
            "rm_score_std": rollout.scores.std(correction=0).item(),
            "eos_rate": rollout.ended.float().mean().item(),
        }
        if self.gold is not None:
            scores = self.gold(rollout.prompts, rollout.responses)
            row["gold_mean"] = sum(scores) / len(scores)
        return row


def group_trainer(
    method: str,
    model: PeftModel,
    tokenizer,
    prompts: Sequence[str],
    reward: SampledReward,
    group: RLOOStageConfig | GRPOStageConfig,
    limit: int,
    output: Path,
    checkpoint: CheckpointConfig,
    seed: int = 0,
    report_to: str = "",
) -> RLOOTrainer | GRPOTrainer:
    """A trainer of `model`; `method` is rloo or grpo. A copy of its adapter as it is now becomes the reference.

    An update has `batch_size` responses, as many as PPO's, to batch_size / num_generations prompts, and is one
    optimizer step: PPO's epochs and minibatches do not count. Optimizer and warm-up are PPO's. Checkpoints go into
    `output`/checkpoints.
    """
    processes = PartialState().num_processes
    check_groups(group, processes)
    if not len(prompts):
        raise InputError("prompts: there are none to answer: give more data, or a larger --max_prompt_length")
    kind, config = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}[method]
    groups, share = group.batch_size // group.num_generations, group.batch_size // processes
    updates = math.ceil(group.prompt_epochs * len(prompts) / groups) if group.prompt_epochs else group.updates
    micro = next(d for d in range(min(group.micro_batch_size or share, share), 0, -1) if share % d == 0)
    optimizer = torch.optim.AdamW(trainable(model), lr=group.group_learning_rate, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(group.warmup_updates, 1), 1)
    )
    return kind(
        model=model,
        reward_funcs=reward,
        args=config(
            output_dir=str(output / "checkpoints"),
            max_steps=updates,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=share // micro,
            seed=seed,
            **_method_arguments(method, group),
            **_sampling_arguments(group, limit),
            **quiet_arguments() | common_arguments(checkpoint, report_to),
        ),
        train_dataset=datasets.Dataset.from_dict(
            {"prompt": list(islice(prompt_stream(prompts, seed), updates * groups))}
        ),
        processing_class=tokenizer,
        optimizers=(optimizer, warmup),
    )


def _method_arguments(method: str, group: RLOOStageConfig | GRPOStageConfig) -> dict:
    if method == "rloo":
        own = {"normalize_advantages": group.whiten}
    else:  # the KL's gradient is that of the reverse KL, as PPO's is; the first GRPO's was another
        own = {"loss_type": group.loss_type, "scale_rewards": "group", "use_bias_correction_kl": True}
    return own | {
        "num_generations": group.num_generations,
        "beta": group.kl_coef,
        "epsilon": group.cliprange,
        "max_grad_norm": group.max_grad_norm,
        "shuffle_dataset": False,  # the order is ours
    }


def _sampling_arguments(group: RolloutConfig, limit: int) -> dict:
    """TRL's own temperature is that of log-probabilities too; PPO keeps the two apart, and so does this."""
    return {
        "temperature": group.temperature if group.logprobs_at_temperature else 1.0,
        "max_completion_length": limit,
        "generation_kwargs": Sampling(limit, group.temperature, group.top_k, group.top_p).arguments(),
    }


def group_row(logs: dict, method: str, group: GroupConfig) -> dict[str, float]:
    """A row of metrics from TRL's log of a step.

    TRL means the KL over tokens, k1 in RLOO and k3 in GRPO (there over micro-batches); a row has it in nats a response.
    Without a KL coefficient there is none.
    """
    row = {ours: logs[theirs] for theirs, ours in NAMES.items() if theirs in logs}
    if "kl" in logs:
        row["kl_k1" if method == "rloo" else "kl_k3"] = logs["kl"] * row["response_length"]
    return row | {"tokens": round(row["response_length"] * group.batch_size)}

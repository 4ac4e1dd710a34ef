"""RLOO and GRPO through TRL: comparing several responses to one prompt replaces the critic."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from marlhf_lite.config.commands import GRPOCommand, RLOOCommand
from marlhf_lite.config.options import GroupConfig, RLOOStageConfig
from marlhf_lite.extras.baselines.dpo import complete_reference
from marlhf_lite.extras.programs.rewards import SHARES
from marlhf_lite.macro import Whole
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.tasks.prompts import ROW, Prompt
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.half_precision import ScaledGradients
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.optimizer import learning_rate_share, make_optimizer
from marlhf_lite.training.rewards import (
    FunctionReward,
    checked_scores,
    score_responses,
    scores_for_training,
)
from marlhf_lite.training.rollout import (
    Rollout,
    end_of_text,
    from_tokens,
    prompt_stream,
    sampling_of,
)
from marlhf_lite.training.safeguards import updates_of_passes
from marlhf_lite.training.trl_trainers import check_adapter, trainer_arguments
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.less_memory import rows_a_pass

# TRL's names of metrics in a log of a step -> PPO's names in a row. Those that `SampledReward` logs have PPO's already.
NAMES = {
    "loss": "policy_loss",
    "grad_norm": "policy_grad_norm",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "completions/mean_length": "response_length",
} | {name: name for name in ("score_mean", "score_std", "gold_mean", "eos_rate", *SHARES)}


@dataclass
class SampledReward:
    """Our reward in the form that TRL calls. It scores the sampled tokens themselves, including EOS.

    Args:
        reward: rollout -> scores [B] (`ModelReward`, `FunctionReward`, or your own function).
        model: the policy, which defines the end tokens.
        config: options that shape scores (see `scores_for_training`), and the size of a group.
        gold: (prompts, responses) -> true scores, which are only recorded.
        logger: receives samples at the first update and at every tenth.
    """

    reward: Callable[[Rollout], Tensor]
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    config: GroupConfig
    gold: Callable[[list[str], list[str]], list[float]] | None = None
    logger: RunLogger | None = None

    def __call__(
        self,
        prompts,
        completions,
        completion_ids,
        trainer_state,
        log_metric,
        row: Sequence[str] = (),
        **unused,
    ) -> list[float]:
        """Return shaped scores, one per response, and log what PPO logs of a rollout.

        The arguments are TRL's. If the reward asks for other columns of the data, `row` has each prompt's own row, as a
        text; otherwise it is empty.
        """
        if row:
            prompts = [
                Prompt(text, of_prompt) for text, of_prompt in zip(prompts, row, strict=True)
            ]
        # TRL gives ids without padding. From them `from_tokens` makes the same rollout as in PPO.
        ends = end_of_text(self.model, self.tokenizer)
        rollout = from_tokens(self.tokenizer, prompts, completion_ids, ends).to(
            PartialState().device
        )
        rollout = replace(rollout, scores=score_responses(self.reward, rollout))
        # The scores of all processes, because the mean of the processes' deviations is not the deviation of all scores.
        scores = torch.tensor(gather_object(rollout.scores.tolist()))
        metrics = {
            "score_mean": scores.mean().item(),
            "score_std": scores.std(correction=0).item(),
            "eos_rate": rollout.ended.float().mean().item(),
        }
        if self.gold is not None:
            gold_scores = checked_scores(FunctionReward(self.gold, "gold"), rollout)
            metrics["gold_mean"] = gold_scores.mean().item()
        if hasattr(self.reward, "metrics"):  # unit tests count how programs ended
            metrics |= self.reward.metrics()
        for name, value in metrics.items():
            log_metric(name, value)  # TRL averages it over processes
        if self.logger is not None:
            # The answers to the first prompt, each as a single action.
            group = rollout.select(slice(0, self.config.num_generations))
            self.logger.log_samples(trainer_state.global_step + 1, group, Whole()(group.mask))
        return scores_for_training(rollout, self.config).tolist()


class _OurPrompts:
    """Tokenize prompts as we do: TRL would add a second BOS to a prompt that a chat template wrote."""

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        return encode_prompts(self.processing_class, prompts), None, {}


class _TokenMeans:
    """Make some metrics means over all tokens of a step; TRL would take the mean over passes of each pass's mean."""

    of_tokens = ("entropy",)  # TRL's names of metrics that are means over tokens

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        tokens = self.accelerator.reduce(inputs["completion_mask"].sum(), reduction="sum")
        self._metrics["train"]["tokens of a pass"].append(tokens.item())
        return loss

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Log a step as TRL does, after its means of each pass are replaced by one mean over all tokens."""
        metrics = self._metrics["train"]  # TRL's: name -> a value of each pass, whose mean it logs
        # They come from `compute_loss`; the log at the end of training has none.
        tokens_of_passes = metrics.pop("tokens of a pass", [])
        for name in self.of_tokens:
            if tokens_of_passes and metrics.get(name):
                total = 0.0
                for mean, tokens in zip(metrics[name], tokens_of_passes, strict=True):
                    total += mean * tokens
                metrics[name] = [total / sum(tokens_of_passes)]
        super().log(logs, *args, **kwargs)


class _RLOO(ScaledGradients, _OurPrompts, _TokenMeans, RLOOTrainer):
    pass


class _GRPO(ScaledGradients, _OurPrompts, _TokenMeans, GRPOTrainer):
    of_tokens = ("entropy", "kl", "clip_ratio/region_mean")


def group_trainer(
    model: PeftModel,
    tokenizer,
    prompts: Sequence[str],
    reward: SampledReward,
    config: RLOOCommand | GRPOCommand,
    output: Path,
) -> RLOOTrainer | GRPOTrainer:
    """Return a trainer of `model` by the method of these options. A copy of its present adapter becomes the reference.

    An update is one optimizer step. As in PPO it has `batch_size` responses, here to batch_size / num_generations
    prompts. Optimizer and learning-rate schedule are PPO's. Checkpoints go to `output`/checkpoints.
    """
    check_adapter(model)
    if not len(prompts):
        raise InputError(
            "prompts: there are none to answer: give more data, or a larger --max_prompt_length"
        )
    # 1. Sizes. A group is the responses to one prompt.
    groups = config.batch_size // config.num_generations
    rows_of_process = config.batch_size // PartialState().num_processes
    # A divisor of `rows_of_process`: passes of this size add up to a step (`gradient_accumulation_steps` below).
    rows_at_a_time = rows_a_pass(config.micro_batch_size, rows_of_process)
    updates = config.updates
    if config.prompt_epochs:  # passes over the prompts; if they are given, --updates does not count
        updates = updates_of_passes(config.prompt_epochs, len(prompts), groups)

    # 2. Optimizer and schedule, as PPO has them.
    optimizer = make_optimizer(
        {"policy": trainable(model)}, {"policy": config.policy_learning_rate}, config
    )
    share_of_rate = functools.partial(learning_rate_share, config, total=updates)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)

    # 3. What differs between the methods.
    if isinstance(config, RLOOStageConfig):
        trainer_class = _RLOO
        config_class = RLOOConfig
        method_arguments = {"normalize_advantages": config.whiten}
    else:
        trainer_class = _GRPO
        config_class = GRPOConfig
        # With `use_bias_correction_kl` the KL's gradient is that of the reverse KL, as in PPO. The first GRPO had
        # another one.
        method_arguments = {
            "loss_type": "grpo",
            "scale_rewards": "group",
            "use_bias_correction_kl": True,
        }

    # 4. The prompts of all updates, in PPO's order.
    drawn = list(islice(prompt_stream(prompts, config.seed), updates * groups))
    columns = {"prompt": drawn}
    if isinstance(drawn[0], Prompt):  # a reward asks for other columns of the prompt's row
        columns[ROW] = [prompt.row for prompt in drawn]

    sampling = sampling_of(config, config.max_response_length)
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(
            max_steps=updates,
            per_device_train_batch_size=rows_at_a_time,
            gradient_accumulation_steps=rows_of_process // rows_at_a_time,
            num_generations=config.num_generations,
            beta=config.kl_coef,
            epsilon=config.cliprange,
            max_grad_norm=config.max_grad_norm,
            # TRL has one temperature for sampling and log-probabilities; we keep them apart, as in PPO.
            temperature=config.temperature if config.logprobs_at_temperature else 1.0,
            generation_kwargs=sampling.arguments(),
            max_completion_length=config.max_response_length,
            shuffle_dataset=False,  # the order of prompts is PPO's
            **method_arguments | trainer_arguments(output / "checkpoints", config.seed, config),
        ),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer,
    )
    # Set here because transformers refuses the argument `optimizers` under FSDP.
    trainer.optimizer = optimizer
    trainer.lr_scheduler = schedule
    complete_reference(trainer.model)  # what TRL leaves out of its copy of the adapter
    return trainer


def group_row(logs: dict, config: GroupConfig) -> dict[str, float]:
    """Return a row of metrics from TRL's log of a step.

    TRL's KL is a mean over tokens, by the estimator k1 in RLOO and k3 in GRPO; a row has it in nats per response. If
    the KL coefficient is 0, TRL gives no KL, and the row has none.
    """
    row = {ours: logs[theirs] for theirs, ours in NAMES.items() if theirs in logs}
    if "kl" in logs:
        name = "kl_k1" if isinstance(config, RLOOStageConfig) else "kl_k3"
        row[name] = logs["kl"] * row["response_length"]
    row["tokens"] = round(row["response_length"] * config.batch_size)
    return row

"""Direct preference optimisation through `trl.DPOTrainer` (Appendix C.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import torch
from peft import PeftModel
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

from marlhf_lite.config.options import CheckpointConfig, DPOStageConfig, TrainerConfig
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses
from marlhf_lite.training.rollout import Rollout, Sampling, generate
from marlhf_lite.training.sft import shared_arguments
from marlhf_lite.training.trackers import tracker_names
from marlhf_lite.utils.run_folder import RunFolder


class PairsTrainer(DPOTrainer):
    """TRL's trainer on our token ids. Its own would join prompt and response, and end cut responses with EOS too."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def dpo_trainer(
    model: PeftModel,
    tokenizer,
    rows: datasets.Dataset,
    options: DPOStageConfig,
    limit: int,
    output: Path,
    checkpoint: CheckpointConfig,
    seed: int = 0,
    shared: TrainerConfig | None = None,
    report_to: str = "",
) -> PairsTrainer:
    """A trainer of `model` on pairs (columns prompt, chosen, rejected), with responses cut at `limit` tokens.

    A copy of its adapter as it is now becomes the reference. Checkpoints go into `output`/checkpoints.
    """
    encoded = {"prompt_ids": encode_prompts(tokenizer, rows["prompt"])}
    encoded |= {f"{side}_ids": encode_responses(tokenizer, rows[side], limit) for side in ("chosen", "rejected")}
    return PairsTrainer(
        model=model,
        args=DPOConfig(
            beta=options.dpo_beta,
            max_length=None,
            **shared_arguments(output / "checkpoints", seed, options, "dpo", shared or TrainerConfig())
            | common_arguments(checkpoint, report_to),
        ),
        train_dataset=datasets.Dataset.from_dict(encoded),
        processing_class=tokenizer,
    )


def common_arguments(checkpoint: CheckpointConfig, report_to: str = "") -> dict:
    """Arguments that all baselines share. Dropout is off: its noise would look like a distance to the reference."""
    return {
        "disable_dropout": True,
        "disable_tqdm": True,  # the bar is ours
        "logging_nan_inf_filter": False,
        "report_to": tracker_names(report_to) or "none",
        "save_strategy": "steps" if checkpoint.checkpoint_every else "no",
        "save_steps": checkpoint.checkpoint_every or 1,
        "save_total_limit": max(checkpoint.save_total_limit, 2),  # the one before goes only when the next is whole
    }


def dpo_row(logs: dict, options: DPOStageConfig) -> dict[str, float]:
    """A row of metrics from TRL's log of a step. Log-ratios to the reference are nats a response, over pairs.

    `accuracy` is the share of pairs whose chosen response has the larger log-ratio, `margin` beta times their gap.
    """
    return {
        "policy_loss": logs["loss"],
        "policy_grad_norm": logs["grad_norm"],
        "accuracy": logs["rewards/accuracies"],
        "margin": logs["rewards/margins"],
        "log_ratio_chosen": logs["rewards/chosen"] / options.dpo_beta,
        "log_ratio_rejected": logs["rewards/rejected"] / options.dpo_beta,
        "tokens": 0,  # DPO samples nothing to learn from
    }


class Answers(TrainerCallback):
    """Answers to a few prompts before and after training, in samples.jsonl; they cost no update any time."""

    def __init__(
        self, tokenizer, prompts: Sequence[str], sampling: Sampling, run: RunFolder, gold: Callable | None, seed: int
    ):
        self.tokenizer, self.prompts, self.sampling = tokenizer, list(prompts), sampling
        self.run, self.gold, self.seed = run, gold, seed

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:  # and not resumed
            self._write(state, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self._write(state, model)

    def _write(self, state, model: PeftModel) -> None:
        if not state.is_world_process_zero:
            return
        was_training = model.training
        with torch.random.fork_rng():  # training draws what it would have drawn without this
            torch.manual_seed(self.seed)
            rollout = generate(model.eval(), self.tokenizer, self.prompts, self.sampling)
        model.train(was_training)
        gold = self.gold(rollout.prompts, rollout.responses) if self.gold else None
        self.run.log_samples(sample_rows(state.global_step, rollout, gold_score=gold))


def sample_rows(update: int, rollout: Rollout, **scores: Sequence[float] | None) -> list[dict]:
    """Rows for samples.jsonl; `scores` are more columns, left out where None. The whole response is one action."""
    given = {name: values for name, values in scores.items() if values is not None}
    return [
        {
            "update": update,
            "prompt": rollout.prompts[i],
            "response": rollout.responses[i],
            "tokens": tokens,
            "ended": bool(rollout.ended[i]),
            "spans": [[0, tokens]],
        }
        | {name: float(values[i]) for name, values in given.items()}
        for i, tokens in enumerate(rollout.lengths.tolist())
    ]

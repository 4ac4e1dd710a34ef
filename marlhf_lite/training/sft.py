"""Supervised fine-tuning through `trl.SFTTrainer` (paper, Appendix B.2)."""

from pathlib import Path

import datasets
from peft import PeftModel
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from marlhf_lite.config import options as o
from marlhf_lite.tasks.training_rows import sft_dataset
from marlhf_lite.training.half_precision import ScaledGradients
from marlhf_lite.training.optimizer import WarmUpAboveZero
from marlhf_lite.training.trl_trainers import (
    EndsWithLastStep,
    check_head,
    run_trainer,
    shared_arguments,
    train_within_memory,
)


class ResponseTrainer(ScaledGradients, WarmUpAboveZero, EndsWithLastStep, SFTTrainer):
    """TRL's trainer, in float16 too."""


def train_sft(
    model: PeftModel | PreTrainedModel,
    tokenizer,
    rows: datasets.Dataset,
    config: o.SFTStageConfig,
    lengths: o.LengthConfig,
    output: Path,
    seed: int = 0,
    trainer_config: o.TrainerConfig | None = None,
    resume: bool = False,
) -> list[dict]:
    """Train `model` on prompt -> chosen, save adapter and tokenizer to `output`; returns TRL's log, a row a step.

    `rows` has columns prompt and chosen. The loss is the mean over response tokens, EOS included. With `resume` it goes
    on from the checkpoint of a training that was stopped, if there is one in `output`. Raises `InputError` where loss
    or gradient are not finite, and `Stopped` by Ctrl-C and SIGTERM; then nothing is saved but a checkpoint by the last.
    """

    check_head(model)

    def train(trainer_config: o.TrainerConfig) -> list[dict]:
        trainer = ResponseTrainer(
            model=model,
            args=SFTConfig(
                max_length=None,  # prompts and turns are cut already
                completion_only_loss=True,
                **shared_arguments(output, seed, config, trainer_config, "sft"),
            ),
            train_dataset=sft_dataset(tokenizer, rows, lengths.max_response_length),
            processing_class=tokenizer,
        )
        return run_trainer(trainer, tokenizer, output, "SFT", resume)

    return train_within_memory(train, model, trainer_config or o.TrainerConfig(), config.sft_batch_size)

"""Supervised fine-tuning through `trl.SFTTrainer` (paper, Appendix B.2)."""

from pathlib import Path

import datasets
from peft import PeftModel
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from marlhf_lite.config import options as o
from marlhf_lite.tasks.training_rows import sft_dataset
from marlhf_lite.training.half_precision import ScaledGradients
from marlhf_lite.training.padded_rows import PaddedRows
from marlhf_lite.training.trl_trainers import (
    StageSteps,
    check_adapter,
    stage_arguments,
    train_stage,
)

NO_LABEL = -100  # of a token from which nothing is learned, as torch's cross entropy has it


class ResponseTrainer(ScaledGradients, StageSteps, PaddedRows, SFTTrainer):
    """TRL's trainer, in float16 too."""

    def padding_row(self, row: dict) -> dict:
        """The same tokens without a label.

        The loss is a sum over labels, divided by their number in all processes. A row without labels changes neither.
        """
        return row | {"labels": [NO_LABEL] * len(row["labels"])}


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
    """Train `model` on prompt -> chosen, and save adapter and tokenizer to `output`; return TRL's log, a row per step.

    `rows` has columns prompt and chosen. The loss is the mean over response tokens, EOS included. With `resume` it
    continues from the checkpoint that a stopped training left in `output`, if any. Raises `InputError` if loss or
    gradient is not finite, and `Stopped` after Ctrl-C or SIGTERM; only the second leaves a checkpoint.
    """
    check_adapter(model)

    def make(trainer_config: o.TrainerConfig) -> ResponseTrainer:
        return ResponseTrainer(
            model=model,
            args=SFTConfig(
                max_length=None,  # prompts and turns are cut already
                completion_only_loss=True,
                **stage_arguments(output, seed, config, trainer_config, "sft"),
            ),
            train_dataset=sft_dataset(tokenizer, rows, lengths.max_response_length),
            processing_class=tokenizer,
        )

    if trainer_config is None:
        trainer_config = o.TrainerConfig()  # type: ignore[call-arg]  # mypy sees no defaults by place
    return train_stage(
        make,
        model,
        trainer_config,
        rows_per_step=config.sft_batch_size,
        tokenizer=tokenizer,
        output=output,
        name="SFT",
        resume=resume,
    )

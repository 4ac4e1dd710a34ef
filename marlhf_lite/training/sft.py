"""Supervised fine-tuning of an adapter, through `trl.SFTTrainer` (paper, Appendix B.2)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import datasets
from accelerate import PartialState
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from marlhf_lite.config.options import DataConfig, DPOStageConfig, RewardModelConfig, SFTStageConfig, TrainerConfig
from marlhf_lite.tasks.tokenization import sft_dataset
from marlhf_lite.utils.errors import InputError


def train_sft(
    model: PeftModel | PreTrainedModel,
    tokenizer,
    rows: datasets.Dataset,
    options: SFTStageConfig,
    data: DataConfig,
    output: Path,
    seed: int = 0,
    shared: TrainerConfig | None = None,
) -> list[dict]:
    """Train `model`'s adapter on prompt -> chosen, save adapter and tokenizer to `output`; TRL's log, a row a step.

    `rows` has columns prompt and chosen. The loss is the mean over response tokens, EOS included.
    """
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            max_length=data.max_prompt_length + data.max_response_length,
            completion_only_loss=True,
            **shared_arguments(output, seed, options, "sft", shared or TrainerConfig()),
        ),
        train_dataset=sft_dataset(tokenizer, rows, data.max_response_length),
        processing_class=tokenizer,
    )
    return run_trainer(trainer, tokenizer, output, "SFT")


def shared_arguments(
    output: Path,
    seed: int,
    options: SFTStageConfig | RewardModelConfig | DPOStageConfig,
    stage: str,
    shared: TrainerConfig,
) -> dict:
    """Arguments of a trainer of TRL, from `shared` and from options that begin with the stage's name."""
    given = {f.name.removeprefix(f"{stage}_"): getattr(options, f.name) for f in fields(options)}
    size, steps = split_batch(given["batch_size"], shared.per_device_train_batch_size, f"--{stage}_batch_size")
    return {
        "output_dir": str(output),
        "num_train_epochs": given["epochs"],
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "learning_rate": given["learning_rate"],
        "lr_scheduler_type": shared.lr_scheduler_type,
        "warmup_steps": shared.warmup_ratio,  # below 1 it is a share of all steps
        "weight_decay": 0.0,
        "save_strategy": "no",
        "seed": seed,
        **quiet_arguments(),
    }


def quiet_arguments() -> dict:
    """Arguments of every trainer of TRL: we record, and precision and checkpointing are the model's own."""
    return {
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,  # the models that ask for it have it switched on already
        "dataloader_pin_memory": False,
    }


def split_batch(batch: int, micro: int, option: str) -> tuple[int, int]:
    """`(sequences per pass, passes per step)` of one process, for a batch over all of them.

    Raises `InputError` where the batch cannot be divided so.
    """
    processes = PartialState().num_processes
    micro = micro or batch // processes
    if not micro or batch % (processes * micro):
        raise InputError(
            f"{option} {batch}: not a multiple of {processes} processes times --per_device_train_batch_size {micro}: "
            "change one of them"
        )
    return micro, batch // (processes * micro)


class Bar(TrainerCallback):
    """One progress bar with ETA and the loss, instead of the trainer's line of text a step."""

    def __init__(self, name: str):
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, desc=self.name, disable=not state.is_local_process_zero)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def run_trainer(trainer, tokenizer, output: Path, name: str) -> list[dict]:
    """Train, save what was trained, and return the log's rows that belong to a step."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Bar(name))
    trainer.train()
    trainer.save_model(str(output))
    if trainer.accelerator.is_main_process:
        tokenizer.save_pretrained(output)
    return [row for row in trainer.state.log_history if "loss" in row]

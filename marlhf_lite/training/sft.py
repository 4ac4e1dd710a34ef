"""Supervised fine-tuning of an adapter, through `trl.SFTTrainer` (paper, Appendix B.2)."""

from __future__ import annotations

from pathlib import Path

import datasets
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from marlhf_lite.config import DataOptions, SFTOptions
from marlhf_lite.tokens import sft_dataset


def train_sft(
    model: PeftModel,
    tokenizer,
    rows: datasets.Dataset,
    options: SFTOptions,
    data: DataOptions,
    output: Path,
    seed: int = 0,
) -> list[dict]:
    """Train `model`'s adapter on prompt -> chosen, save adapter and tokenizer to `output`; TRL's log, a row a step.

    `rows` has columns prompt and chosen. The loss is the mean over response tokens, EOS included.
    """
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            max_length=data.max_prompt_length + data.max_response_length,
            completion_only_loss=True,
            num_train_epochs=options.sft_epochs,
            per_device_train_batch_size=options.sft_batch_size,
            learning_rate=options.sft_learning_rate,
            **shared_arguments(output, seed, warmup_ratio=options.sft_warmup_ratio),
        ),
        train_dataset=sft_dataset(tokenizer, rows, data.max_response_length),
        processing_class=tokenizer,
    )
    return run_trainer(trainer, tokenizer, output, "SFT")


def shared_arguments(output: Path, seed: int, warmup_ratio: float) -> dict:
    """Arguments that SFT and the reward model share."""
    return {
        "output_dir": str(output),
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup_ratio,  # below 1 it is a share of all steps
        "weight_decay": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": seed,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


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
    trainer.model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return [row for row in trainer.state.log_history if "loss" in row]

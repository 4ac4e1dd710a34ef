"""What SFT, reward model and baselines share of TRL's trainers: arguments, rows a pass, memory, a bar and records."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from marlhf_lite.config import options as o
from marlhf_lite.models.adapters import is_sharded_folder
from marlhf_lite.training.callbacks import ProgressBar
from marlhf_lite.training.checkpoint import check_processes
from marlhf_lite.training.distributed import is_sharded, whole_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.interrupts import graceful_stop
from marlhf_lite.utils.less_memory import rows_a_pass, with_less_memory
from marlhf_lite.utils.preflight import check
from marlhf_lite.utils.seals import SEAL, broken


def check_head(model: PeftModel | PreTrainedModel) -> None:
    """Raise `InputError` where the head has an adapter: TRL computes with its weight, and would not train it."""
    if isinstance(model.get_output_embeddings(), BaseTunerLayer | TrainableTokensWrapper):
        fix = "SFT, DPO, RLOO and GRPO cannot train it: give --lora_target_modules that leaves the head out"
        raise InputError(f"the head (lm_head) has an adapter: {fix}")


def train_within_memory(
    train: Callable[[o.TrainerConfig], list[dict]], model: nn.Module, config: o.TrainerConfig, batch: int
) -> list[dict]:
    """Return `train(config)`; where memory ends, it starts again with half the rows a pass, which changes no gradient.

    `batch` rows make a step, over all processes. Raises as `with_less_memory`.
    """
    processes = PartialState().num_processes
    share = batch // processes
    size = min(config.per_device_train_batch_size or share, share)
    start = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def start_over() -> None:
        for parameter, value in start:
            parameter.copy_(value)
            parameter.grad = None

    def attempt(rows: int) -> list[dict]:
        return train(replace(config, per_device_train_batch_size=rows))

    what = "--per_device_train_batch_size {}"
    return with_less_memory(attempt, size, what, alone=processes == 1, share=share, start_over=start_over)[0]


def shared_arguments(
    output: Path,
    seed: int,
    config: o.SFTStageConfig | o.RewardModelConfig | o.DPOStageConfig,
    trainer_config: o.TrainerConfig,
    stage: str,
) -> dict:
    """Arguments that SFT, reward model and DPO share; `stage` is the prefix of the option's names."""
    # sft_epochs, rm_batch_size, dpo_learning_rate, ...
    epochs, batch_size, learning_rate = (
        getattr(config, f"{stage}_{name}") for name in ("epochs", "batch_size", "learning_rate")
    )
    size, steps = split_batch(batch_size, trainer_config.per_device_train_batch_size, f"--{stage}_batch_size")
    return {
        "output_dir": str(output),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": trainer_config.lr_scheduler_type,
        "warmup_steps": trainer_config.warmup_ratio,  # below 1 it is a share of all steps
        "weight_decay": 0.0,
        "save_strategy": "no",
        "seed": seed,
        **quiet_arguments(),
    }


class EndsWithLastStep:
    """Makes a trainer whose checkpoint is that of the last step train no more: transformers would make one step more
    where this step is in the middle of an epoch.
    """

    def _run_epoch(self, *args, **kwargs) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)


class EvenPairs:
    """Makes loss and metrics of a step means over its pairs: trainers take the mean over passes, of which the last one
    may have fewer pairs than the others.
    """

    of_pairs: tuple[str, ...] = ()  # metrics of each pass that are means over its pairs

    def get_batch_samples(self, *args, **kwargs):
        """The passes of a step; `pairs_a_pass` is how many pairs they have on average."""
        passes, items = super().get_batch_samples(*args, **kwargs)
        self.pairs_a_pass = sum(len(inputs["input_ids"]) // 2 for inputs in passes) / max(len(passes), 1)
        return passes, items

    def compute_loss(self, model, inputs, *args, **kwargs):
        """The loss of a pass, which in training counts as many times as it has pairs."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not model.training:
            return loss
        share = len(inputs["input_ids"]) // 2 / self.pairs_a_pass  # 1 where all are in one pass
        for name in self.of_pairs:
            self._metrics["train"][name][-1] *= share
        return loss * share


def quiet_arguments() -> dict:
    """Arguments of every trainer of TRL: records are ours, and the model sets precision and checkpointing itself."""
    return {
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # the progress bar has to see them
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,  # models that ask for it have it switched on already
        "dataloader_pin_memory": False,
    }


def sum_in_each_pass(trainer: Trainer) -> None:
    """Let processes add up gradients in each pass of a step where FSDP spreads the weights.

    Without sums FSDP2 would keep all gradients whole in each process until the last pass.
    """
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = trainer.is_fsdp_enabled


def split_batch(batch: int, micro: int, option: str) -> tuple[int, int]:
    """`(rows per pass, passes per step)` of one process, for a batch over all of them, within `micro` rows a pass.

    Raises `InputError` where processes cannot share the batch.
    """
    processes = PartialState().num_processes
    share, rest = divmod(batch, processes)
    if rest:
        raise InputError(f"{option} {batch}: {processes} processes cannot share it: make it a multiple of that")
    rows = rows_a_pass(micro, share)
    return rows, share // rows


@check
def check_batches(options) -> None:
    """Raise `InputError` where processes cannot share a batch of SFT, reward model or DPO."""
    for flag in ("sft_batch_size", "rm_batch_size", "dpo_batch_size"):
        if size := getattr(options, flag, None):
            split_batch(size, options.per_device_train_batch_size, f"--{flag}")


def run_trainer(trainer, tokenizer, output: Path, name: str, resume: bool = False) -> list[dict]:
    """Train, save what was trained, and return the rows of the log that belong to a step; see `train_sft`."""
    # One bar of ours instead of a line a step in a terminal, or a table row a step in a notebook.
    for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(callback)
    sum_in_each_pass(trainer)
    checkpoint = checkpoint_to_resume(output) if resume else None
    match_checkpoint_format(trainer, checkpoint)
    with graceful_stop() as asked_to_stop:
        bar = ProgressBar(name, asked_to_stop)
        trainer.add_callback(bar)
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        finally:
            bar.close()
        if trainer.state.global_step >= trainer.state.max_steps:
            weights = whole_weights(trainer.model) if is_sharded(trainer.model) else None
            if weights is None:
                trainer.save_model(str(output))
            elif trainer.accelerator.is_main_process:  # that writes no model where checkpoints are by shard
                trainer.model.save_pretrained(output, state_dict=weights)
            if trainer.accelerator.is_main_process:
                tokenizer.save_pretrained(output)
    if trainer.accelerator.is_main_process:
        for path in output.glob("checkpoint-*"):
            shutil.rmtree(path)
    return [row for row in trainer.state.log_history if "loss" in row]


def checkpoint_to_resume(folder: Path, step: int = 0) -> Path | None:
    """Return a trainer's whole checkpoint of this step in a folder, by default the last one; None if there is none.

    Raises `InputError` if the one of this step is missing, or if the checkpoint is damaged.
    """
    whole = {step_of(path.parent): path.parent for path in folder.glob(f"checkpoint-*/{SEAL}")}
    if step and step not in whole:
        raise InputError(f"--from_checkpoint {step}: {folder} has {sorted(whole) or 'none'}: name one of them")
    checkpoint = whole.get(step or max(whole, default=0))
    if checkpoint and broken(checkpoint):
        raise InputError(f"{checkpoint}: it is damaged: delete it, and --resume takes the one before, if there is one")
    return checkpoint


def step_of(checkpoint: Path) -> int:
    """Return the step after which a trainer of transformers wrote a checkpoint, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def match_checkpoint_format(trainer: Trainer, checkpoint: Path | None) -> None:
    """Let FSDP read a checkpoint, if any, in the form in which it was written: by shard, or as one file of all weights.

    Those that the trainer writes from now on have the same form. Raises `InputError` where FSDP wrote it and is not
    active now, or the other way round, and where another number of processes wrote it, unless by shard.
    """
    if checkpoint is None:
        return
    is_of_fsdp = any(checkpoint.glob(f"{FSDP_MODEL_NAME}*"))
    if is_of_fsdp != trainer.is_fsdp_enabled:
        made, launch = ("under", "with") if is_of_fsdp else ("without", "without")
        raise InputError(f"{checkpoint}: made {made} FSDP: launch it {launch} fsdp2.yaml")
    is_by_shard = is_sharded_folder(checkpoint)
    # transformers would go on without the states of its random generators, and not tell
    made, processes = len([*checkpoint.glob("rng_state*.pth")]), PartialState().num_processes
    if not is_by_shard:
        check_processes(checkpoint, made, processes)
    elif made != processes and PartialState().is_main_process:
        print(f"{checkpoint}: made by {made} processes, not {processes}: its random numbers will be others")
    if is_of_fsdp:
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # it would keep those of another form
        plugin.set_state_dict_type("SHARDED_STATE_DICT" if is_by_shard else "FULL_STATE_DICT")

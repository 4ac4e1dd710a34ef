"""The common part of SFT, reward model and baselines, which TRL trains: arguments, memory, checkpoints, saving."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PrinterCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from marlhf_lite.config import options as o
from marlhf_lite.config.checked import Checked
from marlhf_lite.config.commands import PolicyCommand
from marlhf_lite.models.adapters import is_sharded_folder
from marlhf_lite.models.shards import torch_reads_no_code
from marlhf_lite.training.callbacks import Recorder
from marlhf_lite.training.checkpoint import check_processes
from marlhf_lite.training.distributed import is_sharded, whole_weights
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.padded_rows import PaddedRows
from marlhf_lite.training.trackers import tracker_names
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.interrupts import graceful_stop
from marlhf_lite.utils.less_memory import rows_a_pass, with_less_memory
from marlhf_lite.utils.seals import DELETE_IT, SEAL, broken

if TYPE_CHECKING:  # what the classes here are mixed into
    TrainerBase = Trainer
else:
    TrainerBase = object

Options = TypeVar("Options", bound=Checked)
Result = TypeVar("Result")


def check_adapter(model: PeftModel | PreTrainedModel) -> None:
    """Raise `InputError` for an adapter that TRL's trainers of policies cannot train.

    If the head has an adapter, TRL computes with the head's weight alone, and would not train the adapter. TRL also
    makes a second adapter of the same kind, as the reference, which PEFT does not permit for AdaLoRA.
    """
    if isinstance(model, PeftModel) and model.active_peft_config.peft_type == PeftType.ADALORA:
        fix = "give a LoRA adapter, or train by marlhf ppo"
        raise InputError(f"the adapter (ADALORA): DPO, RLOO and GRPO cannot train it: {fix}")
    if isinstance(model.get_output_embeddings(), BaseTunerLayer | TrainableTokensWrapper):
        fix = "SFT, DPO, RLOO and GRPO cannot train it: give --lora_target_modules that leaves the head out"
        raise InputError(f"the head (lm_head) has an adapter: {fix}")


def train_stage(
    make: Callable[[o.TrainerConfig], Trainer],
    model: nn.Module,
    trainer_config: o.TrainerConfig,
    *,
    rows_per_step: int,
    tokenizer,
    output: Path,
    name: str,
    resume: bool,
) -> list[dict]:
    """Train `model` by the trainer that `make(trainer_config)` returns, and save it; see `run_trainer`.

    If memory ends, the training starts again with half the rows per pass, which gives the same gradients.
    `rows_per_step` are the rows of an optimizer step in all processes together. Raises as `with_less_memory`.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    values_at_start = [weight.detach().to("cpu", copy=True) for weight in trained]

    @torch.no_grad()
    def start_over() -> None:
        for weight, value in zip(trained, values_at_start, strict=True):
            weight.copy_(value)
            weight.grad = None

    def attempt(trainer_config: o.TrainerConfig) -> list[dict]:
        return run_trainer(
            make(trainer_config), tokenizer=tokenizer, output=output, name=name, resume=resume
        )

    return with_fewer_rows(
        attempt,
        trainer_config,
        option="per_device_train_batch_size",
        rows_per_step=rows_per_step,
        start_over=start_over,
    )


def with_fewer_rows(
    attempt: Callable[[Options], Result],
    options: Options,
    option: str,
    rows_per_step: int,
    start_over: Callable[[], None] = lambda: None,
) -> Result:
    """Return `attempt(options)`; each time that memory ends, attempt it again with half as many rows per pass.

    `option` is the name of the option that holds the rows per pass, and `start_over` takes back what the unfinished
    attempt left. `rows_per_step` are the rows of an optimizer step in all processes together. Each process has an equal
    share of them, and the rows per pass must divide this share. Raises as `with_less_memory`.
    """
    processes = PartialState().num_processes
    rows_of_process = rows_per_step // processes
    asked_rows = getattr(options, option) or rows_of_process  # 0 asks for all at once
    most_rows = min(asked_rows, rows_of_process)

    def attempt_with(rows: int) -> Result:
        if rows == most_rows:  # the first attempt has the options as they are, also with 0
            return attempt(options)
        return attempt(replace(cast(Any, options), **{option: rows}))

    result, _ = with_less_memory(
        attempt_with,
        most_rows,
        f"--{option} {{}}",
        # Several processes wait for each other in every step, so none of them can start over alone.
        no_process_waits=processes == 1,
        share=rows_of_process,
        start_over=start_over,
    )
    return result


def trainer_arguments(output: Path, seed: int, policy: PolicyCommand | None = None) -> dict:
    """Return the arguments that every trainer of TRL gets.

    Our own recorder keeps the records, and our models already have their precision and gradient checkpointing, so TRL
    sets none of them. `policy` are the options of DPO, RLOO or GRPO; SFT and the reward model have none, and save no
    checkpoints. Raises `InputError` for an unknown tracker.
    """
    trackers: list[str] = []
    checkpoint_every = 0
    checkpoints_to_keep = 2  # at least: the older one must stay until the newer one is complete
    if policy:
        trackers = tracker_names(policy.report_to)
        checkpoint_every = policy.checkpoint_every
        checkpoints_to_keep = max(policy.save_total_limit, checkpoints_to_keep)
    return {
        "output_dir": str(output),
        "seed": seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # our recorder must see NaN, to stop the run
        "report_to": trackers or "none",
        "bf16": False,
        "activation_checkpointing": False,  # already on in models that use it
        "dataloader_pin_memory": False,  # token ids are small, and without a GPU it warns
        "save_strategy": "steps" if checkpoint_every else "no",
        "save_steps": checkpoint_every or 1,  # with "no" it counts nothing, but must be above 0
        "save_total_limit": checkpoints_to_keep,
    }


def stage_arguments(
    output: Path,
    seed: int,
    config: o.SFTStageConfig | o.RewardModelConfig | o.DPOStageConfig,
    trainer_config: o.TrainerConfig,
    stage: str,
) -> dict:
    """Arguments that SFT, reward model and DPO share; `stage` is the prefix of the option's names."""
    rows_per_step = getattr(config, f"{stage}_batch_size")
    rows_of_process = rows_per_step // PartialState().num_processes
    rows = rows_a_pass(trainer_config.per_device_train_batch_size, rows_of_process)
    policy = config if isinstance(config, PolicyCommand) else None
    return trainer_arguments(output, seed, policy) | {
        "num_train_epochs": getattr(config, f"{stage}_epochs"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rows_of_process // rows,
        "learning_rate": getattr(config, f"{stage}_learning_rate"),
        "lr_scheduler_type": trainer_config.lr_scheduler_type,
        "warmup_steps": trainer_config.warmup_ratio,  # below 1 it is a share of all steps
        "weight_decay": 0.0,
    }


class StageSteps(TrainerBase):
    """Makes a trainer of transformers begin its warm-up above 0, and end with its last step.

    Transformers' own warm-up begins at 0, so a stage of one step would train nothing. Here step s of N, counted from 0,
    has the rate that transformers gives step s + 1 of N + 1: the warm-up ends with the peak, and the decay reaches 0
    after the last step.

    If a trainer of transformers is resumed after its last step, and that step was in the middle of an epoch, it makes
    another step. This class does not.
    """

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Make, keep and return the learning-rate schedule of `num_training_steps` steps.

        A schedule that the trainer was given stays. Without a warm-up, transformers' own schedule is right already: it
        begins at the peak.
        """
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        # `warmup_steps` may be a share of all steps. It becomes a number, so that the longer schedule below does not
        # take that share of one step more.
        self.args.warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if self.args.warmup_steps == 0:
            return super().create_scheduler(num_training_steps, optimizer)

        # Transformers' schedule of one step more, entered one step later: its first rate, 0, is left out.
        longer = cast(LambdaLR, super().create_scheduler(num_training_steps + 1, optimizer))
        rates_one_step_later: list[Callable[[int], float]] = []
        for rate in longer.lr_lambdas:
            rates_one_step_later.append(partial(_one_step_later, rate))
        self.lr_scheduler = LambdaLR(longer.optimizer, rates_one_step_later)
        return self.lr_scheduler

    def _run_epoch(self, *args, **kwargs) -> None:
        # A run that is resumed may have made its last step already; see the class.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)


def _one_step_later(rate: Callable[[int], float], step: int) -> float:
    return rate(step + 1)


class EvenPairs(PaddedRows):
    """Makes loss and metrics of a step means over its pairs, in all passes and processes together.

    Trainers average over passes, although the last pass may have fewer pairs than the others. With several processes it
    may also have padding: pairs that teach nothing, and that have weight 0 here.
    """

    of_pairs: tuple[str, ...] = ()  # the metrics that a pass gives as means over its pairs
    # What a padding pair adds to the sum of a pass's losses; it has no gradient.
    loss_of_padding = 0.0

    def is_padding(self, inputs: dict[str, Tensor]) -> Tensor:
        """Which pairs of a pass are padding, [pairs] of truth values."""
        raise NotImplementedError

    def get_batch_samples(self, *args, **kwargs):
        """The passes of a step in this process, as transformers gives them.

        Also sets `pairs_a_pass`, the mean number of true pairs in a pass, over all passes and processes of the step.
        """
        passes, items = super().get_batch_samples(*args, **kwargs)
        pairs = sum(int((~self.is_padding(inputs)).sum()) for inputs in passes)
        if self.accelerator.num_processes > 1:
            pairs = sum(gather_object([pairs]))
        number_of_passes = len(passes) * self.accelerator.num_processes
        self.pairs_a_pass = pairs / max(number_of_passes, 1)
        return passes, items

    def compute_loss(self, model, inputs, *args, **kwargs):
        """The loss of a pass; in training it is weighted, so that the trainer's mean over passes is one over pairs."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not model.training:
            return loss
        # The pass has divided its sums by all of its pairs. They should be divided by the true pairs of a mean pass
        # (`get_batch_samples`), so they are multiplied by the ratio of the two.
        pairs = len(inputs["input_ids"]) // 2  # two texts a pair
        ratio = pairs / self.pairs_a_pass
        for name in self.of_pairs:  # padding has added 0 to their sums, so nothing is subtracted
            self._metrics["train"][name][-1] *= ratio
        padding = int(self.is_padding(inputs).sum())
        if padding:
            loss = loss - self.loss_of_padding * padding / pairs
        return loss * ratio


def check_batches(options) -> None:
    """Raise `InputError` if a batch of SFT, reward model or DPO cannot be divided among the processes."""
    processes = PartialState().num_processes
    for flag in ("sft_batch_size", "rm_batch_size", "dpo_batch_size"):
        size = getattr(options, flag, 0)  # a command has some of them
        if size % processes:
            raise InputError(
                f"--{flag} {size}: {processes} processes cannot share it: give a multiple of that"
            )


def run_trainer(trainer, tokenizer, output: Path, name: str, resume: bool = False) -> list[dict]:
    """Train, save the trained weights to `output`, and return the log's rows of steps.

    Raises `Stopped` if the user stops the run; a checkpoint then stays, from which `resume` continues.
    """
    checkpoint = checkpoint_to_resume(output) if resume else None
    check_checkpoint(trainer, checkpoint)
    with graceful_stop() as asked_to_stop:
        recorder = Recorder(RunLogger(None, name), asked_to_stop)
        gathered_weights = train_recorded(trainer, recorder, checkpoint)
        has_ended = trainer.state.global_step >= trainer.state.max_steps
        if has_ended and trainer.accelerator.is_main_process:
            save_trained(trainer.model, tokenizer, output, gathered_weights)
    # The training has ended, so nothing needs its checkpoints any more. (After a stop, `graceful_stop` has raised
    # `Stopped` above.)
    if trainer.accelerator.is_main_process:
        for path in output.glob("checkpoint-*"):
            shutil.rmtree(path)
    return [row for row in trainer.state.log_history if "loss" in row]


def save_trained(
    model: PeftModel | PreTrainedModel, tokenizer, folder: Path, weights: dict | None
) -> None:
    """Save a model and its tokenizer.

    If FSDP2 shards the weights over processes, give them gathered as `weights`; None if each process has them whole. If
    the model has several adapters, only the one that trains is saved: TRL adds another one as the reference.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=weights, selected_adapters=["default"])
    else:
        model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def train_recorded(
    trainer: Trainer, recorder: Recorder, checkpoint: Path | None
) -> dict[str, Tensor] | None:
    """Train, from a checkpoint if there is one, with our bar and records instead of the trainer's own.

    If FSDP2 shards the model, its weights are returned whole, because its own would be saved in parts; else None.
    """
    for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(recorder)
    # Under FSDP2, processes exchange gradients after each pass. Otherwise each would keep all gradients whole until the
    # last pass of a step.
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = trainer.is_fsdp_enabled
    try:
        # The checkpoint of a run that is resumed may come from somebody else, and must run no code here.
        with torch_reads_no_code():
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            except UnpicklingError:
                what = "a file of it holds more than numbers, and is not read"
                raise InputError(f"{checkpoint}: {what}: {DELETE_IT}") from None
    finally:
        if recorder.bar is not None:
            recorder.bar.close()  # so that the next text starts on a new line
    model = cast(nn.Module, trainer.model)  # which transformers may delete, but not here
    return whole_weights(model) if is_sharded(model) else None


def checkpoint_to_resume(folder: Path, at: int | None = None) -> Path | None:
    """Return a trainer's last complete checkpoint in a folder, or that of step `at`; None if there is none.

    Raises `InputError` if that checkpoint is damaged.
    """
    # A checkpoint gets its seal when it is complete.
    complete = [path.parent for path in folder.glob(f"checkpoint-*/{SEAL}")]
    if at is not None:
        complete = [path for path in complete if step_of(path) == at]
    checkpoint = max(complete, key=step_of, default=None)
    if checkpoint is None:
        return None
    damaged_file = broken(checkpoint)
    if damaged_file:
        raise InputError(f"{checkpoint}: it is damaged ({damaged_file}): {DELETE_IT}")
    return checkpoint


def step_of(checkpoint: Path) -> int:
    """Return the step after which a trainer of transformers wrote a checkpoint, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def check_checkpoint(trainer: Trainer, checkpoint: Path | None) -> None:
    """Raise `InputError` if this launch cannot continue from a checkpoint.

    It must use FSDP if the checkpoint was made under FSDP, and only then. It must also have the same number of
    processes, unless the checkpoint consists of shards: any number of processes can read these. The random numbers are
    then others, and a line says so.
    """
    if checkpoint is None:
        return
    is_of_fsdp = any(checkpoint.glob(f"{FSDP_MODEL_NAME}*"))
    if is_of_fsdp != trainer.is_fsdp_enabled:
        if is_of_fsdp:
            raise InputError(f"{checkpoint}: made under FSDP: launch it with fsdp2.yaml")
        raise InputError(f"{checkpoint}: made without FSDP: launch it without fsdp2.yaml")
    # Each process has written its random states. For another number of processes transformers would continue without
    # these states, and not tell.
    processes_at_save = len([*checkpoint.glob("rng_state*.pth")])
    processes = PartialState().num_processes
    if not is_sharded_folder(checkpoint):
        check_processes(checkpoint, processes_at_save, processes)
    elif processes_at_save != processes and PartialState().is_main_process:
        made = f"made by {processes_at_save} processes, not {processes}"
        print(f"{checkpoint}: {made}: its random numbers will be others")

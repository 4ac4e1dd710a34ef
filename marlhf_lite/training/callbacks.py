"""Callbacks of TRL's trainers: progress bar, records under PPO's names, checks, held-out tests."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback

from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.distributed import is_sharded
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.safeguards import check_moved, some_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.seals import seal
from marlhf_lite.utils.tables import number

SHOWN = ("score_mean", "gold_mean", "kl_k1", "kl_k3", "accuracy", "loss")
# Name of a stage -> the prefix of its learning rate's option, if that is not the policy's.
PREFIX_OF_RATE = {"SFT": "sft", "reward model": "rm", "DPO": "dpo"}
LOG_POSITIONS = "logs.json"  # in a checkpoint: the size of each log


class Recorder(TrainerCallback):
    """A progress bar instead of the trainer's line of text per step, checks, and the records of a policy.

    It ends the training with `InputError` if the first step moves no weight, or if a loss or gradient is not finite:
    TRL's trainers have made that step already, so no weights are left to continue with. After the step in which
    `asked_to_stop()` becomes true it ends the training, with a checkpoint if `saves`.

    Args:
        logger: its name is shown, and its run gets a row per update, under PPO's names.
        translate: makes a row from TRL's log; the row's `tokens` are the number of tokens generated in this update.
            With None nothing is recorded.
        held_out: returns scores. It is called every `every` updates and after the last one, and its time is not counted
            among an update's seconds.
    """

    def __init__(
        self,
        logger: RunLogger,
        asked_to_stop: Callable[[], bool] = lambda: False,
        translate: Callable[[dict], dict] | None = None,
        held_out: Callable | None = None,
        every: int = 0,
        saves: bool = True,
    ):
        self.logger = logger
        self.asked_to_stop = asked_to_stop
        self.translate = translate
        self.held_out = held_out
        self.every = every
        self.saves = saves
        self.bar: tqdm | None = None  # until the training begins
        self.weights_at_start: dict[str, list[Tensor]] | None = None  # None once they have moved
        self.start_of_step = 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights_at_start = some_weights({"model": trainable(model)})
        self.logger.log_number_of_updates(state.max_steps)
        hidden = not state.is_local_process_zero
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc=self.logger.name, disable=hidden
        )

    def on_step_begin(self, args, state, control, **kwargs):
        self.start_of_step = time.perf_counter()

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        # The summary that TRL logs at the end of the training has no loss, and is not an update.
        if "loss" not in logs:
            return
        update = state.global_step

        # 1. Records, if there are any, and the progress bar.
        loss = float(logs["loss"])
        row = {"loss": loss}
        if self.translate:
            row = self._record(update, self.translate(logs))
        shown = {name: number(row[name], ".3f") for name in SHOWN if name in row}
        self.bar.set_postfix(shown, refresh=False)

        # 2. Checks.
        gradient_norm = float(logs.get("grad_norm", 0.0))
        self._check_first_gradient_moved_weights(model, gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            fix = "start again with a lower learning rate, or --dtype float32"
            raise InputError(
                f"{self.logger.name}: loss or gradient of update {update} is not finite: {fix}"
            )

        # 3. A held-out test.
        if self.held_out and (update % self.every == 0 or update == state.max_steps):
            self.logger.log_held_out(update, self.held_out())

    def _record(self, update: int, row: dict) -> dict:
        """Log a row of metrics with the number of the update, counts and times; return all of it."""
        seconds = time.perf_counter() - self.start_of_step
        history = self.logger.history
        row = {"update": update} | row
        # All tokens so far, also those before a resume.
        tokens_before = history[-1]["generated_tokens"] if history else 0
        row["generated_tokens"] = row["tokens"] + tokens_before
        row["tokens_per_second"] = row["tokens"] / seconds
        row["seconds"] = seconds
        self.logger.log_update(row)
        return row

    def _check_first_gradient_moved_weights(self, model, gradient_norm: float) -> None:
        """Raise `InputError` if the first step with a gradient moved no weight.

        Steps before it may have none: in a group of responses with equal scores there is nothing to learn.
        """
        if self.weights_at_start is None or not gradient_norm:
            return
        # The logger bears the name of the stage: a policy is trained unless it is one of `PREFIX_OF_RATE`.
        prefix = PREFIX_OF_RATE.get(self.logger.name, "policy")
        check_moved(
            self.weights_at_start,
            parameters={"model": trainable(model)},
            option_of_learning_rate={"model": f"--{prefix}_learning_rate"},
        )
        self.weights_at_start = None

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        if self.asked_to_stop():
            control.should_training_stop = True
            control.should_save = control.should_save or self.saves

    def on_save(self, args, state, control, model=None, **kwargs):
        """Complete the checkpoint that the trainer has just written: add what a resume needs, and seal it."""
        PartialState().wait_for_everyone()  # each process has written its part
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if is_sharded(model):
                # Transformers writes shards without the config that their readers need. FSDP2 has put "FSDP" before the
                # name of the model's class.
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(checkpoint)
            # The present size of each log in bytes. A run that resumes from here cuts its logs back to these sizes,
            # because it makes all later updates again. Without a run folder (SFT, reward model) there are no logs.
            sizes_of_logs = self.logger.run.position() if self.logger.run else {}
            write_json(checkpoint / LOG_POSITIONS, sizes_of_logs)
            seal(checkpoint)  # now it is complete

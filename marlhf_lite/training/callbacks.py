"""Callbacks of TRL's trainers: progress bar, records under PPO's names, checks, held-out tests."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
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
LOG_POSITIONS = "logs.json"  # in a checkpoint: the size of each log


class Recorder(TrainerCallback):
    """A progress bar instead of the trainer's line of text per step, checks, and the records of a policy.

    It ends the training with `InputError` if the first step moves no weight, or if a loss or gradient is not finite:
    TRL's trainers have made that step already, so no weights are left to continue with. After the step in which
    `asked_to_stop()` becomes true it ends the training, with a checkpoint if `saves`.

    Args:
        logger: its name is shown, and its run gets a row per update, under PPO's names.
        translate: makes a row from TRL's log; its `tokens` are those generated in this update. None: no records.
        held_out: returns scores; called every `every` updates and after the last one, outside an update's seconds.
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
        self.logger, self.asked_to_stop, self.translate = logger, asked_to_stop, translate
        self.held_out, self.every, self.saves = held_out, every, saves
        self.bar, self.at_start, self.start = None, None, 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at_start = some_weights({"model": trainable(model)})
        hidden = not state.is_local_process_zero
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc=self.logger.name, disable=hidden
        )

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" not in logs:  # the summary at the end has none
            return
        update, loss, gradient = (
            state.global_step,
            float(logs["loss"]),
            float(logs.get("grad_norm", 0.0)),
        )
        row = self._record(update, self.translate(logs)) if self.translate else {"loss": loss}
        self.bar.set_postfix({k: number(row[k], ".3f") for k in SHOWN if k in row}, refresh=False)
        self._check_moved(model, gradient)
        if not (math.isfinite(loss) and math.isfinite(gradient)):
            fix = "start again with a lower learning rate, or --dtype float32"
            raise InputError(
                f"{self.logger.name}: loss or gradient of update {update} is not finite: {fix}"
            )
        if self.held_out and (update % self.every == 0 or update == state.max_steps):
            self.logger.log_held_out(update, self.held_out())

    def _record(self, update: int, row: dict) -> dict:
        seconds, history = time.perf_counter() - self.start, self.logger.history
        row = {"update": update} | row
        # All tokens so far, also those before a resume.
        row["generated_tokens"] = row["tokens"] + (
            history[-1]["generated_tokens"] if history else 0
        )
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        self.logger.log_update(row)
        return row

    def _check_moved(self, model, gradient: float) -> None:
        """Raise `InputError` if the first step with a gradient moved no weight; a group of equal scores has none."""
        if self.at_start is None or not gradient:
            return
        stage = {"SFT": "sft", "reward model": "rm", "DPO": "dpo"}.get(self.logger.name, "policy")
        before, self.at_start = self.at_start, None
        check_moved(before, {"model": trainable(model)}, {"model": f"--{stage}_learning_rate"})

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        if self.asked_to_stop():
            control.should_training_stop, control.should_save = (
                True,
                control.should_save or self.saves,
            )

    def on_save(self, args, state, control, model=None, **kwargs):
        PartialState().wait_for_everyone()  # each process has written its part
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            # transformers writes shards without the config that their readers need
            if is_sharded(model):
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(checkpoint)
            write_json(
                checkpoint / LOG_POSITIONS, self.logger.run.position() if self.logger.run else {}
            )
            seal(checkpoint)  # now it is complete

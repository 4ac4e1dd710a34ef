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
from marlhf_lite.training.safeguards import check_moved, check_start, some_weights
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.seals import seal
from marlhf_lite.utils.tables import number

DISTANCES = ("kl_k1", "kl_k3", "log_ratio_chosen", "log_ratio_rejected")  # to the reference, in nats a response
SHOWN = ("score_mean", "gold_mean", "kl_k1", "kl_k3", "accuracy")
LOG_POSITIONS = "logs.json"  # in a checkpoint: the size of each log


class ProgressBar(TrainerCallback):
    """One progress bar with the remaining time and the loss, instead of the trainer's line of text per step.

    It ends the training with `InputError` if the first step moves no weight, or if a loss or gradient is not finite:
    TRL's trainers have made that step already, so no weights are left to continue with. After the step in which
    `asked_to_stop()` becomes true it ends the training, with a checkpoint if `saves`.
    """

    def __init__(self, name: str, asked_to_stop: Callable[[], bool] = lambda: False, saves: bool = True):
        self.name, self.bar, self.at_start = name, None, None
        self.asked_to_stop, self.saves = asked_to_stop, saves

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at_start = some_weights({"model": trainable(model)})
        hidden = not state.is_local_process_zero
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.name, disable=hidden)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" in logs:  # the summary at the end has none
            self._check_moved(model, float(logs.get("grad_norm", 0.0)))
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)
            check_finite(self.name, state.global_step, logs["loss"], logs.get("grad_norm", 0.0))

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update()
        if self.asked_to_stop():
            control.should_training_stop, control.should_save = True, control.should_save or self.saves

    def on_save(self, args, state, control, model=None, **kwargs):
        PartialState().wait_for_everyone()  # each process has written its part
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if is_sharded(model):  # transformers writes shards without the config that their readers need
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(checkpoint)
            write_json(checkpoint / LOG_POSITIONS, self.positions())
            seal(checkpoint)  # now it is complete

    def positions(self) -> dict[str, int]:
        """The size of each of our logs in bytes."""
        return {}

    def _check_moved(self, model, gradient: float) -> None:
        """Raise `InputError` if the first step with a gradient moved no weight; a group of equal scores has none."""
        if self.at_start is None or not gradient:
            return
        stage = {"SFT": "sft", "reward model": "rm", "DPO": "dpo"}.get(self.name, "policy")
        before, self.at_start = self.at_start, None
        check_moved(before, {"model": trainable(model)}, {"model": f"--{stage}_learning_rate"})

    def close(self) -> None:
        """Close the bar, so that the next text starts on a new line."""
        if self.bar is not None:
            self.bar.close()


def check_finite(name: str, update: int, *numbers: float) -> None:
    """Raise `InputError` if loss or gradient of an update is NaN or infinite."""
    if not all(math.isfinite(float(number)) for number in numbers):
        fix = "start again with a lower learning rate, or --dtype float32"
        raise InputError(f"{name}: loss or gradient of update {update} is not finite: {fix}")


class Recorder(ProgressBar):
    """The progress bar, a row per update in metrics.jsonl under PPO's names, and tests on held-out prompts.

    Args:
        logger: the logger of the run.
        translate: makes a row from TRL's log; its `tokens` are those generated in this update.
        held_out: returns scores; called every `every` updates and after the last one, outside an update's seconds.
        response_length: mean tokens of a response, if the rows lack it.
        options: those of `ProgressBar`.
    """

    def __init__(
        self,
        logger: RunLogger,
        translate: Callable[[dict], dict],
        held_out: Callable | None = None,
        every: int = 0,
        response_length: float = 0.0,
        **options,
    ):
        super().__init__(logger.name, **options)
        self.logger, self.translate, self.held_out, self.every, self.start = logger, translate, held_out, every, 0.0
        self.response_length = response_length

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" not in logs:
            return
        seconds, history, update = time.perf_counter() - self.start, self.logger.history, state.global_step
        row = {"update": update} | self.translate(logs)
        # All tokens so far, also those before a resume.
        row["generated_tokens"] = row["tokens"] + (history[-1]["generated_tokens"] if history else 0)
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        self.logger.log_update(row)
        self.bar.set_postfix({k: number(row[k]) for k in SHOWN if k in row}, refresh=False)
        if update == 1:  # before any step
            distance = max((abs(row[name]) for name in DISTANCES if name in row), default=0.0)
            check_start(distance, row.get("response_length", self.response_length))
        self._check_moved(model, row.get("policy_grad_norm", 0.0))
        check_finite(self.name, update, row.get("policy_loss", 0.0), row.get("policy_grad_norm", 0.0))
        if self.held_out and (update % self.every == 0 or update == state.max_steps):
            self.logger.log_held_out(update, self.held_out())

    def positions(self) -> dict[str, int]:
        return self.logger.run.position()

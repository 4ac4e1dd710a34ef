"""The loop around PPO's updates: the order of prompts, records, held-out tests, checkpoints, and when a run stops.

It knows nothing of the method: it is handed the update, and what it calls between two of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.macro import MacroActions
from marlhf_lite.training.best_update import BestUpdate
from marlhf_lite.training.logging import SAMPLES, RunLogger
from marlhf_lite.training.metrics import Clock
from marlhf_lite.training.rollout import Rollout, prompt_batches
from marlhf_lite.training.run_state import RunState
from marlhf_lite.utils.errors import InputError, ServerError
from marlhf_lite.utils.random_states import random_states, set_random_states

SHOWN = ("score_mean", "gold_mean", "kl_k3")  # metrics in the progress bar

Update = Callable[[list[str]], dict[str, float]]  # prompts -> metrics


class Callback:
    """What is told of every update: give a trainer objects of your subclass as `callbacks=`."""

    def after_update(self, trainer: Any, row: dict[str, float], rollout: Rollout) -> None:
        """Called when an update is done and recorded.

        `trainer` is the `PPOTrainer`, `row` are the update's metrics, and `rollout` its scored responses,
        sorted by length. With several processes each one calls its own callback, with the metrics of all processes and
        its own responses.
        """


@dataclass(kw_only=True)
class TrainingLoop:
    """Makes the updates of a run, one after another."""

    config: PPOTrainerConfig
    prompts: Sequence[str]
    state: RunState  # how far the run is; the update counts itself there
    total_updates: int
    logger: RunLogger
    accelerator: Accelerator
    best: BestUpdate  # compares held-out tests
    save_checkpoint: Callable[[], None] | None  # of the present state; None without a folder
    test_held_out: Callable[[], dict[str, float]] | None  # numbers of held-out prompts, by name

    def run(self, update: Update, asked_to_stop: Callable[[], bool]) -> bool:
        """Call `update` on batch after batch, until all are done or there is a reason to stop.

        Returns whether the run has come to its end: if it was only asked to stop, it has not.
        """
        self.logger.log_number_of_updates(self.total_updates)
        batches = self._batches_to_come()
        history = self.logger.history
        # A run that is resumed may have ended before its last update, by `--kl_ceiling` or `--patience`.
        has_ended = bool(history) and self._has_reason_to_end(history[-1])
        is_asked_to_stop = False
        with self._progress_bar() as bar:
            while not (has_ended or is_asked_to_stop or self._has_all_updates()):
                row = self._update_or_save_and_raise(update, next(batches))
                # `z` writes a number that is rounded to -0.00 as 0.00.
                bar.set_postfix({name: f"{row[name]:z.2f}" for name in SHOWN if name in row})
                bar.update()

                has_ended = self._is_beyond_kl_ceiling(row)
                is_new_best = False
                # `is_due` knows the last update; a run that ends before it is tested, too.
                is_test_due = self.is_due(self.config.eval_every, last=has_ended)
                if self.test_held_out is not None and is_test_due:
                    scores = self.test_held_out()
                    self.logger.log_held_out(self.state.updates_done, scores)
                    is_new_best = self.best.remember_if_best(scores)
                    has_ended = self._is_out_of_patience() or has_ended
                is_asked_to_stop = asked_to_stop()

                is_last = has_ended or is_asked_to_stop
                # A run that is asked to stop writes a checkpoint, but is not tested: it will continue.
                is_checkpoint_due = self.is_due(self.config.checkpoint_every, last=is_last)
                if self.save_checkpoint is not None and (is_checkpoint_due or is_new_best):
                    self.save_checkpoint()
        return has_ended or self._has_all_updates()

    def record(
        self, row: dict[str, float], clock: Clock, rollout: Rollout, macro_actions: MacroActions
    ) -> dict[str, float]:
        """Log an update's metrics and some of its responses; return the metrics, with counts and times."""
        update = self.state.updates_done
        self.state.generated_tokens += int(row["tokens"])
        seconds = clock.total()
        row = {"update": update, **row}
        row["generated_tokens"] = self.state.generated_tokens
        row["tokens_per_second"] = row["tokens"] / seconds
        row["seconds"] = seconds
        for phase, spent in clock.seconds.items():
            row[f"seconds_{phase}"] = spent
        self.logger.log_update(row)

        # About `SAMPLES` responses at equal distances: they are sorted by length, so short and long ones are shown.
        distance = max(len(rollout) // SAMPLES, 1)
        shown = slice(None, None, distance)
        self.logger.log_samples(update, rollout.select(shown), macro_actions.select(shown))
        return row

    def is_due(self, every: int, *, last: bool = False) -> bool:
        """Whether work is due that is done every `every` updates (0: never), and after the last one."""
        done = self.state.updates_done
        is_last = last or done == self.total_updates
        return every > 0 and (done % every == 0 or is_last)

    def _has_all_updates(self) -> bool:
        return self.state.updates_done >= self.total_updates

    def _batches_to_come(self) -> Iterator[list[str]]:
        # Batches follow from the seed, so the number of updates is the position in the data.
        batches = prompt_batches(self.prompts, self.config, self.accelerator, self.config.seed)
        return islice(batches, self.state.updates_done, None)

    def _progress_bar(self) -> tqdm:
        return tqdm(
            total=self.total_updates,
            initial=self.state.updates_done,
            desc=self.logger.name,
            disable=not self.accelerator.is_local_main_process,
        )

    def _update_or_save_and_raise(self, update: Update, prompts: list[str]) -> dict[str, float]:
        """Make an update and return its metrics. Raises `InputError` if a server or environment fails.

        Because either may work again later, a checkpoint is written first, from which the run can continue.
        """
        states = random_states()
        try:
            return update(prompts)
        except ServerError as error:
            message = f"update {self.state.updates_done + 1}: {error}"
            if self.save_checkpoint is not None:  # there is a folder for checkpoints
                # A resumed run makes this update again from its beginning, so the checkpoint must hold the random
                # states from before it.
                set_random_states(states)
                self.save_checkpoint()
                message += "; --resume continues from here"
            raise InputError(message) from error

    def _has_reason_to_end(self, last_row: dict[str, float]) -> bool:
        """Whether a run ends after this update though there are more to make, and says so."""
        return self._is_beyond_kl_ceiling(last_row) or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        """Whether so many tests found nothing better that the run ends (`--patience`); a line says so."""
        if not self.best.is_out_of_patience():
            return False
        reason = f"no better {self.best.score_name} in {self.state.tests_without_better} tests"
        self.logger.write_line(
            f"{self.logger.name}: stopped at update {self.state.updates_done}: {reason}"
        )
        return True

    def _is_beyond_kl_ceiling(self, row: dict[str, float]) -> bool:
        """Whether the policy is so far from the reference that the run ends (`--kl_ceiling`); a line says so.

        An update with skipped steps is not counted: its numbers are not finite.
        """
        ceiling = self.config.kl_ceiling  # 0: none
        if not ceiling or row["skipped_steps"] or row["kl_k1"] <= ceiling:
            return False
        reason = f"KL {row['kl_k1']:.1f} is beyond --kl_ceiling {ceiling:g}"
        self.logger.write_line(f"{self.logger.name}: stopped at update {row['update']}: {reason}")
        return True

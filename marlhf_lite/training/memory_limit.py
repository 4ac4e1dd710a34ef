"""Passes that fit into memory: fewer rows at a time, and activations that are recomputed instead of kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from marlhf_lite.models.actor_critic import PPOModels, checkpoint_activations
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.training.run_state import RunState
from marlhf_lite.utils.less_memory import with_less_memory

Result = TypeVar("Result")
FEW_ROWS = 4  # in a pass; recomputation costs more than what a GPU gains by passes of more rows


@dataclass(kw_only=True)
class MemoryLimit:
    """Keeps the passes of a run within memory, and its `state` up to date with what that took."""

    state: RunState
    models: PPOModels  # policy and critic recompute activations if it must be
    optimizer: torch.optim.Optimizer  # gradients are dropped when a pass is tried again
    accelerator: Accelerator
    logger: RunLogger
    rows_per_step: int  # of an optimizer step in this process: the largest useful micro-batch
    is_sharded: bool  # whether FSDP2 shards the models

    def run(self, work: Callable[[], Result], *, no_process_waits: bool = False) -> Result:
        """Return `work()`, done again with half the micro-batch each time that memory ends.

        `work` reads the size of the micro-batch from the state, and its result must not depend on it. Give
        `no_process_waits=True` if no other process waits for this one in the middle of the work, so that this one can
        begin it again by itself; a run of one process always can. Raises `InputError` if one row does not fit, or if
        memory ends while others wait.
        """

        def attempt(size: int) -> Result:
            self.state.micro_batch.now = size
            return work()

        return self._with_fewer_rows_when_memory_ends(
            attempt,
            rows=self.state.micro_batch.now,
            can_begin_again=no_process_waits or self.accelerator.num_processes == 1,
        )

    def fit_micro_batch(self, dry_run: Callable[[], None]) -> int:
        """Set the micro-batch to the largest for which `dry_run()` fits, and return it.

        Dry runs answer two questions, or one of them: how many rows (`--micro_batch_size 0`), and whether activations
        are recomputed (`--gradient_checkpointing auto`). With `auto` they are if too few rows fit without that: fewer
        than the options ask for, or fewer than `FEW_ROWS` if they leave the number open. Under FSDP2, processes wait
        for each other in each layer, so none can try again by itself: there `auto` always recomputes.
        """
        # 1. How many rows to try first (`most_rows`), and below how many it is better to recompute (`enough_rows`).
        asked_rows = self.state.micro_batch.now
        if asked_rows:
            most_rows = asked_rows
            enough_rows = min(asked_rows, self.rows_per_step)
        else:  # the options leave the number open
            most_rows = self.rows_per_step
            enough_rows = min(FEW_ROWS, self.rows_per_step)
        began_undecided = self.state.gradient_checkpointing == "auto"

        def attempt(size: int) -> None:
            self.state.micro_batch.now = size
            is_undecided = (
                self.state.gradient_checkpointing == "auto"
            )  # until an attempt recomputes
            if is_undecided and (size < enough_rows or self.is_sharded):
                self.recompute_activations()
            dry_run()

        # 2. Fewer and fewer rows, until a dry run fits.

        # Nobody waits in the middle of a dry run if there is one process, or if each has whole models. Otherwise memory
        # that ends is an error.
        can_begin_again = self.accelerator.num_processes == 1 or not self.is_sharded
        self._with_fewer_rows_when_memory_ends(
            attempt, rows=most_rows, can_begin_again=can_begin_again
        )
        if began_undecided and self._some_process_recomputes():
            # If one process must recompute, all do. With that, more rows may fit than those found above, so try again
            # from the most.
            self.recompute_activations()
            self._with_fewer_rows_when_memory_ends(
                attempt, rows=most_rows, can_begin_again=can_begin_again
            )

        # 3. What was found. Memory may differ between processes, so the smallest number counts.
        recomputes = self.state.gradient_checkpointing is True
        self.state.gradient_checkpointing = recomputes
        size = min(gather_object([self.state.micro_batch.now]))
        self.state.micro_batch.now = size
        line = (
            f"micro_batch_size {size}: the most that fits of {most_rows} of the longest responses"
        )
        if began_undecided:
            line += f" (gradient_checkpointing {recomputes})"
        self.logger.write_line(line)
        return size

    def recompute_activations(self) -> None:
        """From now on policy and critic recompute activations in the backward pass."""
        self.state.gradient_checkpointing = True
        for role in (self.models.policy, self.models.critic):
            checkpoint_activations(role.model)

    def _some_process_recomputes(self) -> bool:
        return any(gather_object([self.state.gradient_checkpointing is True]))

    def _with_fewer_rows_when_memory_ends(
        self, attempt: Callable[[int], Result], *, rows: int, can_begin_again: bool
    ) -> Result:
        """Return `attempt(rows)`; each time that memory ends, drop the gradients and try half as many rows."""
        result, _ = with_less_memory(
            attempt,
            rows,
            "--micro_batch_size {}",
            no_process_waits=can_begin_again,
            start_over=self.optimizer.zero_grad,
        )
        return result


def longest_rollout(
    rows: int, prompt_tokens: int, response_tokens: int, token: int, device: torch.device | str
) -> Rollout:
    """A scored rollout of `rows` responses that fill every column: what needs most memory."""
    tokens = torch.full((rows, prompt_tokens + response_tokens), token, device=device)
    mask = torch.ones(rows, response_tokens, dtype=torch.bool, device=device)
    texts = [""] * rows
    return Rollout(
        prompts=texts,
        responses=texts,
        tokens=tokens,
        attention_mask=torch.ones_like(tokens),
        mask=mask,
        ended=mask[:, 0],  # [rows] True: each response ends
        ref_logprobs=torch.zeros(rows, response_tokens, device=device),
        scores=torch.zeros(rows, device=device),
    )

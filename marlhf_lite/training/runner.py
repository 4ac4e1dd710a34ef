"""The run around PPO's updates: the loop, memory that runs out, checkpoints, held-out tests, records and safeguards.

`Runner` is the base of `PPOTrainer` and calls the trainer's `update(prompts)`, which holds the method.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from marlhf_lite import macro
from marlhf_lite.config.method import PPOTrainerConfig
from marlhf_lite.models.actor_critic import PPOModels, checkpoint_activations
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training import safeguards, sampler_checks
from marlhf_lite.training.checkpoint import Checkpoints, save_models
from marlhf_lite.training.distributed import is_sharded
from marlhf_lite.training.logging import SAMPLES, RunLogger
from marlhf_lite.training.metrics import Clock
from marlhf_lite.training.rollout import Rollout, longest_response, prompt_batches
from marlhf_lite.utils.errors import InputError, ServerError
from marlhf_lite.utils.less_memory import keep_freed_memory, with_less_memory
from marlhf_lite.utils.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from marlhf_lite.utils.run_folder import RunFolder

FEW_ROWS = 4  # in a pass; recomputation costs more than what a GPU gains by passes of more rows
BATCH_SIZES = ("micro_batch_size", "generation_batch_size")  # halved if memory ends


class Runner:
    """Runs the updates of a trainer; see `PPOTrainer` for the arguments.

    `micro_batch_size` responses go through the models together, `generation_batch_size` are sampled together (0: all).
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        prompts: Sequence[str],
        *,
        run: "RunFolder | None",
        held_out: Callable[[PPOModels], dict[str, float]] | None,
        name: str,
        accelerator: Accelerator | None,
    ):
        self.accelerator = accelerator or Accelerator()
        self.config, self.seed, self.name = config, config.seed, name
        self.prompts, self.held_out = list(prompts), held_out
        self.total_updates = safeguards.count_updates(config, len(prompts), self.accelerator)
        self.updates_done = 0
        self.generated_tokens = 0
        self.nonfinite_in_row = 0  # consecutive skipped updates
        for size in BATCH_SIZES:
            setattr(self, size, getattr(config, size))
            setattr(self, f"asked_{size}", getattr(config, size))
        self.logger = RunLogger(run, name, self.accelerator)
        self.checkpoints = (
            Checkpoints(run, config.save_total_limit, self.accelerator) if run else None
        )

    @property
    def history(self) -> list[dict]:
        """The metrics of each update so far."""
        return self.logger.history

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(
        self, resume: bool = False, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> list[dict]:
        """Make all updates; return the metrics of each, which are also in the run's metrics.jsonl.

        With `resume` the run continues from its last checkpoint, bit by bit as if it had not been stopped. It stops
        early if the KL passes `config.kl_ceiling`, and with a checkpoint after the update in which `asked_to_stop()`
        becomes true.
        """
        keep_freed_memory()
        # no process of another seed
        torch.manual_seed(self.seed + 100_003 * self.accelerator.process_index)
        if resume:
            self._resume()
        if not self.micro_batch_size or self.gradient_checkpointing == "auto":
            self.fit_micro_batch_size()
        # Batches follow from the seed, so the number of updates is the position in the data.
        stream = prompt_batches(self.prompts, self.config, self.accelerator, self.seed)
        batches = islice(stream, self.updates_done, None)
        stop = bool(self.history) and self._is_beyond_kl_ceiling(self.history[-1])
        hidden = not self.accelerator.is_local_main_process
        with tqdm(
            total=self.total_updates, initial=self.updates_done, desc=self.name, disable=hidden
        ) as bar:
            while not stop and self.updates_done < self.total_updates:
                row = self._update_or_save(next(batches))
                bar.set_postfix(
                    {k: f"{row[k]:z.2f}" for k in ("score_mean", "gold_mean", "kl_k3") if k in row}
                )
                bar.update()
                stop = self._is_beyond_kl_ceiling(row)
                if self.held_out and self._is_due(self.config.eval_every, last=stop):
                    self.logger.log_held_out(self.updates_done, self.held_out(self.models))
                stop = asked_to_stop() or stop
                if self.checkpoints and self._is_due(self.config.checkpoint_every, last=stop):
                    self.checkpoints.save(self.actor_critic, self.optimizer, self.counters)
        return self.history

    def _update_or_save(self, prompts: list[str]) -> dict[str, float]:
        """An update; if a server or environment fails, a checkpoint is written from which the run continues."""
        states = random_states()
        try:
            return self.update(prompts)
        except ServerError as error:
            saved = ""
            if self.checkpoints:
                set_random_states(states)
                self.checkpoints.save(self.actor_critic, self.optimizer, self.counters)
                saved = "; --resume continues from here"
            raise InputError(f"update {self.updates_done + 1}: {error}{saved}") from error

    def _is_due(self, every: int, last: bool) -> bool:
        """Whether work that is done every `every` updates, and after the last one, is due."""
        return bool(every) and (
            self.updates_done % every == 0 or last or self.updates_done == self.total_updates
        )

    def _is_beyond_kl_ceiling(self, row: dict[str, float]) -> bool:
        ceiling = self.config.kl_ceiling
        if not ceiling or row["skipped_steps"] or row["kl_k1"] <= ceiling:
            return False
        kl = f"KL {row['kl_k1']:.1f} is beyond --kl_ceiling {ceiling:g}"
        self.logger.write_line(f"{self.name}: stopped at update {row['update']}: {kl}")
        return True

    def record(
        self, row: dict, clock: Clock, rollout: Rollout, macro_actions: macro.MacroActions
    ) -> dict[str, float]:
        """Log an update's metrics and some of its responses; return the metrics, with counts and times."""
        self.generated_tokens += row["tokens"]
        row = {"update": self.updates_done} | row | {"generated_tokens": self.generated_tokens}
        seconds = clock.total()
        row |= {"tokens_per_second": row["tokens"] / seconds, "seconds": seconds}
        row |= {f"seconds_{phase}": spent for phase, spent in clock.seconds.items()}
        self.logger.log_update(row)
        # sorted by length: short and long ones
        shown = slice(None, None, max(len(rollout) // SAMPLES, 1))
        self.logger.log_samples(
            self.updates_done, rollout.select(shown), macro_actions.select(shown)
        )
        if self.updates_done == 1 or self._is_due(self.config.checkpoint_every, last=False):
            self.with_less_memory(sampler_checks.check_forms, self, rollout, alone=True)
        return row

    # -- safeguards ---------------------------------------------------------------------------------------------------

    def weights_at_start(self) -> dict | None:
        """Copies of some weights before the first update of the critic, and of the policy; None before any other."""
        is_first = self.updates_done in (0, self.config.critic_warmup)
        return safeguards.some_weights(self.parameters) if is_first else None

    def finish_update(self, row: dict[str, float], at_start: dict | None) -> None:
        """Count the update, and end a run that does not work; `at_start` are `weights_at_start` of this update."""
        skipped = bool(row["skipped_steps"]) and self.accelerator.scaler is None
        if at_start and not row["skipped_steps"]:
            critic_alone = self.updates_done < self.config.critic_warmup
            # If all scores are 0, a head of zero is right, and nothing is to be learned.
            moving = {
                "policy": row["advantage_rms"] and not critic_alone,
                "critic": row["value_loss"],
            }
            rates = {role: f"--{role}_learning_rate" for role, moves in moving.items() if moves}
            fix = "; with a custom --objective, build its loss on `outputs` (`old` has no gradient)"
            safeguards.check_moved(at_start, self.parameters, rates, fix)
        if self.updates_done == 0 and not skipped:
            safeguards.check_start(row["kl_k3"], row["response_length"])
        self.updates_done += 1
        self.nonfinite_in_row = self.nonfinite_in_row + 1 if skipped else 0
        safeguards.check_nonfinite(self.nonfinite_in_row, row)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        """What changes while training, other than weights, optimizer and random generators."""
        sizes = [f"{asked}{name}" for asked in ("", "asked_") for name in BATCH_SIZES]
        names = (
            "updates_done",
            "generated_tokens",
            "nonfinite_in_row",
            "gradient_checkpointing",
            *sizes,
        )
        return {name: getattr(self, name) for name in names}

    def _resume(self) -> None:
        if self.checkpoints is None:
            raise InputError(
                "resume: a trainer without a run folder has no checkpoints: give it one"
            )
        for name, value in self.checkpoints.load(self.actor_critic, self.optimizer).items():
            setattr(self, name, value)
        if self.gradient_checkpointing is True:
            self._recompute_activations()
        for name in BATCH_SIZES:
            asked = getattr(self.config, name)
            if getattr(self, f"asked_{name}") != asked:  # else the size in force stays
                setattr(self, name, asked)
                setattr(self, f"asked_{name}", asked)
        self.logger.reload(self.updates_done)

    def save(self, folder: Path) -> None:
        """Save policy and critic as adapter folders (or full models), with the tokenizer."""
        save_models(Path(folder), self.models, self.actor_critic, self.tokenizer, self.accelerator)

    # -- memory -------------------------------------------------------------------------------------------------------

    def with_less_memory(self, work: Callable, *args, alone: bool = False):
        """Call `work(*args)`, again with half the micro-batch each time memory runs out; gradients stay the same.

        `alone`: no other process waits for this one in the middle of it.
        """

        def attempt(size: int):
            self.micro_batch_size = size
            return work(*args)

        alone = alone or self.accelerator.num_processes == 1
        return self._shrink(attempt, self.micro_batch_size, alone=alone)

    def fit_micro_batch_size(self) -> int:
        """Set `micro_batch_size` to the largest that fits (`--micro_batch_size 0`), found by dry runs; returns it.

        They decide `--gradient_checkpointing auto`, too: activations are recomputed if fewer rows than asked for, or
        fewer than `FEW_ROWS` of any number, fit without it. Nobody can try again under FSDP2, which recomputes.
        """
        processes, sharded = self.accelerator.num_processes, is_sharded(self.actor_critic)
        share = max(self.config.batch_size // self.config.num_mini_batches // processes, 1)
        most, least = self.micro_batch_size or share, min(self.micro_batch_size or FEW_ROWS, share)

        def attempt(size: int) -> None:
            self.micro_batch_size = size
            if self.gradient_checkpointing == "auto" and (size < least or sharded):
                self._recompute_activations()
            self._dry_run(share)

        undecided, alone = self.gradient_checkpointing == "auto", processes == 1 or not sharded
        self._shrink(attempt, most, alone=alone)
        if undecided and any(gather_object([self.gradient_checkpointing is True])):
            self._recompute_activations()
            self._shrink(attempt, most, alone=alone)  # more rows fit now
        self.gradient_checkpointing = self.gradient_checkpointing is True
        self.micro_batch_size = size = min(gather_object([self.micro_batch_size]))
        how = f" (gradient_checkpointing {self.gradient_checkpointing})" if undecided else ""
        self.logger.write_line(
            f"micro_batch_size {size}: the most that fits of {most} of the longest responses{how}"
        )
        return size

    def _recompute_activations(self) -> None:
        self.gradient_checkpointing = True
        for role in (self.models.policy, self.models.critic):
            checkpoint_activations(role.model)

    def _shrink(self, attempt: Callable, size: int, alone: bool):
        start_over = self.optimizer.zero_grad
        return with_less_memory(
            attempt, size, "--micro_batch_size {}", alone=alone, start_over=start_over
        )[0]

    def _dry_run(self, share: int) -> None:
        """Two micro-batches of the longest possible responses, the second on top of the first one's gradients.

        Beside them is what the optimizer will hold: Adam's two moments of each weight.
        """
        moments = [torch.empty_like(p) for p in [*chain(*self.parameters.values())] * 2]
        rollout = longest_rollout(
            rows=min(2 * self.micro_batch_size, share),
            prompt_tokens=max(map(len, encode_prompts(self.tokenizer, self.prompts))),
            response_tokens=longest_response(
                self.sampler, self.tokenizer, self.sampling.max_new_tokens
            ),
            token=self.tokenizer.eos_token_id,
            device=self.accelerator.device,
        )
        # the most that segmentation can need
        batch = self.objective.batch(rollout, macro.FixedNGram(1)(rollout.mask))
        # Processes may differ in how often they try; not under FSDP2, whose gradients `zero_grad` finds only as sums.
        no_sync = (
            nullcontext()
            if is_sharded(self.actor_critic)
            else self.accelerator.no_sync(self.actor_critic)
        )
        with no_sync:
            self.forward_backward(batch, self.objective.counts(batch))
        del moments
        self.optimizer.zero_grad(set_to_none=True)


def longest_rollout(
    rows: int, prompt_tokens: int, response_tokens: int, token: int, device
) -> Rollout:
    """A scored rollout of `rows` responses that fill every column: what needs most memory."""
    tokens = torch.full((rows, prompt_tokens + response_tokens), token, device=device)
    mask = torch.ones(rows, response_tokens, dtype=torch.bool, device=device)
    logprobs, scores = (
        torch.zeros(rows, response_tokens, device=device),
        torch.zeros(rows, device=device),
    )
    texts, scored = [""] * rows, {"ref_logprobs": logprobs, "scores": scores}
    return Rollout(texts, texts, tokens, torch.ones_like(tokens), mask, ended=mask[:, 0], **scored)

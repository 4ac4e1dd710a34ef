"""Safeguards of a PPO run: batches that cannot be divided, a wrong start, numbers that are not finite."""

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from marlhf_lite.config.method import PPOConfig, PPOTrainerConfig
from marlhf_lite.training.distributed import local_tensor
from marlhf_lite.training.run_state import RunState
from marlhf_lite.utils.errors import InputError

NONFINITE_IN_ROW = 3  # skipped updates in a row at which a run gives up
# nats per token: beyond this at the first update, the policy did not start from the reference
START_KL = 0.05


Weights = dict[str, list[Tensor]]  # by role


@dataclass(kw_only=True)
class Safeguards:
    """Watches the updates of PPO, and ends a run that does not work."""

    config: PPOTrainerConfig
    parameters: dict[str, list[nn.Parameter]]  # those that train, by role
    state: RunState  # how far the run is; skipped updates are counted there
    accelerator: Accelerator  # a scaler, as float16 needs it, leaves out steps by itself

    def weights_before_update(self) -> Weights | None:
        """Some weights, if the next update is the first of the critic or of the policy; otherwise None."""
        # The critic learns from the first update on, the policy after those of `--critic_warmup`.
        is_first = self.state.updates_done in (0, self.config.critic_warmup)
        return some_weights(self.parameters) if is_first else None

    def check_update(self, row: dict[str, float], weights_before: Weights | None) -> None:
        """Raise `InputError` if an update with these metrics shows that the run does not work.

        `weights_before` are those of `weights_before_update`: None if this update is not a first one.
        """
        if weights_before and not row["skipped_steps"]:
            self._check_first_step_moved_weights(row, weights_before)

        # A scaler, as float16 has it, leaves out steps by design until it has found its scale: these do not count.
        is_skipped = row["skipped_steps"] > 0 and self.accelerator.scaler is None
        is_first_update = self.state.updates_done == 0
        if is_first_update and not is_skipped:
            check_start(row["kl_k3"], row["response_length"])
        if is_skipped:
            self.state.nonfinite_in_row += 1
        else:
            self.state.nonfinite_in_row = 0
        check_nonfinite(self.state.nonfinite_in_row, row)

    def _check_first_step_moved_weights(
        self, row: dict[str, float], weights_before: Weights
    ) -> None:
        """Raise `InputError` if a model that had something to learn in this update has the weights of before.

        A model without a loss rightly stays as it is. For example, if all scores are 0, a critic whose head is 0
        predicts them without error, and all advantages are 0. So the policy must move only if advantages are not 0 and
        it does not wait for its critic (`--critic_warmup`), and the critic only if its loss is not 0.
        """
        option_of_role_that_must_move = {}
        critic_learns_alone = self.state.updates_done < self.config.critic_warmup
        if row["advantage_rms"] and not critic_learns_alone:
            option_of_role_that_must_move["policy"] = "--policy_learning_rate"
        if row["value_loss"]:
            option_of_role_that_must_move["critic"] = "--critic_learning_rate"
        fix = "; with a custom --objective, build its loss on `outputs` (`old` has no gradient)"
        check_moved(weights_before, self.parameters, option_of_role_that_must_move, fix)


def count_updates(config: PPOConfig, prompts: int, accelerator: Accelerator) -> int:
    """Return the number of updates of a run on this many prompts.

    Raises `InputError` if there are no prompts, if the batch cannot be divided into answers to whole prompts, processes
    and minibatches, or if the policy would learn in no update.
    """
    processes = accelerator.num_processes
    if not prompts:
        raise InputError(
            "prompts: there are none to answer: give more data, or a larger --max_prompt_length"
        )
    divisor = config.rollouts * processes
    if config.batch_size % divisor:
        what = f"--rollouts {config.rollouts}"
        if processes > 1:
            what += f" times {processes} processes"
        raise InputError(
            f"--batch_size {config.batch_size}: not a multiple of {what}: give a multiple of {divisor}"
        )
    if config.num_mini_batches * processes > config.batch_size:
        most = config.batch_size // processes
        what = f"--num_mini_batches {config.num_mini_batches}"
        raise InputError(f"{what}: more than a process's responses: give at most {most}")
    updates = config.updates
    if config.prompt_epochs:
        updates = updates_of_passes(
            config.prompt_epochs, prompts, config.batch_size // config.rollouts
        )
    if config.critic_warmup >= updates:
        fix = "the policy would learn nothing: give fewer, or more --updates"
        raise InputError(f"--critic_warmup {config.critic_warmup}: in {updates} updates {fix}")
    return updates


def updates_of_passes(passes: float, prompts: int, each: int) -> int:
    """Return how many updates of `each` prompts make this many passes; the last one may begin the next pass."""
    # Floats are not exact: 1.1 * 10 is a little more than 11, and must not be rounded up to 12.
    return math.ceil(round(passes * prompts / each, 6))


def check_start(nats: float, response_length: float) -> None:
    """Raise `InputError` if the first update shows that policy and reference did not start equal.

    `nats` is the mean KL or log-ratio of a response to the reference; `response_length` is in tokens.
    """
    per_token = abs(nats) / max(response_length, 1.0)
    if per_token > START_KL:
        what = f"policy and reference are {per_token:.3f} nats a token apart before any step"
        raise InputError(
            f"{what}: the policy does not start from the reference: give both the same SFT folder"
        )


def some_weights(parameters: dict[str, list[nn.Parameter]]) -> dict[str, list[Tensor]]:
    """By role, copies of a part of each weight, to see later whether it has moved.

    To save memory they hold only the first 1,000 numbers of what this process has of a weight.
    """
    copies = {}
    for role, weights in parameters.items():
        parts_of_process = [local_tensor(weight.detach()) for weight in weights]
        copies[role] = [part.flatten()[:1000].clone() for part in parts_of_process]
    return copies


def check_moved(
    before: Weights,
    parameters: dict[str, list[nn.Parameter]],
    option_of_learning_rate: dict[str, str],
    fix: str = "",
) -> None:
    """Raise `InputError` if the first step moved no weight of a model, in any process.

    `before` are `some_weights` of these parameters before the step. Only the roles in `option_of_learning_rate` must
    move; the message names the option of that role, and ends with `fix`. A bfloat16 weight stays if its step is smaller
    than its rounding.
    """
    after = some_weights({role: parameters[role] for role in option_of_learning_rate})
    has_moved = {}  # in this process, by role
    for role, weights in after.items():
        are_equal = [torch.equal(old, new) for old, new in zip(before[role], weights, strict=True)]
        has_moved[role] = not all(are_equal)
    # Under FSDP2 a process has a part of each weight, and the part of another one may have moved.
    has_moved_of_all = gather_object([has_moved])
    for role, option in option_of_learning_rate.items():
        if not any(of_process[role] for of_process in has_moved_of_all):
            why = "its learning rate or gradient is 0, or its step is smaller than the weights' rounding"
            raise InputError(
                f"the first step moved no weight of the {role}: {why}: give a higher {option}{fix}"
            )


def check_nonfinite(in_row: int, row: dict[str, float]) -> None:
    """Raise `InputError` if too many updates in a row were skipped; `row` are the metrics of the last one."""
    if in_row >= NONFINITE_IN_ROW:
        names = ", ".join(name for name, x in row.items() if not math.isfinite(x))
        fix = "start again with lower learning rates, a smaller --max_grad_norm, or --dtype float32"
        raise InputError(
            f"{in_row} updates in a row were not finite and were left out ({names}): {fix}"
        )

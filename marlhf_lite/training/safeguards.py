"""Safeguards of a PPO run: batches that cannot be divided, little memory, a wrong start, non-finite numbers."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from tqdm.auto import tqdm

from marlhf_lite.config.options import PPOConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.distributed import local_tensor, sum_over_processes
from marlhf_lite.training.rollout import longest_rollout
from marlhf_lite.utils.errors import InputError

START_KL = 0.05  # nats per token: beyond this at the first update, the policy did not start from the reference


def count_updates(config: PPOConfig, prompts: int, accelerator: Accelerator) -> int:
    """The number of updates of a run on so many prompts. Raises `InputError` where a batch cannot be divided."""
    processes = accelerator.num_processes
    if accelerator.distributed_type == "DEEPSPEED":  # its engine steps by itself: nothing could be clipped or left out
        raise InputError("PPO does not run under DeepSpeed: use FSDP2, which shards as ZeRO-3 does, or DDP for LoRA")
    if not prompts:
        raise InputError("prompts: there are none to answer: give more data, or a larger --max_prompt_length")
    divisor = config.rollouts * processes
    if config.batch_size % divisor:
        what = f"--rollouts {config.rollouts}" + (f" times {processes} processes" if processes > 1 else "")
        raise InputError(f"--batch_size {config.batch_size}: not a multiple of {what}: give a multiple of {divisor}")
    if config.num_mini_batches * processes > config.batch_size:
        most = config.batch_size // processes
        raise InputError(
            f"--num_mini_batches {config.num_mini_batches}: more than a process's responses: give at most {most}"
        )
    if not config.prompt_epochs:
        return config.updates
    # An update takes batch_size / rollouts prompts; the last one may begin the next pass.
    rounds = config.prompt_epochs * prompts * config.rollouts / config.batch_size
    return math.ceil(round(rounds, 6))  # 1.1 * 10 is a little more than 11


# -- memory -----------------------------------------------------------------------------------------------------------


def fit_micro_batch_size(trainer) -> int:
    """Set `trainer.micro_batch_size` to the largest that fits, found before training; returns it.

    Two micro-batches of the longest possible responses run forward and backward, the second on top of the first one's
    gradients, from this process's whole share down by halves. No weight changes. The smallest answer of all processes
    counts.
    """
    accelerator, config = trainer.accelerator, trainer.config
    prompt_tokens = max(map(len, encode_prompts(trainer.tokenizer, trainer.prompts)))
    share = max(config.batch_size // config.num_mini_batches // accelerator.num_processes, 1)
    response_tokens, token = trainer.sampling.max_new_tokens, trainer.tokenizer.eos_token_id
    trainer.micro_batch_size = share
    while True:
        rows = min(2 * trainer.micro_batch_size, share)
        rollout = longest_rollout(rows, prompt_tokens, response_tokens, token, accelerator.device)
        # One token a macro action: the most that segmentation can need.
        macro_actions = FixedNGram(1)(rollout.mask)
        normalizers = torch.full((4,), float(rollout.mask.sum()), device=accelerator.device)
        try:
            with accelerator.no_sync(trainer.actor_critic):  # processes may differ in how often they try
                trainer.accumulate_gradients(rollout, macro_actions, None, normalizers)
            break
        except RuntimeError as error:
            reduce_micro_batch_size(trainer, error, alone=True)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.nonfinite = {}
    trainer.micro_batch_size = min(gather_object([trainer.micro_batch_size]))
    size, width = trainer.micro_batch_size, prompt_tokens + response_tokens
    if accelerator.is_main_process:
        tqdm.write(f"micro_batch_size {size}: the most that fits of {share} responses of {width} tokens")
    return size


def reduce_micro_batch_size(trainer, error: RuntimeError, alone: bool = False) -> None:
    """Halve the micro-batch and drop its gradients, where the error says that memory ran out; else raise the error.

    `alone`: no other process waits for this one in the middle of a pass. Otherwise, and where the size is 1 already,
    raises `InputError`.
    """
    if not should_reduce_batch_size(error):
        raise error
    size = trainer.micro_batch_size
    if size == 1 or (trainer.accelerator.num_processes > 1 and not alone):
        fix = "shorten --max_response_length or use a smaller model" if size == 1 else f"give {size // 2}"
        raise InputError(f"out of memory with --micro_batch_size {size}: {fix}") from error
    trainer.optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trainer.micro_batch_size = size // 2
    tqdm.write(f"out of memory: micro_batch_size is {size // 2} from here on; gradients stay the same")


# -- the first update -------------------------------------------------------------------------------------------------


def check_start(row: dict[str, float]) -> None:
    """Raises `InputError` where the first update's KL says that policy and reference did not start alike."""
    per_token = row["kl_k3"] / max(row["response_length"], 1.0)
    if per_token > START_KL:
        raise InputError(
            f"KL to the reference is {per_token:.3f} nats a token before any step: the policy does not start from the "
            "reference: give both the same SFT folder, and --lora_dropout 0"
        )


class MovedCheck:
    """Copies the weights before the first optimizer step, to see after it whether policy and critic were trained."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.before = {role: [p.detach().clone() for p in ps] for role, ps in trainer.parameters.items()}

    def check(self) -> None:
        """Raises `InputError` where no weight of a model moved, unless the critic warms up alone."""
        trainer = self.trainer
        moved = {
            role: float(any(map(_differ, self.before[role], parameters)))
            for role, parameters in trainer.parameters.items()
        }
        for role, count in sum_over_processes(moved, trainer.accelerator).items():
            if not count and not (role == "policy" and trainer.config.critic_warmup):
                raise InputError(
                    f"the first update moved no weight of the {role}: its learning rate or gradient is 0: give a "
                    f"higher --{role}_learning_rate"
                )


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(local_tensor(a), local_tensor(b))


# -- numbers that are not finite --------------------------------------------------------------------------------------


NONFINITE_IN_ROW = 3  # skipped updates in a row at which a run gives up


def check_nonfinite(in_row: int, found: dict[str, float]) -> None:
    """Raises `InputError` where too many updates in a row were left out; `found` counts what was not finite by name."""
    if in_row >= NONFINITE_IN_ROW:
        where = ", ".join(name for name, count in found.items() if count)
        raise InputError(
            f"{in_row} updates in a row were not finite and were left out ({where}): start again with lower learning "
            "rates, a smaller --max_grad_norm, or --dtype float32"
        )

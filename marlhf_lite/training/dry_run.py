"""The micro-batch that fits memory, found before training (`--micro_batch_size 0`)."""

from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from marlhf_lite import macro
from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.distributed import is_sharded
from marlhf_lite.training.rollout import Rollout, longest_response
from marlhf_lite.utils.less_memory import with_less_memory

if TYPE_CHECKING:
    from marlhf_lite.training.ppo import PPOTrainer


def fit_micro_batch_size(trainer: "PPOTrainer") -> int:
    """Set the trainer's `micro_batch_size` to the largest that fits, found by dry runs; returns it."""
    processes = trainer.accelerator.num_processes
    share = max(trainer.config.batch_size // trainer.config.num_mini_batches // processes, 1)

    def attempt(size: int) -> None:
        trainer.micro_batch_size = size
        _dry_run(trainer, share)

    with_less_memory(
        attempt,
        share,
        "--micro_batch_size {}",
        alone=processes == 1 or not is_sharded(trainer.actor_critic),
        start_over=trainer.optimizer.zero_grad,
    )
    trainer.micro_batch_size = size = min(gather_object([trainer.micro_batch_size]))
    trainer.logger.write_line(f"micro_batch_size {size}: the most that fits of {share} of the longest responses")
    return size


def _dry_run(trainer: "PPOTrainer", share: int) -> None:
    """Two micro-batches of the longest possible responses, the second on top of the first one's gradients.

    Beside them lies what the optimizer will hold: Adam's two moments of each weight.
    """
    moments = [torch.empty_like(p) for p in [*chain(*trainer.parameters.values())] * 2]
    rollout = longest_rollout(
        rows=min(2 * trainer.micro_batch_size, share),
        prompt_tokens=max(map(len, encode_prompts(trainer.tokenizer, trainer.prompts))),
        response_tokens=longest_response(trainer.sampler, trainer.tokenizer, trainer.sampling.max_new_tokens),
        token=trainer.tokenizer.eos_token_id,
        device=trainer.accelerator.device,
    )
    batch = trainer.objective.batch(rollout, macro.FixedNGram(1)(rollout.mask))  # the most that segmentation can need
    actors, no_sync = trainer.actor_critic, trainer.accelerator.no_sync
    # Processes may differ in how often they try; not under FSDP2, whose gradients `zero_grad` finds only as sums.
    with nullcontext() if is_sharded(actors) else no_sync(actors):
        trainer.forward_backward(batch, trainer.objective.counts(batch))
    del moments
    trainer.optimizer.zero_grad(set_to_none=True)


def longest_rollout(rows: int, prompt_tokens: int, response_tokens: int, token: int, device) -> Rollout:
    """A scored rollout of `rows` responses that fill every column: what needs most memory."""
    tokens = torch.full((rows, prompt_tokens + response_tokens), token, device=device)
    mask = torch.ones(rows, response_tokens, dtype=torch.bool, device=device)
    logprobs, scores = torch.zeros(rows, response_tokens, device=device), torch.zeros(rows, device=device)
    texts, scored = [""] * rows, {"ref_logprobs": logprobs, "scores": scores}
    return Rollout(texts, texts, tokens, torch.ones_like(tokens), mask, ended=mask[:, 0], **scored)

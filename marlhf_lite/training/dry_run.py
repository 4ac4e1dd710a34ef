"""The largest micro-batch that fits, found before training by a pass over the longest batch that can come."""

from __future__ import annotations

from dataclasses import replace

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from marlhf_lite.macro import FixedNGram
from marlhf_lite.training.learner import Learner
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.training.step import loss_normalizers


def longest_batch(rows: int, prompt_tokens: int, response_tokens: int, token: int, device) -> Rollout:
    """`rows` responses that fill every column: what a rollout holds at its largest."""
    tokens = torch.full((rows, prompt_tokens + response_tokens), token, device=device)
    mask = torch.ones(rows, response_tokens, dtype=torch.bool, device=device)
    zeros = torch.zeros(rows, response_tokens, device=device)
    flat = torch.zeros(rows, device=device)
    texts = [""] * rows
    return Rollout(texts, texts, tokens, torch.ones_like(tokens), mask, mask[:, 0], zeros, flat, flat)


def fit_micro_batch(learner: Learner, share: int, prompt_tokens: int, response_tokens: int, token: int) -> int:
    """Set the learner's micro-batch to the largest that fits, from `share` (this process's responses) by halves.

    Two micro-batches of each size run forward and backward, the second on top of the first's gradients; no weight
    changes. Over several processes the smallest answer counts. Returns it.
    """
    accelerator, size = learner.accelerator, share
    while True:
        learner.ppo = replace(learner.ppo, micro_batch_size=size)
        try:
            rows = min(2 * size, share)
            _pass(learner, longest_batch(rows, prompt_tokens, response_tokens, token, accelerator.device))
            break
        except RuntimeError as error:
            learner.halve(error, alone=True)
            size = learner.ppo.micro_batch_size
    size = min(gather_object([size]))
    learner.ppo = replace(learner.ppo, micro_batch_size=size)
    if accelerator.is_main_process:
        width = prompt_tokens + response_tokens
        tqdm.write(f"micro_batch_size {size}: the most that fits of {share} responses of {width} tokens")
    return size


def _pass(learner: Learner, batch: Rollout) -> None:
    macro = FixedNGram(1)(batch.mask)
    learner.accumulate(batch, macro, None, loss_normalizers(macro, learner.how), sync=False)
    learner.optimizer.zero_grad(set_to_none=True)

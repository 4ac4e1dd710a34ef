"""Where the blame for a failure falls: the share of the negative advantage on the first wrong step.

In `tiny-steps` the first wrong step of a response is known (`tiny_steps.gold.verify`), so an estimator of advantages
can be scored without another model. Shapes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_lite.lab.credit.gradients import Estimator, as_trainer
from marlhf_lite.parsing.spans import TokenText
from marlhf_lite.tasks.tiny_steps.gold import verify
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rollout import Rollout


@dataclass(frozen=True)
class Blame:
    """Shares of each failed response with a wrong step, [N] each.

    `share` is the part of the negative advantage that falls on the first wrong step, 0 where no advantage is negative;
    `tokens` is the step's part of the tokens, which is the share where all tokens have one advantage; `before` is the
    part of the negative advantage on the steps before, which did nothing wrong.
    """

    share: Tensor
    tokens: Tensor
    before: Tensor


def first_wrong_tokens(rollout: Rollout, tokenizer) -> Tensor:
    """Mark the tokens of each response's first wrong step: [B, T] bool, none where nothing is wrong or a step lacks."""
    marks, read = torch.zeros_like(rollout.mask), TokenText(tokenizer)
    for row, (prompt, count) in enumerate(zip(rollout.prompts, rollout.lengths.tolist(), strict=True)):
        text, spans = read(rollout.response_ids[row, :count].tolist())
        fault = verify(prompt, text)
        if fault:
            inside = [start < fault.end and end > fault.start for start, end in spans]
            marks[row, :count] = torch.tensor(inside, device=marks.device)
    return marks


def blame(advantages: Tensor, wrong: Tensor, mask: Tensor, scores: Tensor) -> Blame:
    """Find where the negative advantages of failed responses stand.

    Args:
        advantages: [B, T] of each token; a macro action's advantage belongs to each of its tokens.
        wrong: [B, T] bool, the tokens of the first wrong step (`first_wrong_tokens`).
        mask: [B, T] bool, True on response tokens.
        scores: [B]; a response has failed where it is 0 or less.
    """
    rows = (scores <= 0) & wrong.any(1)
    negative, wrong, mask = (-advantages).clamp(min=0)[rows].double() * mask[rows], wrong[rows], mask[rows]
    total = negative.sum(1)
    first = wrong.int().argmax(1, keepdim=True)
    before = torch.arange(mask.shape[1], device=mask.device) < first
    shares = [(negative * part).sum(1) / total.where(total > 0, 1.0) for part in (wrong, before)]
    return Blame(shares[0], wrong.sum(1) / mask.sum(1), shares[1])


@torch.no_grad()
def blame_by_estimator(trainer: PPOTrainer, rollout: Rollout, estimators: Mapping[str, Estimator]) -> dict[str, Blame]:
    """Find the blame under each estimator, by the trainer's policy and critic, on a scored rollout.

    RLOO, which gives all tokens of a response one advantage, has `Blame.tokens` for its share.
    """
    trainers = {name: as_trainer(trainer, estimator) for name, estimator in estimators.items()}
    advantages: dict[str, list[Tensor]] = {name: [] for name in trainers}
    for rows in torch.arange(len(rollout)).split(trainer.micro_batch_size):
        part = rollout.select(rows)
        outputs = trainer.compute_outputs(part)
        for name, one in trainers.items():
            segments = one.segment(part)
            found = one.compute_advantages(part, segments, outputs).advantages
            advantages[name].append(one.steps(segments).broadcast(found))
    wrong = first_wrong_tokens(rollout, trainer.tokenizer)
    return {name: blame(torch.cat(parts), wrong, rollout.mask, rollout.scores) for name, parts in advantages.items()}

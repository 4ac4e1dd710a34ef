"""Which estimator blames the step that was wrong? A trained policy and its critic, on held-out `tiny-steps` prompts.

    python -m marlhf_lab.credit.first_wrong_step --sft runs/sft --policy runs/ppo

In `tiny-steps` the first wrong step of a response is known (`corpora.tiny_steps.verify`). The policy of a PPO run
answers held-out prompts. For the responses that fail by a wrong step, the table has the share of the negative advantage
that falls on the first wrong step, and on the steps before it, by estimator; all estimators see the same responses and
the values of the run's critic. RLOO's share is the step's share of the tokens. Shapes: B responses, T response tokens.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from marlhf_lab.corpora.tiny_steps import verify
from marlhf_lab.credit.gradients import Estimator, preset_estimator
from marlhf_lite.config.options import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    MacroConfig,
    ModelConfig,
    PPOConfig,
    SeedConfig,
    SFTInputConfig,
    TrainedPolicyConfig,
)
from marlhf_lite.config.parser import parse
from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.experiments.context import start_processes
from marlhf_lite.macro.catalogue import make_rule
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels, ScalarHeadModel
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import load_base, load_policy, load_score_model, load_tokenizer
from marlhf_lite.parsing.spans import TokenText
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import Rollout
from marlhf_lite.utils import tables
from marlhf_lite.utils.errors import InputError

LADDER = {"PPO": "E0", "PPO lam^(1/5)": "E1", "MA-PPO": "E4", "PPO lam=1": "MC"}  # name -> preset of an estimator


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
    advantages, wrong, mask, scores = (x.cpu() for x in (advantages, wrong, mask, scores))
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
    advantages: dict[str, list[Tensor]] = {name: [] for name in estimators}
    for rows in torch.arange(len(rollout)).split(trainer.micro_batch_size):
        part = rollout.select(rows)
        outputs = trainer.compute_outputs(part)
        for name, one in estimators.items():
            batch = one.batch(trainer, part)
            advantages[name].append(batch.steps.broadcast(one.objective.advantages(batch, outputs).advantages))
    wrong = first_wrong_tokens(rollout, trainer.tokenizer)
    return {name: blame(torch.cat(parts), wrong, rollout.mask, rollout.scores) for name, parts in advantages.items()}


# The command


class FirstWrongStepCommand(
    TrainedPolicyConfig,
    MacroConfig,
    PPOConfig,
    CheckpointConfig,
    LoggingConfig,
    EvaluationConfig,
    DataConfig,
    ModelConfig,
    SFTInputConfig,
    SeedConfig,
):
    """Which estimator blames the step that was wrong? A trained policy and its critic, on held-out prompts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the words of a command line; faults are one line on stderr, and status 2."""
    try:
        options = parse("first_wrong_step", sys.argv[1:] if argv is None else argv, FirstWrongStepCommand)
        sft = resolve_adapter_dir("sft", options.sft)
        print(run(options, sft, resolve_adapter_dir("policy", options.policy)).to_string())
    except InputError as error:
        print(f"first_wrong_step: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: FirstWrongStepCommand, sft: Path, policy: Path) -> pd.DataFrame:
    """Sample, and return a row for each estimator: shares with their 95 % intervals over responses."""
    start_processes()
    trainer = make_trainer(options, sft, policy)
    with torch.no_grad():
        rollout = trainer.score(trainer.generate_rollout(trainer.prompts))
    lines = replace(options, **vars(MacroConfig(termination="sentence")))
    estimators = {name: preset_estimator(preset, options, options.seed) for name, preset in LADDER.items()}
    estimators["MA-PPO lines"] = Estimator(lines, make_rule(lines, options.seed))
    blame = blame_by_estimator(trainer, rollout, estimators)
    rows = {"RLOO": {"wrong step": _interval(blame["PPO"].tokens)}}
    for name, one in blame.items():
        rows[name] = {"wrong step": _interval(one.share), "steps before": _interval(one.before)}
    return pd.DataFrame(rows).T.fillna("")


def make_trainer(options: FirstWrongStepCommand, sft: Path, policy: Path) -> PPOTrainer:
    """A trainer of the run's policy and critic, which stand beside each other, on held-out prompts."""
    critic = policy.parent / "critic"
    if not critic.is_dir():
        raise InputError(f"--policy {policy}: no critic beside it: give a run of `marlhf ppo`")
    task = load_task(options.dataset, size=options.size)
    base, tokenizer = load_base(options), load_tokenizer(options.model)
    set_seed(options.seed)
    models = PPOModels(
        policy=PolicyModel(load_policy(base, policy)),
        reference=PolicyModel(load_policy(base, sft, trainable=False)),
        reward=None,
        critic=ScalarHeadModel(load_score_model(base, critic, trainable=True)),
    )
    prompts = list(task.splits["test"]["prompt"])[: options.eval_prompts]
    reward, rule = FunctionReward(task.gold, "gold"), make_rule(MacroConfig(n="1"), 0)
    return PPOTrainer(models, tokenizer, prompts, reward, rule, options)


def _interval(shares: Tensor) -> str:
    return tables.interval(bootstrap_mean(shares.tolist())._asdict(), ".3f")


if __name__ == "__main__":
    raise SystemExit(main())

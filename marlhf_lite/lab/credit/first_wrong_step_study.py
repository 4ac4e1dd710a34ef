"""Which estimator blames the step that was wrong? A trained policy and its critic, on held-out `tiny-steps` prompts.

    python -m marlhf_lite.lab.credit.first_wrong_step_study --sft runs/sft --policy runs/ppo

The policy of a PPO run answers held-out prompts. For the responses that fail by a wrong step, the table has the share
of the negative advantage that falls on the first wrong step, and on the steps before it, by estimator; all estimators
see the same responses and the values of the run's critic. RLOO's share is the step's share of the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor
from transformers import set_seed

from marlhf_lite.config.options import MacroConfig
from marlhf_lite.config.parser import parse
from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.experiments import pipeline
from marlhf_lite.lab.credit.first_wrong_step import blame_by_estimator
from marlhf_lite.lab.credit.gradients import Estimator, preset_estimator
from marlhf_lite.models.actor_critic import PolicyModel, PPOModels, ScalarHeadModel
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import load_base, load_policy, load_score_model, load_tokenizer
from marlhf_lite.parsing.registry import make_rule
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.utils.errors import InputError

COMMAND = ("seed", "model", "data", "sft_input", "ppo", "generate", "eval")
LADDER = {"PPO": "E0", "PPO lam^(1/5)": "E1", "MA-PPO": "E4", "PPO lam=1": "MC"}  # name -> preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the words of a command line; faults are one line on stderr, and status 2."""
    try:
        options = parse("first_wrong_step", sys.argv[1:] if argv is None else argv, COMMAND, __doc__.split("\n")[0])
        sft = resolve_adapter_dir("sft", options.sft_input.sft)
        print(run(options, sft, resolve_adapter_dir("policy", options.generate.policy)).to_string())
    except InputError as error:
        print(f"first_wrong_step: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: SimpleNamespace, sft: Path, policy: Path) -> pd.DataFrame:
    """Sample, and return a row for each estimator: shares with their 95 % intervals over responses."""
    pipeline.start_processes()
    trainer = make_trainer(options, sft, policy)
    with torch.no_grad():
        rollout = trainer.score(trainer.generate_rollout(trainer.prompts))
    config, lines = options.ppo, MacroConfig(termination="sentence")
    estimators = {name: preset_estimator(preset, config, options.seed.seed) for name, preset in LADDER.items()}
    estimators["MA-PPO lines"] = Estimator(config, lines, make_rule(lines, options.seed.seed))
    found = blame_by_estimator(trainer, rollout, estimators)
    rows = {"RLOO": {"wrong step": _interval(found["PPO"].tokens)}}
    for name, one in found.items():
        rows[name] = {"wrong step": _interval(one.share), "steps before": _interval(one.before)}
    return pd.DataFrame(rows).T.fillna("")


def make_trainer(options: SimpleNamespace, sft: Path, policy: Path) -> PPOTrainer:
    """A trainer of the run's policy and critic, which stand beside each other, on held-out prompts."""
    data, critic = options.data, policy.parent / "critic"
    if not critic.is_dir():
        raise InputError(f"--policy {policy}: no critic beside it: give a run of `marlhf ppo`")
    task = load_task(data.dataset, size=data.size, seed=data.split_seed)
    base, tokenizer = load_base(options.model), load_tokenizer(options.model.model)
    set_seed(options.seed.seed)
    models = PPOModels(
        policy=PolicyModel(load_policy(base, policy)),
        reference=PolicyModel(load_policy(base, sft, trainable=False)),
        reward=None,
        critic=ScalarHeadModel(load_score_model(base, critic, trainable=True)),
    )
    prompts = list(task.splits["test"]["prompt"])[: options.eval.eval_prompts]
    reward, rule = FunctionReward(task.gold, "gold"), make_rule(MacroConfig(n="1"), 0)
    limit = data.max_response_length
    return PPOTrainer(models, tokenizer, prompts, reward, rule, options.ppo, max_response_length=limit)


def _interval(shares: Tensor) -> str:
    mean, low, high, _ = bootstrap_mean(shares.tolist())
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    raise SystemExit(main())

"""The first step of every stage trains: no schedule begins at 0, and a step that moves nothing is refused."""

from typing import get_args, get_type_hints

import datasets
import pytest
import torch
from conftest import fails
from small_runs import early_letters
from torch import nn
from transformers import Trainer, TrainingArguments

from marlhf_lite.config.commands import COMMANDS, OPTIONS, option_names
from marlhf_lite.config.options import RolloutConfig, TrainerConfig
from marlhf_lite.experiments import pipeline
from marlhf_lite.experiments.context import RunContext
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import load_policy, load_score_model, new_reward_model
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training.optimizer import learning_rate_share
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.trl_trainers import StageSteps
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

KINDS = get_args(get_type_hints(TrainerConfig)["lr_scheduler_type"])


class Stage(StageSteps, Trainer):
    pass


def rates(kind, ratio, steps, tmp_path):
    """The share of the peak rate in each step."""
    options = TrainingArguments(
        tmp_path, learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=ratio
    )
    trainer = Stage(model=nn.Linear(1, 1), args=options)
    trainer.create_optimizer_and_scheduler(steps)
    shares = []
    for _ in range(steps):
        shares.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return shares


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_a_rate_above_zero(kind, tmp_path):
    for ratio in (0.0, 0.1, 0.5):
        for steps in (1, 2, 3, 10):
            shares = rates(kind, ratio, steps, tmp_path)
            assert min(shares) > 0 and max(shares) == pytest.approx(1.0), (ratio, steps, shares)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_all_stages_have_one_schedule(kind, tmp_path):
    """That of PPO: 0.3 of ten steps are three."""
    ours = RolloutConfig(warmup_updates=3, rl_lr_scheduler_type=kind.removesuffix("_with_warmup"))
    expected = [learning_rate_share(ours, step, 10) for step in range(10)]
    assert rates(kind, 0.3, 10, tmp_path) == pytest.approx(expected, abs=1e-12)


def test_a_warm_up_that_ends_between_two_updates_stays_below_the_peak():
    config = RolloutConfig(warmup_updates=0.25)
    assert [learning_rate_share(config, update, 10) for update in range(4)] == pytest.approx(
        [0.4, 0.8, 1.0, 1.0]
    )


@pytest.fixture
def one_step(base, sft, rm, tokenizer, texts, tmp_path):
    """A function that makes one step of a stage with its default schedule; the models before and after it."""
    pairs = {"prompt": texts.prompts, "chosen": texts.responses, "rejected": texts.responses[::-1]}
    splits = {part: datasets.Dataset.from_dict(pairs) for part in ("sft", "rm", "ppo", "test")}
    task, reward = (
        Task("few", datasets.DatasetDict(splits), early_letters, {}),
        FunctionReward(early_letters),
    )

    def run(name, rate=1e-3):
        names = [
            option for option in option_names(COMMANDS[name]) if option.endswith("learning_rate")
        ]
        given = dict.fromkeys(names, rate) | {
            "updates": 1,
            "max_response_length": 6,
            "checkpoint_every": 0,
        }
        given |= {"num_generations": 2, "sft_epochs": 1.0}
        assert given.keys() <= OPTIONS
        options = COMMANDS[name](
            **{x: given[x] for x in option_names(COMMANDS[name]) & given.keys()}
        )
        folder = RunFolder.create(tmp_path / name, {})
        context = RunContext(
            options, folder, task, tokenizer, lambda: base, rules={"ppo": FixedNGram(2)}
        )
        if name == "sft":
            return [(None, load_policy(base, pipeline.sft_stage(context)))]
        if name == "rm":
            return [
                (
                    new_reward_model(base, sft),
                    load_score_model(base, pipeline.rm_stage(context, sft)),
                )
            ]
        if name == "ppo":
            policy = pipeline.ppo_stage(context, sft, rm)
            critic = load_score_model(base, policy.parent / "critic")
            return [
                (load_policy(base, sft), load_policy(base, policy)),
                (load_score_model(base, rm), critic),
            ]
        done = (
            pipeline.dpo_stage(context, sft)
            if name == "dpo"
            else pipeline.group_stage(context, sft, reward)
        )
        return [(load_policy(base, sft), load_policy(base, done))]

    return run


def adapter(model):
    return torch.cat(
        [
            p.flatten()
            for name, p in model.named_parameters()
            if "lora_B" in name or "score.mod" in name
        ]
    )


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo", "rloo", "grpo"])
def test_a_stage_of_one_step_trains(one_step, stage):
    for before, after in one_step(stage):
        start = torch.zeros(()) if before is None else adapter(before)  # a new adapter has B = 0
        assert not torch.equal(adapter(after), start.expand_as(adapter(after)))


@pytest.mark.parametrize("stage", ["rm", "ppo", "dpo", "rloo", "grpo"])
def test_a_step_below_rounding_is_refused(one_step, stage):
    option = {"rm": "--rm_learning_rate", "dpo": "--dpo_learning_rate"}.get(
        stage, "--policy_learning_rate"
    )
    fails(lambda: one_step(stage, rate=1e-13), "moved no weight", option)


def test_a_policy_that_waited_for_its_critic_moves(make):
    trainer = make(updates=2, critic_warmup=1, policy_learning_rate=1e-13, warmup_updates=0)
    with pytest.raises(InputError, match="moved no weight of the policy"):
        trainer.train()
    assert trainer.state.updates_done == 1


def test_responses_that_score_alike_are_no_fault(one_step, monkeypatch):
    """A group without differences has no gradient."""
    seen, plain = [], pipeline.Recorder._check_first_gradient_moved_weights
    monkeypatch.setattr(
        pipeline.Recorder,
        "_check_first_gradient_moved_weights",
        lambda self, *x: seen.append(x[1]) or plain(self, *x),
    )
    monkeypatch.setattr(FunctionReward, "__call__", lambda self, rollout: torch.zeros(len(rollout)))
    ((before, after),) = one_step("grpo")
    assert seen == [0.0] and torch.equal(adapter(before), adapter(after))

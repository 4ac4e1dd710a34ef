"""Tests on held-out prompts while training: the same numbers each time, no trace in training, the best policy kept."""

import random
from hashlib import sha256
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import changed, nudge, snapshot
from small_runs import build, early_letters, noisy, timeless

from marlhf_lite.evaluation import held_out
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.models.actor_critic import build_models
from marlhf_lite.training.checkpoint import random_states
from marlhf_lite.training.rewards import FunctionReward, ModelReward
from marlhf_lite.training.rollout import Sampling
from marlhf_lite.utils.run_folder import RunFolder

PROMPTS = ["b", "And then?", "The dog", "Where is it", "up"]


@pytest.fixture
def test(tokenizer):
    """A function that makes the test of these prompts."""

    def make(reward=early_letters, gold=None, **changes):
        return HeldOutEvaluation(PROMPTS, tokenizer, Sampling(6), FunctionReward(reward), gold, **changes)

    return make


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [early_letters, noisy])
def test_the_same_numbers_each_time(moved, test, reward):
    """Whatever was drawn in between, from any generator; a reward that draws included."""
    made = test(reward, gold=early_letters)
    first = made(moved)
    torch.rand(5), random.random(), numpy.random.rand()
    assert made(moved) == first == test(reward, gold=early_letters)(moved)
    assert test(reward, gold=early_letters, seed=1)(moved) != first
    nudge(moved.policy, 9, 0.1)
    assert made(moved) != first


def rounded(prompts, responses):
    return [round(x, 1) for x in early_letters(prompts, responses)]


def shorter(prompts, responses):
    return [-len(x) for x in responses]


def test_against_the_sft_model_by_hand(moved, test, tokenizer):
    """Means and win rates, a tie counting half, from responses drawn here with the noise of the seed."""
    names, rows = [f"7/{sha256(prompt.encode()).hexdigest()[:12]}/0" for prompt in PROMPTS], {}
    for name in ("policy", "reference"):
        role = getattr(moved, name).eval()
        rows[name] = generate_seeded(role.model, tokenizer, PROMPTS, names, Sampling(6))
    with torch.no_grad():
        drawn = rows["policy"]
        inputs = (drawn.tokens, drawn.attention_mask, drawn.mask.shape[1])
        logs = [role(*inputs)[0] for role in (moved.policy, moved.reference)]
        kl = [float((a - b)[m].sum()) for a, b, m in zip(*logs, drawn.mask)]
    row = test(rounded, gold=shorter, seed=7)(moved)
    for score, function in (("rm_score", rounded), ("gold", shorter)):
        ours, theirs = (function(PROMPTS, rows[name].responses) for name in ("policy", "reference"))
        wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs)]
        assert score == "gold" or (0.5 in wins and set(wins) != {0.5})
        found = [row[f"{score}_{name}"] for name in ("win_rate", "mean", "sft")]
        assert found == pytest.approx([sum(values) / 5 for values in (wins, ours, theirs)])
    assert row["kl"] == pytest.approx(sum(kl) / 5, rel=1e-4)
    assert row["tokens"] == pytest.approx(drawn.lengths.float().mean().item())


def test_answers_are_the_same_however_many_processes_share_the_prompts(moved, test, monkeypatch):
    seen = []

    def reward(prompts, responses):
        seen.extend(zip(prompts, responses))
        return early_letters(prompts, responses)

    test(reward)(moved)
    alone, shared = sorted(seen), []
    for rank in (0, 1):
        seen.clear()
        monkeypatch.setattr(held_out, "PartialState", lambda r=rank: SimpleNamespace(process_index=r, num_processes=2))
        test(reward)(moved)
        shared += seen
    assert sorted(shared) == alone


# -- no trace ---------------------------------------------------------------------------------------------------------


def test_states_and_modes_come_back(moved, test):
    roles = torch.nn.ModuleList([moved.policy, moved.critic])
    before, weights = random_states(), snapshot(roles)
    moved.policy.train(), moved.reference.model.eval()
    test(noisy)(moved)
    after = random_states()
    assert torch.equal(before[0], after[0]) and before[2:] == after[2:]  # of torch, python and numpy
    assert moved.policy.model.training and not moved.reference.model.training
    assert not changed(roles, weights)
    moved.policy.eval()
    test()(moved)
    assert not moved.policy.training


def test_a_run_with_tests_is_the_run_without(base, sft, rm, tokenizer):
    """Bit by bit in its metrics, with a reward that draws from python's and numpy's generators."""
    histories = []
    for every in (0, 1):
        random.seed(0), numpy.random.seed(0)
        changes = {"eval_every": every, "test_prompts": PROMPTS, "reward": FunctionReward(noisy), "num_ppo_epochs": 2}
        trainer = build(build_models(base, sft, rm), tokenizer, **changes)
        histories.append(timeless(trainer.train()))
    assert histories[0] == histories[1]


# -- while training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every, expected", [(1, [1, 2, 3]), (2, [2, 3]), (5, [3]), (0, [])])
def test_every_k_updates_and_at_the_end(roles, tokenizer, tmp_path, every, expected):
    run, reward = RunFolder.create(tmp_path / "run", {}), ModelReward(roles.reward)
    changes = {"test_prompts": PROMPTS[:3], "gold": early_letters, "length": 3, "checkpoint_every": 0}
    build(roles, tokenizer, run, reward=reward, eval_every=every, **changes).train()
    assert [row["update"] for row in run.tests()] == expected
    for row in run.tests():
        names = ("rm_score_mean", "rm_score_sft", "rm_score_win_rate", "gold_mean", "kl", "tokens", "ended")
        assert set(names) <= row.keys()
        assert 0 <= row["rm_score_win_rate"] <= 1

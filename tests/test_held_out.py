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


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {})


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


def test_against_the_sft_model_by_hand(moved, test, tokenizer):
    """Means and win rates, a tie counting half, from responses drawn here with the noise of the seed."""
    scores, kl, rows = {}, [], {}
    for name in ("policy", "reference"):
        role = getattr(moved, name)
        role.eval()
        names = [f"7/{sha256(prompt.encode()).hexdigest()[:12]}/0" for prompt in PROMPTS]
        rollout = generate_seeded(role.model, tokenizer, PROMPTS, names, Sampling(6))
        scores[name] = [round(x, 1) for x in early_letters(PROMPTS, rollout.responses)]
        rows[name] = rollout
    with torch.no_grad():
        drawn = rows["policy"]
        inputs = (drawn.tokens, drawn.attention_mask, drawn.mask.shape[1])
        logs = [role(*inputs)[0] for role in (moved.policy, moved.reference)]
        kl = [float((a - b)[m].sum()) for a, b, m in zip(*logs, drawn.mask)]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(scores["policy"], scores["reference"])]
    assert 0.5 in wins and set(wins) != {0.5}
    row = test(lambda p, r: [round(x, 1) for x in early_letters(p, r)], gold=lambda p, r: [-len(x) for x in r], seed=7)
    row = row(moved)
    assert row["rm_score_win_rate"] == pytest.approx(sum(wins) / 5)
    assert row["rm_score_mean"] == pytest.approx(sum(scores["policy"]) / 5)
    assert row["rm_score_sft"] == pytest.approx(sum(scores["reference"]) / 5)
    lengths = [[-len(x) for x in rows[name].responses] for name in ("policy", "reference")]
    assert row["gold_mean"] == pytest.approx(sum(lengths[0]) / 5)
    shorter = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(*lengths)]
    assert row["gold_win_rate"] == pytest.approx(sum(shorter) / 5)
    assert row["kl"] == pytest.approx(sum(kl) / 5, rel=1e-4)
    assert row["tokens"] == pytest.approx(rows["policy"].lengths.float().mean().item())


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
    before, weights = random_states(), snapshot(torch.nn.ModuleList([moved.policy, moved.critic]))
    moved.policy.train(), moved.reference.model.eval()
    test(noisy)(moved)
    after = random_states()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"] and before["numpy"] == after["numpy"]
    assert moved.policy.model.training and not moved.reference.model.training
    assert not changed(torch.nn.ModuleList([moved.policy, moved.critic]), weights)
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
def test_every_k_updates_and_at_the_end(roles, tokenizer, run, every, expected):
    changes = {"eval_every": every, "test_prompts": PROMPTS[:3], "gold": early_letters, "length": 3}
    changes |= {"checkpoint_every": 0}
    trainer = build(roles, tokenizer, run, reward=ModelReward(roles.reward), **changes)
    trainer.train()
    assert [row["update"] for row in run.tests()] == expected
    for row in run.tests():
        names = ("rm_score_mean", "rm_score_sft", "rm_score_win_rate", "gold_mean", "kl", "tokens", "ended")
        assert set(names) <= row.keys()
        assert 0 <= row["rm_score_win_rate"] <= 1

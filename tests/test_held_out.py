"""Tests on held-out prompts while training: the same numbers each time, no trace in training, the best policy kept."""

import random
from hashlib import sha256
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import nudge
from small_runs import build, early_letters, noisy, timeless

from marlhf_lite.evaluation import held_out
from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.evaluation.responses import HeldOutPrompts
from marlhf_lite.evaluation.sampling import generate_seeded
from marlhf_lite.models.loading import build_models
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import Sampling

PROMPTS = ["b", "And then?", "The dog", "Where is it", "up"]


@pytest.fixture
def test(tokenizer):
    """A function that makes the test of these prompts."""

    def make(reward=early_letters, gold=None, **changes):
        asked = HeldOutPrompts(PROMPTS, tokenizer, Sampling(6), **changes)
        return HeldOutEvaluation(asked, FunctionReward(reward), gold)

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
        rows[name] = generate_seeded(
            role.model, tokenizer, PROMPTS, Sampling(6, seed_names=tuple(names))
        )
    with torch.no_grad():
        drawn = rows["policy"]
        inputs = (drawn.tokens, drawn.attention_mask, drawn.mask.shape[1])
        logs = [role(*inputs)[0] for role in (moved.policy, moved.reference)]
        gaps = [(a - b)[m].double() for a, b, m in zip(*logs, drawn.mask)]
        kl, k3 = [float(x.sum()) for x in gaps], [float(((-x).exp() - 1 + x).sum()) for x in gaps]
    row = test(rounded, gold=shorter, seed=7)(moved)
    for score, function in (("score", rounded), ("gold", shorter)):
        ours, theirs = (function(PROMPTS, rows[name].responses) for name in ("policy", "reference"))
        wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs)]
        assert score == "gold" or (0.5 in wins and set(wins) != {0.5})
        found = [row[f"{score}_{name}"] for name in ("win_rate", "mean", "sft")]
        assert found == pytest.approx([sum(values) / 5 for values in (wins, ours, theirs)])
    assert row["kl"] == pytest.approx(sum(kl) / 5, rel=1e-4) and row["kl_k3"] == pytest.approx(
        sum(k3) / 5, rel=1e-3
    )
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
        monkeypatch.setattr(
            held_out,
            "PartialState",
            lambda r=rank: SimpleNamespace(process_index=r, num_processes=2),
        )
        test(reward)(moved)
        shared += seen
    assert sorted(shared) == alone


# -- no trace ---------------------------------------------------------------------------------------------------------


def test_a_run_with_tests_is_the_run_without(base, sft, rm, tokenizer):
    """Bit by bit in its metrics, with a reward that draws from python's and numpy's generators."""
    histories = []
    for every in (0, 1):
        random.seed(0), numpy.random.seed(0)
        changes = {
            "eval_every": every,
            "test_prompts": PROMPTS,
            "reward": FunctionReward(noisy),
            "num_ppo_epochs": 2,
        }
        trainer = build(build_models(base, sft, rm), tokenizer, **changes)
        histories.append(timeless(trainer.train()))
    # A history has the numbers of a test beside those of its update.
    without_tests = [
        {name: number for name, number in row.items() if not name.startswith("test/")}
        for row in histories[1]
    ]
    assert histories[0] == without_tests

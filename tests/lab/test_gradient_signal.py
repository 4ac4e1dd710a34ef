"""Signal of a batch's gradient: advantages by loops, slopes against autograd, and the bootstrap of a ratio."""

import numpy as np
import pytest
import torch
from conftest import PROMPTS

from marlhf_lab.credit.gradient_signal import (
    projection,
    ratio_of_signals,
    signal_to_noise,
    slopes,
    token_advantages,
)
from marlhf_lab.figures import gradient_signal as figures
from marlhf_lite.models.actor_critic import trainable
from marlhf_lite.training.rollout import Sampling, generate


@pytest.fixture
def rollout(moved, tokenizer):
    torch.manual_seed(0)
    moved.policy.eval()
    made = generate(moved.policy.model, tokenizer, PROMPTS[:4], Sampling(12, temperature=1.2))
    scores = torch.tensor([0.5, -1.0, 0.25, 2.0])
    return type(made)(**vars(made) | {"scores": scores})


@pytest.mark.parametrize(("n", "lam"), [(1, 0.95), (5, 0.95), (1, 0.99), (1, 1.0), (3, 0.5)])
def test_advantages_are_those_of_a_loop(rollout, n, lam):
    """From the last macro action to the first: δ = R + V' − V with the mean value of each macro action."""
    values = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(1))
    found = token_advantages(rollout, values, n, lam)
    for row, length in enumerate(rollout.lengths.tolist()):
        starts = list(range(0, length, n))
        means = [
            float(values[row, start : min(start + n, length)].double().mean()) for start in starts
        ]
        advantage, expected = 0.0, [0.0] * len(starts)
        for step in reversed(range(len(starts))):
            last = step == len(starts) - 1
            reward = float(rollout.scores[row]) if last else 0.0
            advantage = reward + (0.0 if last else means[step + 1]) - means[step] + lam * advantage
            expected[step] = advantage
        assert found[row, :length].tolist() == pytest.approx(
            [expected[t // n] for t in range(length)], abs=1e-5
        )
        assert not found[row, length:].any()


def test_slopes_give_the_gradient_s_projection(rollout, moved):
    """Along any direction: the weighted sum of slopes is that of the gradient itself; the weights come back."""
    policy, mask = moved.policy, rollout.mask
    parameters = trainable(policy)
    before = [p.detach().clone() for p in parameters]

    def logprobs():
        return policy(rollout.tokens, rollout.attention_mask, mask.shape[1])[0]

    advantages = token_advantages(rollout, torch.zeros(mask.shape), 5, 0.95)
    loss = (logprobs() * advantages)[mask].sum() / mask.sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    for seed in range(3):
        u = (
            torch.randn(len(gradient), generator=torch.Generator().manual_seed(seed))
            + 20 * gradient / gradient.norm()
        )
        u /= u.norm()
        found = projection(advantages, slopes(logprobs, parameters, u, 0.01), mask)
        assert found == pytest.approx(float(gradient @ u), rel=0.01)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_a_ratio_of_signals_and_its_interval():
    """Normal projections: the ratio is known, and 95 % of the intervals of 200 studies hold it."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        noise = rng.normal(size=(2, 64))
        rows = {"ours": 1.5 + noise[0], "theirs": 0.5 + 0.6 * noise[0] + 0.8 * noise[1]}
        found = ratio_of_signals(rows, "ours", "theirs", resamples=400)
        held += found.low <= 3 <= found.high
    assert found.mean == pytest.approx(
        signal_to_noise(rows["ours"]) / signal_to_noise(rows["theirs"])
    )
    assert 180 <= held <= 198
    assert signal_to_noise([1.0, 3.0]) == pytest.approx(2 / 2**0.5)


def test_the_record_is_drawn_and_written_as_tables():
    """Dots and bars are where the record has them."""
    ratios = {
        "MA-PPO": {"mean": 4.0, "low": 2.0, "high": 7.0},
        "PPO lam^(1/5)": {"mean": 5.0, "low": 3.0, "high": 8.0},
    }
    signals = {"PPO": 0.25, "MA-PPO": 1.0, "PPO lam^(1/5)": 1.25}
    known = {"value_noise": 0.08, "score_explained_variance": -0.2}
    record = {
        "primary": "zero, trained",
        "found": {
            critic: {"signal_to_noise": signals, "over_PPO": ratios} for critic in figures.CRITICS
        },
        "cells": {
            "critics": dict.fromkeys(figures.CRITICS, known),
            "projections": {
                critic: dict.fromkeys(signals, [1.0, 3.0] * 32) for critic in figures.CRITICS
            },
        },
    }
    trained = {
        "zero, trained": [0.1, 0.2],
        "normal, start": [0.0, 0.1],
        "normal, trained": [0.0, 0.0],
    }
    above, below = figures.signal_figure(record, {"cells": {"correlations": trained}})
    dots = [line for line in above.lines if line.get_marker() != "None"]
    assert [line.get_xdata()[0] for line in dots[:3]] == [0.25, 1.0, 1.25]
    # a batch is 1 or 3: mean 2 ± 0.25, deviation 1 or a little more
    low, high = above.lines[0].get_xdata()
    assert 1.7 < low < 2 < high < 2.4
    assert below.lines[0].get_ydata().tolist() == [0.1, 0.2]
    record["found"]["normal, trained"] = {"signal_to_noise": {"PPO": -0.25}, "over_PPO": ratios}
    assert "| normal head, trained | -0.25 | - | - |" in figures.ratio_table(record), (
        "a ratio of what points away"
    )
    assert (
        "| **head of zero, trained** | 0.25 | 4.00 [2.00, 7.00] | 5.00 [3.00, 8.00] |"
        in figures.ratio_table(record)
    )
    assert "| normal head, trained | 0.080 | -0.200 |" in figures.critic_table(record)

"""Repetition, distinct-n and the rest, by hand and against plain loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlhf_lite.evaluation.statistics import bootstrap_mean
from marlhf_lite.evaluation.text_metrics import distinct, repetition, text_metrics


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=4), st.integers(1, 4))
def test_against_plain_loops(responses, n):
    runs = [[tuple(row[i : i + n]) for i in range(len(row) - n + 1)] for row in responses]
    for response, own in zip(responses, runs, strict=True):
        repeats = sum(run in own[:i] for i, run in enumerate(own))
        assert repetition(response, n) == pytest.approx(repeats / len(own) if own else 0)
    every = [run for own in runs for run in own]
    new = sum(run not in every[:i] for i, run in enumerate(every))
    assert distinct(responses, n) == pytest.approx(new / len(every) if every else 0)


ROWS = [
    {"prompt": "p", "id": "1", "method": "PPO", "response": "go on and on and on", "tokens": 9, "ended": True, "kl": 1},
    {"prompt": "p", "id": "1", "method": "PPO", "response": "no", "tokens": 3, "ended": False, "kl": 0.0},
    {"prompt": "q", "id": "2", "method": "PPO", "response": "", "tokens": 1, "ended": True, "kl": 0.5},
    {"prompt": "q", "method": "SFT", "response": "yes yes yes yes"},
]  # fmt: skip


def test_means_are_over_prompts():
    ppo, sft = text_metrics(ROWS)
    assert ppo["responses"] == 3 and sft["responses"] == 1
    assert ppo["words"] == bootstrap_mean([3.5, 0.0])._asdict()  # 6 and 1 words are one prompt's
    assert ppo["tokens"]["mean"] == 3.5 and ppo["ended"]["mean"] == 0.75 and ppo["kl"]["mean"] == 0.5
    assert ppo["repetition"]["mean"] == pytest.approx((1 / 4 / 2 + 0) / 2)
    assert ppo["distinct_1"] == 4 / 7 and ppo["distinct_2"] == 3 / 5 and ppo["distinct_3"] == 3 / 4
    assert sft["repetition"]["mean"] == 0.5 and {"tokens", "ended", "kl"}.isdisjoint(sft)

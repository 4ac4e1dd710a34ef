"""Inverse-transform sampling with random numbers that belong to the response."""

from dataclasses import replace

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from marlhf_lite.evaluation.sampling import InverseTransformSampler, generate_seeded
from marlhf_lite.training.rollout import Sampling, generate

SETTINGS = [
    Sampling(1, 1.0, 0),
    Sampling(1, 0.7, 5),
    Sampling(1, 1.3, 0, 0.6),
    Sampling(1, 0.9, 12, 0.8),
]
PROMPTS = ["a", "The cat sat on the mat.", "The cat sat on the mat.", "Why?", "a", "a"]
NAMES = [f"0/{i}" for i in range(6)]


def pick(logits, u, how):
    """The token that `InverseTransformSampler` leaves, for each row."""
    left = InverseTransformSampler(torch.tensor(u, dtype=torch.float32)[:, None], how)(
        torch.zeros(len(u), 3).long(), logits
    )
    assert (left.isfinite().sum(1) == 1).all()
    return left.argmax(1)


def allowed(logits, how):
    """Probabilities that transformers' own warpers leave."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(how.temperature)])
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    return warpers(None, logits).softmax(-1)


@pytest.mark.parametrize("how", SETTINGS)
def test_evenly_spread_numbers_give_the_probabilities_of_transformers(how):
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    u = (np.arange(20_000) + 0.5) / 20_000
    share = torch.bincount(pick(logits.expand(len(u), -1), u, how), minlength=20) / len(u)
    # whole counts, and float32
    assert share == pytest.approx(allowed(logits, how)[0].numpy(), abs=2e-4)


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.float32, (4, 9), elements=st.floats(-30, 30, width=32), unique=True),
    st.lists(st.floats(0, 1 - 2**-24), min_size=4, max_size=4),
    st.sampled_from(SETTINGS),
)
def test_only_allowed_tokens_are_picked(logits, u, how):
    logits = torch.tensor(logits)
    p = allowed(logits, how).gather(1, pick(logits, u, how)[:, None])
    assert (p > 0).all()


@pytest.fixture
def policy(moved):
    moved.policy.eval()
    return moved.policy.model


@pytest.fixture
def draw(policy, tokenizer):
    def run(prompts=PROMPTS, names=NAMES, temperature=1.0, how=None):
        named = replace(how or Sampling(8, temperature), seed_names=tuple(names))
        return generate_seeded(policy, tokenizer, prompts, named)

    return run


def test_a_response_is_the_same_in_any_batch(draw):
    together = draw()
    assert together.prompts == PROMPTS
    alone = [draw([prompt], [name]) for prompt, name in zip(PROMPTS, NAMES)]
    assert [r.responses[0] for r in alone] == together.responses
    order = [5, 2, 0, 4, 1, 3]
    mixed = draw([PROMPTS[i] for i in order], [NAMES[i] for i in order])
    assert [mixed.responses[order.index(i)] for i in range(6)] == together.responses
    pair = draw(["", ""], ["x", "y"])  # BOS alone: nothing to read ahead
    assert pair.responses == [draw([""], [name]).responses[0] for name in ("x", "y")]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_response_ends_before_its_minimum(draw, policy, tokenizer, temperature):
    """Every second token ends a response here; from the minimum on it may, and the tokens before stay as likely."""
    policy.generation_config.eos_token_id = list(range(0, 512, 2))
    free = draw(how=Sampling(8, temperature))
    rollout = draw(how=Sampling(8, temperature, min_new_tokens=3))
    ends = torch.isin(rollout.response_ids, torch.tensor(policy.generation_config.eos_token_id))
    assert not ends[:, :3].any() and rollout.lengths.min() > 3 and rollout.ended.any()
    assert (free.lengths <= 3).any()
    never = draw(how=Sampling(8, temperature, min_new_tokens=8))
    assert never.lengths.tolist() == [8] * 6 and not never.ended.any()


def test_a_minimum_leaves_the_other_tokens_as_likely(draw, policy, tokenizer):
    """The first token of 600 responses against the probabilities without the end tokens, by chi-squared."""
    ends, how, count = [1, 5, 300], Sampling(1, 0.9, 6, min_new_tokens=1), 600
    ids = torch.tensor(tokenizer(["a"])["input_ids"])
    logits = policy(ids).logits[0, -1].detach().double() / 0.9
    ends = [tokenizer.eos_token_id, *logits.topk(2).indices.tolist()]  # the likeliest ones
    policy.generation_config.eos_token_id = ends
    logits[ends] = -torch.inf
    likeliest = logits.topk(6)
    p = torch.zeros_like(logits).scatter(0, likeliest.indices, likeliest.values.softmax(0))
    found = (
        draw(["a"] * count, [str(i) for i in range(count)], how=how)
        .response_ids[:, 0]
        .bincount(minlength=len(p))
    )
    some = p > 0
    assert found[~some].sum() == 0
    assert chisquare(found[some], (p[some] / p[some].sum() * count)).pvalue > 1e-3


def test_first_tokens_come_as_often_as_the_model_says(draw, policy, tokenizer):
    how, count = Sampling(1, 0.9, 6), 600
    rollout = draw(["Why?"] * count, [str(i) for i in range(count)], how=how)
    ids = tokenizer(["Why?"], return_tensors="pt")
    with torch.no_grad():
        p = allowed(policy(**ids).logits[:, -1], how)[0]
    share = torch.bincount(rollout.response_ids[:, 0], minlength=len(p)) / count
    assert ((share - p).abs() <= 4.5 * (p * (1 - p) / count).sqrt() + 1e-6).all() and (
        p > 0.01
    ).sum() > 2


def test_temperature_zero_is_greedy_and_torchs_random_state_is_left_alone(draw, policy, tokenizer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw()
    greedy = draw(temperature=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert greedy.responses == generate(policy, tokenizer, PROMPTS, Sampling(8, 0.0)).responses

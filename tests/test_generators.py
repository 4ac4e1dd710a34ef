"""What vLLM would be given, and what is made of its answers; the engine itself needs a GPU."""

import importlib.util

import pytest
import torch
from conftest import nudge, snapshot

from marlhf_lite.models.loading import load_policy
from marlhf_lite.training.generators import VLLMGenerator, make_generator, merged_weights
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.utils.errors import InputError


def test_merged_weights_are_those_of_a_merged_model_and_change_nothing(base, sft):
    policy = nudge(load_policy(base, sft), 5)
    before = snapshot(policy)
    ours = dict(merged_weights(policy))
    assert all(torch.equal(value, before[name]) for name, value in snapshot(policy).items())
    merged = load_policy(base, sft)
    merged.load_state_dict(policy.state_dict())
    copies = {name: p.detach().clone() for name, p in base.named_parameters()}
    theirs = {name: p.clone() for name, p in merged.merge_and_unload().named_parameters()}
    with torch.no_grad():  # merging is in place: give the shared base its weights back
        for name, p in base.named_parameters():
            p.copy_(copies[name])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
    assert any(not torch.equal(ours[name], copies[name]) for name in ours)


def test_answers_of_an_engine_become_the_rollout_of_generate(base, tokenizer, texts):
    """An engine that answers with the same tokens gives the same rollout."""
    sampling = Sampling(6, temperature=0)
    expected = generate(base, tokenizer, texts.prompts, sampling)
    rows = [row[mask].tolist() for row, mask in zip(expected.response_ids, expected.mask)]
    synced = []

    class Engine:
        def sync_weights(self):
            synced.append(1)

        def generate(self, prompts, images, num_generations):
            assert images is None and num_generations == 1
            return prompts, rows, None, None

    generator = VLLMGenerator()
    generator.engine = Engine()
    ours = generator(base, tokenizer, texts.prompts, sampling)
    width = max(map(len, rows))
    assert synced == [1] and ours.responses == expected.responses
    assert torch.equal(ours.mask, expected.mask[:, :width]) and torch.equal(ours.ended, expected.ended)
    assert torch.equal(
        ours.tokens * ours.attention_mask, (expected.tokens * expected.attention_mask)[:, : ours.tokens.shape[1]]
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is there")
def test_without_vllm_it_says_so():
    with pytest.raises(InputError, match="pip install vllm"):
        make_generator("vllm")
    assert make_generator("transformers") is generate

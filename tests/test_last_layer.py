"""The last layer at a response's positions alone: numbers and gradients are those of the whole layer."""

import copy

import pytest
import torch
from conftest import nudge
from test_architectures import WINDOW, save_family

from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models import actor_critic
from marlhf_lite.models.actor_critic import (
    ActorCritic,
    PolicyModel,
    ScalarHeadModel,
    checkpoint_activations,
    without_dropout,
)
from marlhf_lite.models.fast import last_layer
from marlhf_lite.models.fast.last_layer import last_states
from marlhf_lite.models.loading import load_base, new_policy, new_reward_model
from marlhf_lite.training.rollout import from_texts

FAMILIES = ("gemma", "llama3.2", "qwen2", "qwen2 window", "mistral", "qwen3", "gemma2", "gpt2")
PLAIN = FAMILIES[:5]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    return request.param, save_family(request.param, tokenizer, folder / "model"), folder


@pytest.fixture(params=["lora", "full"])
def actors(request, family):
    """`(name, policy and critic)` of the family, none of them at its start."""
    name, model, folder = family
    options = ModelConfig(model=model, finetune=request.param, lora_r=4, lora_alpha=8)
    base, sft = load_base(options), folder / request.param
    policy = nudge(new_policy(base, options), 1, 0.02)
    policy.save_pretrained(sft)
    critic = nudge(new_reward_model(base, sft), 2, 0.02)
    for model in (policy, critic):
        without_dropout(model)
    return name, ActorCritic(PolicyModel(policy), ScalarHeadModel(critic))


@pytest.fixture
def rollout(tokenizer, texts):
    some = from_texts(tokenizer, texts.prompts, texts.responses, limit=12)
    assert some.prompt_width > WINDOW and (some.attention_mask[:, 0] == 0).any()
    return some


def run(actors, rollout):
    """Log-probabilities, values, and the gradients of both."""
    actors.zero_grad(set_to_none=True)
    logprobs, _, values = actors(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])
    (logprobs.sin() + values.cos())[rollout.mask].sum().backward()
    gradients = {name: p.grad for name, p in actors.named_parameters() if p.grad is not None}
    return {
        "logprobs": logprobs.detach()[rollout.mask],
        "values": values.detach()[rollout.mask],
    } | gradients


def whole(backbone, kept, tokens, attention_mask, levers=frozenset()):
    inputs = {
        "attention_mask": attention_mask,
        "position_ids": actor_critic.position_ids(attention_mask),
    }
    return backbone(input_ids=tokens, **inputs, use_cache=False).last_hidden_state[:, -kept:]


@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)])  # the second has no padding before it
def test_numbers_and_gradients_are_those_of_the_whole_layer(actors, rollout, rows, monkeypatch):
    models, part = actors[1], rollout.select(rows).trim()
    found = run(models.train(), part)
    monkeypatch.setattr(actor_critic, "last_states", whole)
    right = run(models, part)
    assert right.keys() == found.keys()
    for key, expected in right.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            found[key], expected, rtol=0, atol=(1e-6 if "." not in key else 1e-5) * max(scale, 1)
        )


def test_layers_run_at_few_positions(actors, rollout):
    """All but the last one as far as the longest row, the last one from where the first response is chosen."""
    name, models = actors
    rollout = rollout.select(rollout.attention_mask.sum(1).argsort()[:-1])  # no row has all columns
    widths, masks = {"0": [], "1": []}, []
    for module, layer in models.named_modules():
        if module.endswith(".mlp"):
            seen = widths[module.split(".")[-2]]
            layer.register_forward_hook(
                lambda _, args, out, seen=seen: seen.append(args[0].shape[1])
            )
        if module.endswith(".0.self_attn"):
            layer.register_forward_pre_hook(
                lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True
            )
    run(models, rollout)
    read = rollout.attention_mask[:, :-1]  # nothing is chosen after the last token
    rows, prompts = read.sum(1), read[:, : rollout.prompt_width].sum(1)
    longest, first = int(rows.max()), int(prompts.min()) - 1
    width = read.shape[1]
    assert longest < width
    assert widths == (
        {"0": [longest] * 2, "1": [longest - first] * 2}
        if name in PLAIN
        else dict.fromkeys("01", [width] * 2)
    )
    assert name not in PLAIN[:3] or masks == [None, None]  # others have windows


def test_recomputation_changes_no_number(actors, rollout):
    """The other layers run twice; the last one of a family on the list runs once, at the response."""
    name, models = actors
    right, runs = run(models.train(), rollout), []
    for role in (models.policy, models.critic):
        checkpoint_activations(role.model)
    for module, layer in models.policy.named_modules():
        if module.endswith(".mlp"):
            layer.register_forward_pre_hook(
                lambda *_, module=module: runs.append(module.split(".")[-2])
            )
    found = run(models, rollout)
    assert right.keys() == found.keys() and all(
        torch.equal(found[key], right[key]) for key in right
    )
    assert runs.count("0") == 2 and runs.count("1") == (1 if name in PLAIN else 2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(tiny, rollout, attention):
    base = load_base(copy.copy(tiny)).base_model
    base.set_attn_implementation(attention)
    kept, inputs = rollout.mask.shape[1] + 1, (rollout.tokens, rollout.attention_mask)
    with torch.no_grad():
        right, found = (
            whole(base, kept, *inputs),
            last_states(base, kept, *inputs, levers=frozenset({"last_layer"})),
        )
        seen = rollout.attention_mask[:, -kept:].bool()
        torch.testing.assert_close(found[seen], right[seen], rtol=0, atol=1e-5)
    assert "forward" not in vars(base.layers[-1]) and last_layer.has_plain_last_layer(base)

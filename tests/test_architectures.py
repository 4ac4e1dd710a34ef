"""Families of causal LMs, tiny and random: loaded from a folder, roles over one base, padding; what is refused."""

from types import SimpleNamespace

import pytest
import torch
from conftest import fails, nudge
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    RwkvConfig,
    SmolLM3Config,
)

from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models import logprobs
from marlhf_lite.models.checks import check_length, check_trainable
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_tokenizer,
    new_policy,
    new_reward_model,
)
from marlhf_lite.models.positions import position_limit
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, from_texts, generate

WINDOW = 6  # shorter than most prompts
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LOCAL_FIRST = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "gemma": (GemmaConfig, {"num_key_value_heads": 1}),
    "gemma2": (
        Gemma2Config,
        LOCAL_FIRST
        | {
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (Gemma3TextConfig, LOCAL_FIRST | {"query_pre_attn_scalar": 16}),
    "llama3.2": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 window": (Qwen2Config, LOCAL_FIRST | {"use_sliding_window": True}),
    "qwen3": (Qwen3Config, {}),
    "gpt2": (GPT2Config, {}),  # learned absolute positions: a shift by padding shows
    # A head narrower than the layers, as OPT-350m's; dropout by a function.
    "opt": (OPTConfig, {"word_embed_proj_dim": 16, "ffn_dim": 48, "do_layer_norm_before": False}),
    # no sequence classifier; logits are scaled
    "granite": (GraniteConfig, {"logits_scaling": 3.0}),
    # No sequence classifier; experts, with the logits of their router, as SFT saves it.
    "olmoe": (
        OlmoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


# More families whose folders later commands must take; their numbers are not looked at here.
MORE = {
    "gemma3 multimodal": (Gemma3Config, {}),
    "phi3": (Phi3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "olmo2": (Olmo2Config, {}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "gpt_neo": (
        GPTNeoConfig,
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "glm4": (Glm4Config, {}),
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
}


def save_family(name, tokenizer, folder):
    """A random model of the family in a folder, with the tokenizer; returns the folder's path."""
    config, more = (FAMILIES | MORE)[name]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    torch.manual_seed(0)
    values = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.3,
        **sizes,
        **heads,
        **ids,
        **more,
    }
    if config is Gemma3Config:
        seen = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        vision = seen | {"image_size": 28, "patch_size": 14}
        values = {"text_config": values, "vision_config": vision, "mm_tokens_per_image": 1} | ids
    model = AutoModelForCausalLM.from_config(config(**values))
    # 0 would hide padding
    torch.nn.init.normal_(model.get_input_embeddings().weight.data[tokenizer.pad_token_id])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tokenizer, tmp_path_factory):
    """A model of the family in a folder, loaded as a base, with an SFT adapter and a reward adapter for it."""
    folder = tmp_path_factory.mktemp("family")
    model = save_family(request.param, tokenizer, folder / "model")
    options = ModelConfig(model=model, lora_r=4, lora_alpha=8)
    base = load_base(options)
    nudge(new_policy(base, options), 1).save_pretrained(folder / "sft")
    nudge(new_reward_model(base, folder / "sft"), 2).save_pretrained(folder / "rm")
    tokenizer = load_tokenizer(options.model)
    places = {"sft": folder / "sft", "rm": folder / "rm"}
    return SimpleNamespace(
        name=request.param, base=base, options=options, tokenizer=tokenizer, **places
    )


@pytest.fixture
def roles(family):
    return build_models(family.base, family.sft, family.rm)


@pytest.fixture
def rollout(family, texts):
    return from_texts(family.tokenizer, texts.prompts, texts.responses, limit=12)


def alone(rollout, i):
    """`(prompt, response)` ids of row i, without padding."""
    kept = rollout.attention_mask[i].bool()
    ids, length = rollout.tokens[i][kept].tolist(), int(rollout.lengths[i])
    return ids[:-length], ids[-length:]


def greedy(model, prompt, ends, limit):
    """One token at a time from the whole text so far: no padding, no cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] not in ends):
        ids.append(
            int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    return ids[len(prompt) :]


@torch.no_grad()
def test_greedy_responses_are_those_of_each_prompt_alone(family, roles, texts):
    model = roles.policy.model.eval()
    together = generate(model, family.tokenizer, texts.prompts, Sampling(10, temperature=0.0))
    assert (together.attention_mask[:, 0] == 0).any() and together.prompt_width > WINDOW
    for i in range(len(together)):
        prompt, response = alone(together, i)
        assert response == greedy(model, prompt, [family.tokenizer.eos_token_id], 10)
    assert len({tuple(ids) for ids in together.response_ids.tolist()}) > 2


@torch.no_grad()
@pytest.mark.parametrize("tile", [None, 100])
def test_log_probabilities_are_those_of_each_response_alone(roles, rollout, tile, monkeypatch):
    if tile:
        monkeypatch.setattr(logprobs, "MAX_LOGITS", 0)
        monkeypatch.setattr(logprobs, "_TILE", {"cpu": tile * rollout.mask.numel()})
    nudge(roles.policy.eval(), 3)
    ours, _ = roles.policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1], 0.7)
    for i in range(len(rollout)):
        prompt, response = alone(rollout, i)
        logits = (
            roles.policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False)
            .logits[0]
            .double()
        )
        expected = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(-1)[
            range(len(response)), response
        ]
        torch.testing.assert_close(ours[i][rollout.mask[i]].double(), expected, **CLOSE)
    assert ours[rollout.mask].std() > 0.5


@torch.no_grad()
def test_values_and_scores_are_those_of_each_response_alone(roles, rollout):
    for role in (nudge(roles.critic.eval(), 4), roles.reward):
        ours = role(rollout.tokens, rollout.attention_mask)
        for i in range(len(rollout)):
            prompt, response = alone(rollout, i)
            row = torch.tensor([prompt + response])
            one = role(row, torch.ones_like(row))[0]
            torch.testing.assert_close(rollout.at_last_token(ours)[i], one[-1], **CLOSE)
            torch.testing.assert_close(
                rollout.before_tokens(ours)[i][rollout.mask[i]], one[len(prompt) - 1 : -1], **CLOSE
            )
    torch.testing.assert_close(
        rollout.at_last_token(ours), ModelReward(roles.reward)(rollout), **CLOSE
    )


def test_no_dropout_between_two_passes(roles, rollout):
    """Whatever the family calls its rate: PPO compares two passes."""
    inputs = (rollout.tokens, rollout.attention_mask)
    one, other = (roles.policy.train()(*inputs, rollout.mask.shape[1])[0] for _ in range(2))
    assert torch.equal(one, other) and torch.equal(
        *(roles.critic.train()(*inputs) for _ in range(2))
    )


def test_a_family_of_the_table_can_train(family):
    check_trainable(family.base, family.options, family.sft, needs_head=True)


def refused(kind, tokenizer, folder, pairs, capsys, *words, command="sft", **changes):
    """The line by which a command ends before it makes a folder, with a random model of this config."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": len(tokenizer),
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kind(**{**sizes, **changes})).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    given = [
        "--model",
        str(folder / "model"),
        "--dataset",
        str(pairs),
        "--output_dir",
        str(folder / "run"),
        *words,
    ]
    capsys.readouterr()
    assert main([command, *given]) == 2 and not (folder / "run").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        (
            RwkvConfig,
            {"attention_hidden_size": 32},
            "rwkv models cannot train here: padding before a text changes its",
        ),
        (MambaConfig, {"state_size": 4}, "--lora_target_modules all-linear: ValueError"),
        (GPT2Config, {"n_positions": 100}, "it has 100 positions; the longest prompt has"),
    ],
)
def test_what_cannot_train_is_one_line_before_it(
    kind, changes, line, tokenizer, pairs, tmp_path, capsys
):
    error = refused(kind, tokenizer, tmp_path, pairs, capsys, **changes)
    assert line in error and error.strip().count("\n") == 0


def test_positions_hold_all_turns_of_a_dialogue(tokenizer, pairs, tmp_path, capsys):
    """8 turns of 96 tokens and 7 observations of 64, where one response would fit."""
    words = [
        "--environment",
        "marlhf_lite.tasks.tiny_guess.game:GuessGame",
        "--max_response_length",
        "96",
    ]
    error = refused(
        GPT2Config, tokenizer, tmp_path, pairs, capsys, *words, command="run", n_positions=1024
    )
    assert "it has 1024 positions" in error and "the longest response (of all turns) 1216" in error


def test_positions_that_go_on_have_no_limit(family):
    limited = family.name in ("gpt2", "opt")
    assert position_limit(family.base) == (256 if limited else None)
    check_length(family.base, "m", 200, 56)
    if limited:
        fails(
            lambda: check_length(family.base, "m", 201, 56),
            "--model m: it has 256",
            "give --max_prompt_length 200",
        )

"""Weights that modules or models share: no stage changes the base, and what is trained is sampled and exported."""

import json
import shutil
import warnings
from dataclasses import replace

import datasets
import peft
import pytest
import torch
from conftest import changed, fails, nudge, snapshot
from small_runs import PROMPTS, build, early_letters
from transformers import AutoModelForCausalLM

from marlhf_lite.config.commands import (
    COMMANDS,
    OPTIONS,
    ExportCommand,
    GenerateCommand,
    option_names,
)
from marlhf_lite.config.options import LengthConfig, SFTStageConfig
from marlhf_lite.experiments import pipeline
from marlhf_lite.experiments.context import RunContext
from marlhf_lite.experiments.export import answer_prompt, export_policy
from marlhf_lite.extras.baselines.dpo import dpo_trainer
from marlhf_lite.extras.baselines.rloo_grpo import group_trainer
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.adapters import other_base
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    load_score_model,
    new_reward_model,
    share,
)
from marlhf_lite.tasks.splits import Task
from marlhf_lite.training import rollout as rollouts
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import Sampling, from_texts, generate, merged_adapter
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.run_folder import RunFolder

# Embedding and head of the tiny Gemma are one weight.
ADAPTERS = {
    "embedding": {"target_modules": ".*(q_proj|v_proj|embed_tokens)"},
    "head": {"target_modules": ".*(q_proj|lm_head)"},
    "both": {"target_modules": ".*(q_proj|lm_head|embed_tokens)"},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole head": {"target_modules": ".*(q_proj|embed_tokens)", "modules_to_save": ["lm_head"]},
    "tied adapter": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"target_modules": "all-linear", "trainable_token_indices": list(range(2, 200))},
}


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request, base, tmp_path_factory):
    """A folder with an adapter on weights that others use, as somebody else may have made it."""
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **ADAPTERS[request.param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights
        nudge(peft.get_peft_model(share(base), config), 1, 0.1).save_pretrained(folder)
    return folder


@pytest.fixture
def some(tokenizer, texts):
    return from_texts(tokenizer, texts.prompts, texts.responses, limit=12)


@torch.no_grad()
def distribution(model, rollout):
    """log π of every token of the vocabulary [tokens, V], in float64."""
    logits = model.eval()(input_ids=rollout.tokens, attention_mask=rollout.attention_mask).logits
    return logits[rollout.attention_mask.bool()].double().log_softmax(-1)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_the_policy_that_trains_is_sampled_and_exported(adapter, base, tiny, some, tmp_path):
    policy = load_policy(base, adapter)
    trained = distribution(policy, some)
    with merged_adapter(policy):
        assert abs(kl(trained, distribution(policy, some))) < 1e-7
    assert kl(trained, distribution(base, some)) > 1e-3
    export_policy(ExportCommand(model=tiny.model), adapter, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert abs(kl(trained, distribution(exported, some))) < 1e-7


@pytest.mark.parametrize("adapter", ["embedding", "head"], indirect=True)
def test_answers_are_the_policys(adapter, base, tiny, tokenizer):
    """`marlhf generate`, greedy as far as a temperature above 0 goes."""
    options = GenerateCommand(model=tiny.model, temperature=1e-4, max_response_length=12)
    policy = load_policy(base, adapter, trainable=False)
    expected = generate(policy, tokenizer, ["Why?"], Sampling(12, temperature=0)).responses[0]
    assert answer_prompt(options, adapter, "Why?") == expected.strip()


@pytest.mark.parametrize("adapter", ["embedding"], indirect=True)
def test_a_run_that_samples_from_another_policy_is_refused(
    adapter, base, rm, tokenizer, monkeypatch
):
    """If an adapter on a tied weight is merged anyway: after the first update, and at checkpoints."""
    trainer = build(build_models(base, adapter, rm), tokenizer, updates=2)
    trainer.train()
    trainer = build(build_models(base, adapter, rm), tokenizer, updates=4, checkpoint_every=3)
    monkeypatch.setattr(rollouts, "tied_layers", lambda model: [])
    fails(
        trainer.train,
        "of the policy's change away from the one that trains",
        "--lora_target_modules",
    )
    assert trainer.state.updates_done == 1
    trainer.update(PROMPTS[:4])  # the second update is not looked at, the third one is
    fails(lambda: trainer.update(PROMPTS[:4]), "away from the one that trains")


def test_a_reward_model_is_saved_as_it_was_trained(adapter, base, some, tmp_path):
    before = snapshot(base)
    model = new_reward_model(base, adapter)
    from_sft = load_policy(base, adapter, trainable=False)
    with torch.no_grad():
        inputs = {"input_ids": some.tokens, "attention_mask": some.attention_mask}
        states = [
            m.get_base_model().model(**inputs).last_hidden_state
            for m in (model.eval(), from_sft.eval())
        ]
        torch.testing.assert_close(*states)  # it starts from SFT with all that SFT trained
        nudge(model, 2, 0.1).save_pretrained(tmp_path)
        trained = ScalarHeadModel(model)(some.tokens, some.attention_mask)
        for trainable in (False, True):
            again = ScalarHeadModel(load_score_model(base, tmp_path, trainable).eval())
            assert torch.equal(trained, again(some.tokens, some.attention_mask))
    assert not changed(base, before)


def test_an_embedding_that_was_rounded_is_not_written_into_the_base(base, tiny, tmp_path):
    """An adapter of the embedding is saved with the embedding, here that of a base in bfloat16."""
    before, config = (
        snapshot(base),
        peft.LoraConfig(task_type="CAUSAL_LM", r=4, **ADAPTERS["embedding"]),
    )
    peft.get_peft_model(load_base(replace(tiny, dtype="bfloat16")), config).save_pretrained(
        tmp_path
    )
    load_policy(base, tmp_path)
    assert not changed(base, before)


@pytest.mark.parametrize("fault", ["other embeddings", "a layer is missing"])
def test_an_adapter_of_another_model(base, tmp_path, fault):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **ADAPTERS["embedding"])
    weights = peft.get_peft_model_state_dict(peft.get_peft_model(share(base), config))
    if fault == "other embeddings":
        weights = {name: x + 1.0 if "base_layer" in name else x for name, x in weights.items()}
    else:
        del weights[next(name for name in weights if "lora_B" in name)]
    config.save_pretrained(tmp_path)
    torch.save(weights, tmp_path / "adapter_model.bin")
    part = {"other embeddings": "other embeddings", "a layer is missing": "is missing"}[fault]
    fails(lambda: load_policy(base, tmp_path), f"{tmp_path}: does not fit --model", part)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_adapter_that_changes_biases_of_the_base_is_refused(base, tmp_path, bias):
    """All models share them: the reference, too."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], bias=bias)
    peft.get_peft_model(share(base), config).save_pretrained(tmp_path)
    for load in (load_policy, new_reward_model, load_score_model):
        fails(
            lambda load=load: load(base, tmp_path),
            f"{tmp_path}: its adapter (LORA)",
            "changes biases of the base",
        )


def test_an_adapter_that_is_a_prompt_is_refused(base, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(share(base), config).save_pretrained(tmp_path)
    fails(lambda: load_policy(base, tmp_path), "(PROMPT_TUNING) is a prompt")


def test_an_adapter_names_its_base(sft, tmp_path):
    shutil.copytree(sft, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    for base, models in {
        "Me/Small-1B": ("/x/small-1b", "me/Small-1B/"),
        "": ("tiny-gemma",),
    }.items():
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base})
        )
        assert [other_base(tmp_path, model) for model in models] == [""] * len(models)
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "Me/Small-1B"})
    )
    assert (
        other_base(tmp_path, "Me/Small-1B-Instruct") == "Me/Small-1B"
        and other_base(tmp_path / "no", "x") == ""
    )


def test_an_adapter_of_the_head_alone_has_no_reward_model(base, tmp_path):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"])
    peft.get_peft_model(share(base), config).save_pretrained(tmp_path)
    fails(lambda: new_reward_model(base, tmp_path), f"{tmp_path}: its adapter is on the head alone")


@pytest.mark.parametrize("adapter", ["head", "tokens"], indirect=True)
def test_an_adapter_of_the_head_trains_by_ppo_alone(adapter, base, tokenizer, texts, tmp_path):
    answers = {name: texts.responses for name in ("chosen", "rejected")}
    rows = datasets.Dataset.from_dict({"prompt": texts.prompts} | answers)
    model, line = load_policy(base, adapter), "the head (lm_head) has an adapter"
    fails(
        lambda: train_sft(model, tokenizer, rows, SFTStageConfig(), LengthConfig(), tmp_path), line
    )
    fails(lambda: dpo_trainer(model, tokenizer, rows, COMMANDS["dpo"](), tmp_path), line)
    for name in ("rloo", "grpo"):
        options = COMMANDS[name]()
        fails(
            lambda options=options: group_trainer(model, tokenizer, ["a"], None, options, tmp_path),
            line,
        )


@pytest.mark.parametrize("adapter", ["embedding", "whole embedding"], indirect=True)
def test_no_stage_changes_the_base(adapter, tiny, tokenizer, texts, tmp_path):
    base = load_base(tiny)
    before = snapshot(base)
    pairs = {"prompt": texts.prompts, "chosen": texts.responses, "rejected": texts.responses[::-1]}
    splits = {part: datasets.Dataset.from_dict(pairs) for part in ("sft", "rm", "ppo", "test")}
    task = Task("few", datasets.DatasetDict(splits), early_letters, {})

    def context(name):
        given = {
            "batch_size": 4,
            "num_generations": 2,
            "updates": 2,
            "warmup_updates": 0,
            "checkpoint_every": 1,
        }
        given |= {f"{stage}_batch_size": 3 for stage in ("sft", "rm", "dpo")} | {
            "eval_every": 1,
            "eval_prompts": 4,
        }
        given |= {
            "max_response_length": 6,
            "lora_target_modules": ADAPTERS["embedding"]["target_modules"],
        }
        assert given.keys() <= OPTIONS
        command = COMMANDS[name]
        options = command(
            **{option: given[option] for option in option_names(command) & given.keys()}
        )
        run = RunFolder.create(tmp_path / name, {})
        return RunContext(options, run, task, tokenizer, lambda: base, rules={"ppo": FixedNGram(2)})

    pipeline.sft_stage(context("sft"))
    assert not changed(base, before)
    rm = pipeline.rm_stage(context("rm"), adapter)
    assert not changed(base, before)
    reward, policies = FunctionReward(early_letters), {}
    policies["ppo"] = pipeline.ppo_stage(context("ppo"), adapter, rm)
    policies["dpo"] = pipeline.dpo_stage(context("dpo"), adapter)
    for name in ("rloo", "grpo"):
        policies[name] = pipeline.group_stage(context(name), adapter, reward)
        assert not changed(base, before)
    pipeline.evaluate(context("evaluate"), policies, adapter, rm)
    assert not changed(base, before)
    start = PolicyModel(load_policy(base, adapter, trainable=False)).model
    for policy in policies.values():
        some = from_texts(tokenizer, texts.prompts, texts.responses, limit=12)
        assert kl(distribution(load_policy(base, policy), some), distribution(start, some)) > 1e-9

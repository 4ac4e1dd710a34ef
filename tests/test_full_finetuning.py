"""Full fine-tuning, the paper's way: four models with weights of their own, from SFT to the evaluation."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import changed, nudge, snapshot
from plain_update import far, learner, options, record
from safetensors.torch import load_file
from small_runs import build, timeless
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import unwrap_peft
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    load_score_model,
    new_policy,
    new_reward_model,
)
from marlhf_lite.models.shards import write_shards
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.shard_names import TRAINER_SHARDS

NAMES = ("policy", "reference", "reward", "critic")


@pytest.fixture(scope="module")
def full(tiny):
    return ModelConfig(model=tiny.model, finetune="full")


@pytest.fixture(scope="module")
def folders(full, tokenizer, tmp_path_factory):
    """An SFT model and a reward model, each a little off where it started."""
    root, base = tmp_path_factory.mktemp("full"), load_base(full)
    nudge(new_policy(base, full), 1, 0.01).save_pretrained(root / "sft")
    nudge(new_reward_model(base, root / "sft"), 2, 0.01).save_pretrained(root / "rm")
    return base, root / "sft", root / "rm"


@pytest.fixture
def whole_roles(folders):
    return build_models(*folders)


def storages(module):
    return {p.untyped_storage().data_ptr() for p in [*module.parameters(), *module.buffers()]}


# -- four models ------------------------------------------------------------------------------------------------------


def test_roles_share_no_storage(whole_roles):
    places = [storages(getattr(whole_roles, name)) for name in NAMES]
    assert all(places) and len(set().union(*places)) == sum(map(len, places))


def test_a_killed_run_goes_on(folders, tokenizer, tmp_path):
    """Bit by bit; a tied weight is in the file once."""
    plain = build(build_models(*folders), tokenizer, RunFolder.create(tmp_path / "plain", {}))
    plain.train()
    run = RunFolder.create(tmp_path / "run", {})
    build(build_models(*folders), tokenizer, run, updates=2).train()
    again = build(build_models(*folders), tokenizer, RunFolder.open(run.path))
    assert timeless(again.train(resume=True)) == timeless(plain.history)
    for name in ("policy", "critic"):
        assert not changed(getattr(again.models, name), snapshot(getattr(plain.models, name)))
    state = torch.load(run.path / "checkpoints" / "update-000003.pt", weights_only=True)
    assert sum(name.startswith("weights.") for name in state["tensors"]) == len(
        [*again.actor_critic.parameters()]
    )
    assert (
        again.models.policy.model.lm_head.weight
        is again.models.policy.model.model.embed_tokens.weight
    )


@pytest.mark.parametrize("command", ["rloo", "grpo", "dpo"])
def test_a_checkpoint_by_shards_is_joined_before_trl_reads_it(
    command, folders, tiny, tmp_path, capsys, monkeypatch
):
    """Said before the base loads; what the line says to do gives the same weights."""
    shards, weights = tmp_path / "shards", load_file(folders[1] / "model.safetensors")
    shutil.copytree(folders[1], shards, ignore=shutil.ignore_patterns("*.safetensors"))
    write_shards(
        {f"model.{name}": tensor for name, tensor in weights.items()}, shards / TRAINER_SHARDS
    )
    words = ["--finetune", "full", "--model", tiny.model, "--size", "40"]
    words += [] if command == "dpo" else ["--reward", "gold"]
    with monkeypatch.context() as patch:
        patch.delattr("marlhf_lite.experiments.context.load_base")
        assert (
            main([command, *words, "--sft", str(shards), "--output_dir", str(tmp_path / "run")])
            == 2
        )
    error = capsys.readouterr().err
    assert (
        f"--sft {shards} (a checkpoint by shards): " in error
        and error.count("\n") == 1
        and not (tmp_path / "run").exists()
    )
    advised = re.search("marlhf (export .*) --output_dir NEW", error)[1].split()
    assert main([*advised, "--model", tiny.model, "--output_dir", str(tmp_path / "joined")]) == 0
    joined = load_file(tmp_path / "joined" / "model.safetensors")
    assert all(torch.equal(joined[name], tensor) for name, tensor in weights.items())


def test_saved_models_load_again(folders, whole_roles, tokenizer, tmp_path):
    trainer = build(whole_roles, tokenizer, updates=1)
    trainer.train()
    trainer.save(tmp_path)
    policy, critic = (
        load_policy(folders[0], tmp_path / "policy"),
        load_score_model(folders[0], tmp_path / "critic"),
    )
    assert not changed(policy, snapshot(whole_roles.policy.model))
    assert not changed(critic, snapshot(whole_roles.critic.model))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")  # as anybody would
    ids = torch.tensor([[2, 30, 40]])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, whole_roles.policy.model.eval()(ids).logits)


# -- gradient checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_recomputed_activations_give_the_same_gradients(
    base, sft, rm, folders, tokenizer, texts, kind
):
    """And layers really run twice."""
    given, grads, passes = (base, sft, rm) if kind == "lora" else folders, [], []
    for saving in (False, True):
        roles = build_models(*given, gradient_checkpointing=saving)
        nudge(roles.policy, 3, 0.002)
        rollout = from_texts(tokenizer, texts.prompts, texts.responses, limit=8)
        with torch.no_grad():
            log_p = roles.reference(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[
                0
            ]
        rollout = replace(rollout, ref_logprobs=log_p, scores=torch.arange(6.0))
        made, calls = learner(roles, options(micro_batch_size=6)), []
        first_layer = unwrap_peft(roles.policy.model).model.layers[0].mlp
        first_layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        steps = record(made)
        made.learn(rollout, FixedNGram(3)(rollout.mask))
        grads.append([steps[name][0][0] for name in ("policy", "critic")])
        passes.append(len(calls))
    assert passes == [1, 2]
    for ours, theirs in zip(*grads):
        assert far(ours, theirs) < 1e-6


# -- dropout ----------------------------------------------------------------------------------------------------------

ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
BASES = {
    "gpt2": lambda size: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.5,
            embd_pdrop=0.5,
            attn_pdrop=0.5,
            **ENDS,
        )
    ),
    "llama": lambda size: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.5,
            **ENDS,
        )
    ),
}


@pytest.mark.parametrize("kind, attention", [("lora", "sdpa"), ("full", "eager")])
@pytest.mark.parametrize("name", BASES)
def test_bases_with_dropout_start_at_the_reference(tokenizer, tmp_path, name, kind, attention):
    """Two passes of the policy agree, and with the reference; also after tests on held-out prompts."""
    torch.manual_seed(0)
    BASES[name](len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = ModelConfig(
        model=str(tmp_path / "base"), finetune=kind, attn_implementation=attention, lora_r=2
    )
    base = load_base(model)
    nudge(new_policy(base, model), 1, 0.01).save_pretrained(tmp_path / "sft")
    roles = build_models(base, tmp_path / "sft", None)
    rates = {"policy_learning_rate": 1e-9, "critic_learning_rate": 1e-9, "warmup_updates": 0}
    history = build(
        roles, tokenizer, updates=2, eval_every=1, test_prompts=["b"], length=3, **rates
    ).train()
    assert all(0 <= row["kl_k3"] < 1e-5 and row["skipped_steps"] == 0 for row in history)
    assert roles.policy.model.training and not roles.reference.model.training


# -- the command line -------------------------------------------------------------------------------------------------

SMALL = (
    "--sft_epochs 1 --sft_batch_size 4 --rm_epochs 1 --rm_batch_size 8 --updates 2 --batch_size 8 "
    "--micro_batch_size 8 --eval_prompts 6 --max_response_length 12"
).split()


def weights(folder):
    [path] = Path(folder).glob("model*.safetensors")
    return load_file(path)


def test_from_sft_to_evaluation(tiny, pairs, tmp_path, monkeypatch):
    """Each stage trains all weights of a model of its own and leaves it whole for the next."""
    monkeypatch.chdir(tmp_path)
    shared = ["--dataset", str(pairs), "--model", tiny.model, "--finetune", "full"]
    assert main(["run", *shared, *SMALL, "--output_dir", "out"]) == 0
    chain = {"base": tiny.model, "sft": "out/sft", "policy": "out/ma-ppo/policy"}
    states = {name: weights(folder) for name, folder in chain.items()}
    for one, two in (("base", "sft"), ("sft", "policy")):
        assert states[one].keys() == states[two].keys()
        assert all(not torch.equal(states[one][k], states[two][k]) for k in states[one]), (one, two)
    rm, critic = weights("out/rm"), weights("out/ma-ppo/critic")
    assert "score.weight" in rm and all(not torch.equal(rm[k], critic[k]) for k in rm)
    backbone = [k for k in rm if k in states["sft"]]
    assert backbone and all(not torch.equal(rm[k], states["sft"][k]) for k in backbone)
    assert [row["kl_k3"] < 1e-6 for row in RunFolder.open("out/ma-ppo").metrics()] == [True, False]
    rows = json.loads(Path("out/summary.json").read_text())["methods"]
    assert [row["method"] for row in rows] == ["SFT", "MA-PPO"]
    small = [
        w
        for flag, w in zip(SMALL[::2], zip(SMALL[::2], SMALL[1::2]))
        if "eval" in flag or "length" in flag
    ]
    words = [
        "evaluate",
        *shared,
        *[x for pair in small for x in pair],
        "--sft",
        "out",
        "--rm",
        "out",
    ]
    assert main([*words, "--policies", "again=out", "--output_dir", "e"]) == 0
    again = json.loads(Path("e/summary.json").read_text())["methods"]
    assert [row["method"] for row in again] == ["SFT", "again"] and math.isfinite(
        again[1]["rm_score"]
    )

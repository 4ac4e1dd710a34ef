"""One policy in all its forms, and every stage takes what another wrote: sampled, saved, exported, read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import fails, nudge
from safetensors.torch import load_file, save_file
from small_runs import PROMPTS, build
from test_architectures import FAMILIES, MORE, save_family
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from marlhf_lite.cli import main
from marlhf_lite.config.commands import ExportCommand, GenerateCommand
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.experiments import export
from marlhf_lite.experiments.export import answer_prompt, export_policy
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.checks import check_length, check_trainable, ways
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    new_policy,
    new_reward_model,
)
from marlhf_lite.models.merging import lost_share, merged_weights
from marlhf_lite.models.positions import position_limit
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import from_texts, merged_adapter
from marlhf_lite.utils.run_folder import RunFolder, check_output_dir

# -- family x lora or full x every later command ----------------------------------------------------------------------


@pytest.mark.parametrize("finetune", ["lora", "full"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_every_later_command_takes_what_a_stage_wrote(family, finetune, tokenizer, tmp_path):
    """The steps of `sft`, `rm`, `ppo`, `evaluate`, `generate` and `export`, one after the other."""
    model = save_family(family, tokenizer, tmp_path / "model")
    options = ModelConfig(model=model, finetune=finetune, lora_r=2, lora_alpha=4)
    base = load_base(options)
    nudge(new_policy(base, options), 1, 0.01).save_pretrained(tmp_path / "sft")
    sft = resolve_adapter_dir("sft", str(tmp_path / "sft"))
    check_trainable(base, options, sft, needs_head=True)
    nudge(new_reward_model(base, sft), 2, 0.01).save_pretrained(tmp_path / "rm")
    rm = resolve_adapter_dir("rm", str(tmp_path / "rm"))
    models = build_models(base, sft, rm)
    trainer = build(
        models, tokenizer, updates=1, reward=ModelReward(models.reward), policy_learning_rate=1e-3
    )
    assert trainer.train()[0]["skipped_steps"] == 0
    trainer.save(tmp_path / "run")
    for option in ("policy", "policies", "sft"):
        policy = resolve_adapter_dir(option, str(tmp_path / "run" / "policy"))
    given = {"model": model, "finetune": finetune}
    assert isinstance(
        answer_prompt(GenerateCommand(**given, max_response_length=4), policy, "Why?"), str
    )
    export_policy(ExportCommand(**given), policy, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    some = from_texts(tokenizer, PROMPTS[:2], ["yes", "no"], limit=4)
    inputs = {"input_ids": some.tokens, "attention_mask": some.attention_mask}
    with torch.no_grad():
        trained = load_policy(base, policy, trainable=False)(**inputs).logits
        torch.testing.assert_close(exported(**inputs).logits, trained, rtol=1e-4, atol=1e-4)


# -- exports hold what was learnt -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(tiny, tmp_path_factory):
    """A function: the policy folder of a run of this format, whose adapter has made a change of about this size."""

    def make(dtype, size):
        run = RunFolder.create(tmp_path_factory.mktemp("run") / "run", {"dtype": dtype})
        policy = new_policy(load_base(replace(tiny, dtype=dtype)), tiny)
        generator = torch.Generator().manual_seed(0)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data = (
                    size * (torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1).float()
                )
        policy.save_pretrained(run.path / "policy")
        return run.path / "policy"

    return make


def missing(base, policy, exported):
    """Norm of what the exported weights lack, over the norm of the change s B A, in float64."""
    start, adapter, end = (
        load_file(next(Path(place).glob("*.safetensors"))) for place in (base, policy, exported)
    )
    lost = change = 0.0
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        A, B = adapter[name].double(), adapter[name.replace("lora_A", "lora_B")].double()
        key = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        wanted = 2.0 * B @ A  # the scale is alpha / r
        lost += float((end[key].double() - start[key].double() - wanted).square().sum())
        change += float(wanted.square().sum())
    return (lost / change) ** 0.5


@pytest.mark.parametrize(
    ("dtype", "size", "written"), [("bfloat16", 1e-3, "float32"), ("float32", 1e-3, "float32")]
)
def test_an_export_holds_the_change(learnt, tiny, tmp_path, capsys, dtype, size, written):
    """Also of a small change over a base of 16 bits, where the format of the run would lose most of it."""
    policy = learnt(dtype, size)
    export_policy(ExportCommand(model=tiny.model, dtype=dtype), policy, tmp_path / "out")
    assert missing(tiny.model, policy, tmp_path / "out") < 1e-3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, written)
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith(f"number format: {written}") and ("bfloat16 would lose" in line) == (
        dtype != written
    )


def test_the_lost_share_is_what_files_show(tiny, learnt, tmp_path):
    """And a change that is large against the weights stays in 16 bits."""
    for size, fits in ((1e-3, False), (3.0, True)):
        policy, out = learnt("bfloat16", size), tmp_path / str(size)
        model = load_policy(load_base(tiny), policy, trainable=False)
        lost = lost_share(merged_weights(model), torch.bfloat16)
        assert (lost <= 0.05) == fits
        if fits:
            export_policy(ExportCommand(model=tiny.model, dtype="bfloat16"), policy, out)
            assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
            assert missing(tiny.model, policy, out) == pytest.approx(lost, rel=1e-3)


def test_a_format_that_was_asked_for_and_loses_the_change_is_refused(tiny, learnt, tmp_path):
    policy = learnt("float32", 1e-3)
    for dtype in ("bfloat16", "float16"):
        options = ExportCommand(model=tiny.model, dtype=dtype)
        fails(
            lambda options=options: export_policy(options, policy, tmp_path / "out"),
            f"--dtype {dtype}: it would lose",
        )
    full = ModelConfig(model=tiny.model, finetune="full")
    nudge(new_policy(load_base(full), full), 1, 1e-5).save_pretrained(tmp_path / "full")
    options = ExportCommand(model=tiny.model, finetune="full", dtype="bfloat16")
    fails(
        lambda: export_policy(options, tmp_path / "full", tmp_path / "out"),
        "it would lose",
        "--dtype float32",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_base_of_16_bits_samples_with_its_adapter_apart(tiny, learnt, dtype):
    policy = load_policy(
        load_base(replace(tiny, dtype=dtype)), learnt(dtype, 1e-3), trainable=False
    )
    before = [weight.data_ptr() for weight in policy.parameters()]
    with merged_adapter(policy):
        assert before == [weight.data_ptr() for weight in policy.parameters()]
        assert not any(getattr(layer, "merged", False) for layer in policy.modules())


def test_weights_that_are_not_finite_are_named(tiny, sft, learnt, base, tmp_path):
    policy = learnt("float32", 1e-3)
    weights = load_file(policy / "adapter_model.safetensors")
    save_file(
        {name: x * float("nan") for name, x in weights.items()},
        policy / "adapter_model.safetensors",
    )
    options = ExportCommand(model=tiny.model)
    fails(
        lambda: export_policy(options, policy, tmp_path / "out"),
        f"{policy}: its weights are not finite (NaN",
    )
    fails(
        lambda: check_trainable(base, tiny, policy, needs_head=True),
        f"{policy}: its weights are not finite (NaN",
    )
    assert not (tmp_path / "out").exists()


def test_one_export_does_not_touch_what_another_makes(tiny, sft, tmp_path, monkeypatch):
    """While the first one writes, and after it; what fails removes its own files, and a folder that was there stays."""
    out, options = tmp_path / "out", ExportCommand(model=tiny.model)
    (tmp_path / "empty").mkdir()

    def interrupt(folder):
        raise KeyboardInterrupt

    def export_another(folder):
        patch.undo()
        export_policy(options, sft, out)

    with monkeypatch.context() as patch:
        patch.setattr("marlhf_lite.utils.seals.apply_umask", interrupt)
        for place in ("empty", "new"):
            with pytest.raises(KeyboardInterrupt):
                export_policy(options, sft, tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"] and not [
        *(tmp_path / "empty").iterdir()
    ]
    with monkeypatch.context() as patch:
        patch.setattr(
            export,
            "check_output_dir",
            lambda place: (export_another(place), check_output_dir(place)),
        )
        fails(lambda: export_policy(options, sft, out), f"{out}: exists already")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    fails(lambda: export_policy(options, sft, out), f"{out}: exists already")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "out"}
    AutoModelForCausalLM.from_pretrained(out)


# -- folders and names ------------------------------------------------------------------------------------------------


def test_a_whole_model_as_sft_names_the_option_for_it(tiny, pairs, tmp_path, capsys):
    given = ["--sft", tiny.model, "--dataset", str(pairs), "--output_dir", str(tmp_path / "run")]
    assert main(["rm", "--model", tiny.model, *given]) == 2
    assert (
        f"--sft {tiny.model} (a whole model): does not go with --finetune lora: give it as --model"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
    fails(lambda: resolve_adapter_dir("sft", "owner/name"), "a model of the hub as --model")


def test_a_reward_model_of_the_hub(rm, tmp_path, monkeypatch):
    """From the hub's cache, as without a network."""
    place = tmp_path / "models--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    (place / "snapshots").mkdir()
    (place / "snapshots" / ("a" * 40)).symlink_to(rm)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_adapter_dir("rm", "owner/name").samefile(rm)
    fails(
        lambda: resolve_adapter_dir("rm", "owner/other"),
        "--rm owner/other: no such folder, and the hub",
    )


def test_full_fine_tuning_says_model(tokenizer, pairs, tmp_path, capsys):
    model = save_family("gpt2", tokenizer, tmp_path / "model")
    given = [
        "--finetune",
        "full",
        "--sft_epochs",
        "0",
        "--dataset",
        str(pairs),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main(["sft", "--model", model, *given]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"model: {tmp_path}/run/sft"
    versions = RunFolder.open(tmp_path / "run").config["versions"]
    assert (versions["adapters"], versions["last_layer"]) == ("none", "whole")


@pytest.mark.parametrize(
    ("dtype", "way"), [("float32", "merged"), ("bfloat16", "added in bfloat16")]
)
def test_the_way_of_layers_is_recorded(base, tiny, dtype, way):
    options = replace(tiny, dtype=dtype)
    assert ways(load_base(options), options) == {"adapters": way, "last_layer": "at responses"}
    assert ways(base, replace(tiny, load_in_4bit=True))["adapters"] == "by peft"


# -- rows that depend on the rows beside them -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_that_changes_with_the_longest_row_has_a_limit(kind, tokenizer):
    """Up to it a row's log-probabilities are those of the row alone; more tokens in another row change them."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
        }
        config = Phi3Config(
            **sizes,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=rope,
        )
    else:
        config = LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=rope)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert position_limit(base) == 16
    check_length(base, "m", 8, 8)
    fails(
        lambda: check_length(base, "m", 9, 8),
        "RoPE that changes beyond 16 tokens",
        "--max_prompt_length 8",
    )
    model, text = PolicyModel(base), torch.randint(5, 60, (20,))
    alone = model(text[None, :10], torch.ones(1, 10, dtype=torch.long), 4)[0][0]
    for longest, same in ((17, True), (18, False)):  # nothing reads the last
        rows = torch.stack([torch.cat([text.new_zeros(longest - 10), text[:10]]), text[:longest]])
        mask = torch.ones_like(rows)
        mask[0, : longest - 10] = 0
        assert torch.allclose(model(rows, mask, 4)[0][0], alone, atol=1e-4) == same


# -- a user's stats ---------------------------------------------------------------------------------------------------


class Counted(Objective):
    """MA-PPO that records the mean of the ratio, and the responses that each call gets."""

    def policy_loss(self, batch, outputs, old, count):
        loss, stats = super().policy_loss(batch, outputs, old, count)
        mask = batch.rollout.mask
        rows = ((outputs.logprobs - old.logprobs).exp() * mask).sum(1) / mask.sum(1)
        return loss, stats | {"ratio": rows.mean(), "given": float(len(mask))}


class Misnamed(Counted):
    def policy_loss(self, *args):
        return super().policy_loss(*args)[0], {"loss": 1.0}


def test_stats_of_ones_own_are_recorded(make):
    """As means over responses, whatever the micro-batches: here of three and of one."""
    trainer = make(micro_batch_size=3, updates=1, num_ppo_epochs=2, policy_learning_rate=1e-3)
    trainer.objective = Counted(trainer.config)
    rows = trainer.train()
    assert (
        rows[0]["policy_ratio"] == pytest.approx(1.0, abs=0.01) and rows[0]["policy_ratio"] != 1.0
    )
    assert (
        rows[0]["policy_given"] == pytest.approx((3 * 3 + 1 * 1) / 4)
        and "policy_count" not in rows[0]
    )
    trainer.objective = Misnamed(trainer.config)
    fails(lambda: trainer.update(PROMPTS[:4]), "policy_loss: the stat loss")

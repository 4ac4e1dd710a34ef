"""The one door: what is read from a folder is what was meant, or one line says what differs."""

import ast
import copy
import json
import shutil
import sys
import warnings
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
from conftest import changed, fails, nudge, snapshot
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import marlhf_lite
from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.experiments.other_tokenizers import check_tokenizer_beside
from marlhf_lite.models import door
from marlhf_lite.models.actor_critic import ScalarHeadModel
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    load_score_model,
    load_tokenizer,
    new_reward_model,
)

ROOT = Path(marlhf_lite.__file__).parent
IDS = torch.randint(5, 200, (3, 12), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def llama(folder, tokenizer, kind=LlamaForCausalLM, tied=False, **more):
    """A folder with a random two-layer Llama and its tokenizer; the same one each time."""
    torch.manual_seed(0)
    special = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("pad", "bos", "eos")}
    sizes = SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied} | more
    kind(LlamaConfig(**sizes, **special)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def place(request, tokenizer, tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama") / "base", tokenizer, tied=request.param)


@pytest.fixture(scope="module")
def shared(place):
    return load_base(ModelConfig(model=str(place)))


def test_transformers_and_peft_read_behind_the_door_alone():
    """Each of their readers asks for trust, fills gaps, or both."""
    readers = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("from_pretrained", "from_config", "load_adapter"):
                owner = ast.unparse(node.func.value)
                readers.setdefault(path.relative_to(ROOT).as_posix(), set()).add(owner)
    # The door has two files. The shell of a classifier is made from a config that was read behind it.
    files = {"models/door.py", "models/tokenizers.py", "models/score_heads.py"}
    assert set(readers) == files, readers
    assert readers["models/tokenizers.py"] == {"kind"}  # the class of a tokenizer


# -- adapters: kinds x tied or not x roles ----------------------------------------------------------------------------

LAYERS = ["q_proj", "v_proj"]
KINDS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=LAYERS),
    "rank-stabilised": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=LAYERS),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=LAYERS),
    "with a bias": lambda: peft.LoraConfig(r=4, lora_bias=True, target_modules=LAYERS),
    "MiCA": lambda: peft.LoraConfig(r=4, init_lora_weights="mica", target_modules=LAYERS),
    "orthogonal": lambda: peft.LoraConfig(
        r=4, init_lora_weights="orthogonal", target_modules=LAYERS
    ),
    "EVA": lambda: peft.LoraConfig(
        r=4, init_lora_weights="eva", eva_config=peft.EvaConfig(), target_modules=LAYERS
    ),
    "of tokens": lambda: peft.LoraConfig(
        r=4, trainable_token_indices=[5, 6, 7], target_modules=LAYERS
    ),
    "of tokens, also in the head": lambda: peft.LoraConfig(
        r=4, trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [5]}, target_modules=LAYERS
    ),
    "of the embedding": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "of the head": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
    "the whole embedding": lambda: peft.LoraConfig(
        r=4, target_modules=LAYERS, modules_to_save=["embed_tokens"]
    ),
    "layers that repeat": lambda: peft.LoraConfig(
        r=4, layer_replication=[[0, 2], [1, 2]], target_modules=LAYERS
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=LAYERS
    ),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=LAYERS),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "VB-LoRA": lambda: peft.VBLoRAConfig(
        r=2, num_vectors=8, vector_length=8, topk=2, target_modules=LAYERS
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "norms": lambda: peft.LNTuningConfig(),
}


def adapter(folder, place, config, nudged=True):
    """A folder with an adapter as somebody else makes one, on a fresh base."""
    torch.manual_seed(1)
    config.task_type = "CAUSAL_LM"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(place), config)
        if nudged:
            nudge(model, 1)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs(model):
    logits = model.eval()(input_ids=IDS).logits.double().log_softmax(-1)
    return logits[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_role_reads_an_adapter_as_peft_does_on_a_fresh_base(kind, place, shared, tmp_path):
    folder = adapter(tmp_path / "adapter", place, KINDS[kind]())
    fresh = AutoModelForCausalLM.from_pretrained(place)
    theirs = peft.PeftModel.from_pretrained(fresh, folder).eval()
    expected, before = logprobs(theirs), snapshot(shared)
    roles = build_models(shared, folder, None, critic_init="sft", with_reward=False)
    with torch.no_grad():
        for role in (roles.policy, roles.reference):
            found = role.eval()(IDS, MASK, IDS.shape[1] - 1)[0].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        states = theirs.get_base_model().model(input_ids=IDS).last_hidden_state
        critic = roles.critic.model.eval()
        mine = critic.get_base_model().model(input_ids=IDS).last_hidden_state
        torch.testing.assert_close(mine, states, rtol=0, atol=1e-4)
        nudge(critic, 2).save_pretrained(tmp_path / "reward")
        reward = ScalarHeadModel(load_score_model(shared, tmp_path / "reward").eval())
        torch.testing.assert_close(reward(IDS, MASK), roles.critic(IDS, MASK), rtol=0, atol=1e-5)
    assert not changed(shared, before)


EDITORS = ["pissa", "pissa_niter_2", "olora"]


@pytest.mark.parametrize("start", EDITORS)
def test_an_adapter_that_edits_the_shared_base_is_refused(
    start, place, shared, tmp_path, monkeypatch
):
    """By its name; and if PEFT gets another such kind, by what it does."""
    config = peft.LoraConfig(r=4, init_lora_weights=start, target_modules=LAYERS)
    folder, before = adapter(tmp_path / "a", place, config), snapshot(shared)
    for load in (load_policy, new_reward_model, load_score_model):
        fails(lambda load=load: load(shared, folder), f"was made by {start}", "merge_and_unload")
    assert not changed(shared, before)
    monkeypatch.setattr(door, "STARTS_THAT_EDIT_THE_BASE", ())
    for load in (load_policy, new_reward_model):
        own = copy.deepcopy(shared)
        fails(lambda load=load, own=own: load(own, folder), "changes weights of the base")


def test_the_roles_are_built_without_a_warning_about_peft(base, sft, rm, recwarn):
    build_models(base, sft, rm)
    assert not [str(x.message) for x in recwarn if "is_gradient_checkpointing" in str(x.message)]


def edited(folder, name="adapter_config.json", **values):
    """Change values of a config, by default an adapter's."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


REFUSED = {
    "other layers": ({"target_modules": ["c_attn"]}, "does not fit --model"),
    "fewer layers": ({"target_modules": ["q_proj"]}, "the model has no"),
    "more layers": ({"target_modules": [*LAYERS, "up_proj"]}, "is missing"),
    "another rank": ({"r": 8}, "does not fit --model"),
    "CorDA": ({"init_lora_weights": "corda"}, "was made by corda"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "was made by loftq"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "was made by lora_ga"),
    "an unknown kind": ({"peft_type": "LATER"}, "adapter_config.json cannot be read"),
    "a setting that peft does not know": (
        {"monteclora_config": {"later": 1}},
        "adapter_config.json cannot be read",
    ),
    "no kind": ({"peft_type": None}, "adapter_config.json cannot be read"),
    "behind certain tokens": ({"alora_invocation_tokens": [7, 8]}, "acts only behind certain tok"),
    "at random": ({"monteclora_config": {"num_samples": 2}}, "draws its weights at random"),
    "a task beside the text": ({"peft_type": "POLY"}, "(POLY) needs the number of a task"),
    "a mean over the batch": ({"peft_type": "LILY"}, "(LILY) chooses its parts by the mean"),
    "a second model": ({"peft_type": "SHADOW"}, "(SHADOW) runs a second model"),
    "a module to import": (
        {"megatron_config": {"x": 1}, "megatron_core": "gift"},
        "names a module of Python to import",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_does_not_fit_is_one_line(what, place, shared, tmp_path, monkeypatch):
    changes, reason = REFUSED[what]
    (tmp_path / "gift.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = peft.LoraConfig(r=4, target_modules=LAYERS)
    folder = edited(adapter(tmp_path / "a", place, config), **changes)
    before = snapshot(shared)
    for load in (load_policy, new_reward_model):
        fails(lambda load=load: load(shared, folder), str(folder), reason)
    assert not changed(shared, before) and not (tmp_path / "it-ran").exists()
    assert "gift" not in sys.modules


# Kinds that PEFT cannot merge, or merges wrongly -> what export says.
NOT_MERGED = {
    "with a bias": "the adapter: cannot be merged into its base",
    "OSF": "the adapter: merged into its base it changes log-probabilities by",
}


@pytest.mark.parametrize("kind", ["norms", "layers that repeat", *NOT_MERGED])
def test_an_adapter_is_exported_as_it_computes_or_not_at_all(kind, place, tmp_path, capsys):
    """Also where PEFT's merging swaps layers, and where layers share weights; all kinds sample."""
    config = peft.OSFConfig(target_modules=LAYERS) if kind == "OSF" else KINDS[kind]()
    folder = adapter(tmp_path / "adapter", place, config)
    out = tmp_path / "out"
    words = ["--model", str(place), "--policy", str(folder)]
    assert not main(["generate", *words, "--prompt", "Hi", "--max_response_length", "4"])
    code = main(["export", *words, "--output_dir", str(out)])
    if kind in NOT_MERGED:
        assert code == 2 and not out.exists()
        assert NOT_MERGED[kind] in capsys.readouterr().err.splitlines()[-1]
        return
    fresh = AutoModelForCausalLM.from_pretrained(place)
    expected = logprobs(peft.PeftModel.from_pretrained(fresh, folder))
    found = logprobs(AutoModelForCausalLM.from_pretrained(out))
    assert not code
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_adapter_that_trl_cannot_train_is_one_line_before_the_run(
    place, pairs, tmp_path, capsys
):
    folder = adapter(tmp_path / "adapter", place, KINDS["AdaLoRA"]())
    words = f"dpo --model {place} --sft {folder} --dataset {pairs} --output_dir {tmp_path / 'out'}"
    assert main(words.split()) == 2 and not (tmp_path / "out").exists()
    assert "DPO, RLOO and GRPO cannot train it" in capsys.readouterr().err.splitlines()[-1]


def test_of_a_model_in_memory_the_active_adapter_is_taken(place, shared):
    """Whatever it is called, and whatever others are there."""
    torch.manual_seed(2)
    fresh = AutoModelForCausalLM.from_pretrained(place)
    model = peft.get_peft_model(fresh, peft.LoraConfig(r=4, target_modules=LAYERS))
    model.add_adapter("mine", peft.LoraConfig(r=2, target_modules=LAYERS))
    for name in ("default", "mine"):
        model.set_adapter(name)
        nudge(model, 1)
        taken = logprobs(load_policy(shared, model))
        torch.testing.assert_close(taken, logprobs(model), rtol=0, atol=1e-4)
    model.base_model.set_adapter(["default", "mine"])
    reason = "PeftModel in memory: not one adapter of it is active (default, mine)"
    fails(lambda: load_policy(shared, model), reason)


def test_an_adapter_of_a_deeper_model_is_refused(place, shared, tokenizer, tmp_path):
    """Else its upper half would be left out, without a word."""
    deeper = llama(tmp_path / "deep", tokenizer, num_hidden_layers=4)
    folder = adapter(tmp_path / "a", deeper, peft.LoraConfig(r=4, target_modules=LAYERS))
    fails(lambda: load_policy(shared, folder), "does not fit --model (the model has no")


def test_an_adapter_of_tokens_alone_has_no_reward_model(place, shared, tmp_path):
    config = peft.TrainableTokensConfig(token_indices=[5, 6], target_modules=["embed_tokens"])
    folder = adapter(tmp_path / "a", place, config)
    assert load_policy(shared, folder)
    fails(lambda: new_reward_model(shared, folder), "(TRAINABLE_TOKENS) takes no head")


# -- whole models -----------------------------------------------------------------------------------------------------


def rewritten(folder, change):
    """Change the dict of a model's weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def without(part):
    def drop(weights):
        for name in [name for name in weights if part in name]:
            del weights[name]

    return drop


def renamed(old, new):
    return lambda weights: weights.update({new: weights.pop(old)})


GAPS = {
    "no head": (without("lm_head"), "its files lack lm_head.weight"),
    "no layer": (without("layers.1."), "its files lack model.layers.1."),
    "no norm": (without("model.norm"), "its files lack model.norm.weight"),
    "another shape": (
        lambda weights: weights.update({"model.norm.weight": torch.ones(5)}),
        "differ in the shape of model.norm.weight",
    ),
    "a layer too many": (
        lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}),
        "its files have model.layers.2.mlp.up_proj.weight",
    ),
    "a bias": (
        lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        "its files have model.layers.0.self_attn.q_proj.bias",
    ),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_base_with_gaps_is_one_line(gap, tokenizer, tmp_path):
    change, reason = GAPS[gap]
    folder = rewritten(llama(tmp_path / "m", tokenizer), change)
    fails(lambda: load_base(ModelConfig(model=str(folder))), f"--model {folder}: ", reason)


HEADS = {
    "another name": (renamed("score.weight", "value_head.weight"), "they have value_head.weight"),
    "a bias": (
        lambda weights: weights.update({"score.bias": torch.ones(1)}),
        "take that bias out of the file",
    ),
    "no layer": (without("layers.1."), "its files lack model.layers.1."),
}


@pytest.mark.parametrize("gap", HEADS)
def test_a_reward_model_with_gaps_is_one_line_before_anything_trains(
    gap, tokenizer, pairs, tmp_path, capsys
):
    """Also in a whole run, whose first stage does not read it, and before answers are sampled to be scored."""
    change, reason = HEADS[gap]
    base = llama(tmp_path / "base", tokenizer)
    sft = adapter(tmp_path / "sft", base, peft.LoraConfig(r=4, target_modules=LAYERS))
    kind = {"kind": LlamaForSequenceClassification, "num_labels": 1}
    folder = rewritten(llama(tmp_path / "rm", tokenizer, **kind), change)
    commands = {
        "run": "--critic_init sft --updates 1",
        "ppo": f"--sft {sft} --critic_init sft --updates 1 --batch_size 4",
        "evaluate": f"--sft {sft} --eval_prompts 2",
    }
    for command, words in commands.items():
        words = f"{command} --model {base} --rm {folder} --dataset {pairs} {words}"
        assert main([*words.split(), "--output_dir", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{folder}: " in error and reason in error, error
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_every_policy_is_tried_before_any_answers(finetune, tokenizer, pairs, tmp_path, capsys):
    """The second one lacks weights: a single line, and no answers of the first."""
    base = llama(tmp_path / "base", tokenizer)
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        if finetune == "full":
            llama(folder, tokenizer)
        else:
            adapter(folder, base, peft.LoraConfig(r=4, target_modules=LAYERS))
    file, lacking = ("model", "lm_head") if finetune == "full" else ("adapter_model", "q_proj")
    weights = load_file(bad / f"{file}.safetensors")
    without(lacking)(weights)
    save_file(weights, bad / f"{file}.safetensors", metadata={"format": "pt"})
    words = (
        f"evaluate --finetune {finetune} --model {base} --sft {good} --policies a={good},b={bad}"
    )
    words += (
        f" --dataset {pairs} --reward builtins:len --eval_prompts 2 --output_dir {tmp_path}/out"
    )
    assert main(words.split()) == 2 and not (tmp_path / "out").exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{bad}: " in error and lacking in error


def test_a_base_with_gaps_is_found_before_all_its_weights_train(tokenizer, pairs, tmp_path, capsys):
    folder = rewritten(llama(tmp_path / "m", tokenizer), without("lm_head"))
    words = f"sft --finetune full --model {folder} --dataset {pairs} --output_dir {tmp_path}/out"
    assert main(words.split()) == 2 and not (tmp_path / "out").exists()
    assert "its files lack lm_head.weight" in capsys.readouterr().err.splitlines()[-1]


def test_a_base_that_reads_what_follows_is_refused(tokenizer, pairs, tmp_path, capsys):
    """Each answer would be told to it; transformers loads such a model as a causal one."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    BertLMHeadModel(config).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    words = f"sft --model {tmp_path}/m --dataset {pairs} --output_dir {tmp_path}/out"
    assert main(words.split()) == 2 and not (tmp_path / "out").exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        "bert models cannot train here: tokens after a text change its log-probabilities" in error
    )


def test_what_is_left_over_of_a_larger_model_is_named_once(tokenizer, tmp_path, capsys):
    """A tower for images, of which a text model has nothing."""
    extra = {"vision.encoder.weight": torch.ones(2)}
    folder = rewritten(llama(tmp_path / "m", tokenizer), lambda weights: weights.update(extra))
    for _ in range(2):
        load_base(ModelConfig(model=str(folder)))
    out = capsys.readouterr().out
    assert out == f"note: --model {folder}: not read from its files: vision.encoder.weight\n"


def test_a_folder_with_a_model_and_an_adapter_is_refused(place, tmp_path):
    """transformers would read the base that the adapter names, wherever that is."""
    folder = shutil.copytree(place, tmp_path / "both")
    adapter(tmp_path / "a", place, peft.LoraConfig(r=4, target_modules=LAYERS))
    shutil.copytree(tmp_path / "a", folder, dirs_exist_ok=True)
    fails(lambda: load_base(ModelConfig(model=str(folder))), f"--model {folder}", "give them apart")


def cut(folder, name):
    """Take the end off a file, as a download that broke off does."""
    file = folder / f"{name}.safetensors"
    file.write_bytes(file.read_bytes()[:-300])
    return folder


def test_a_damaged_file_is_named_with_a_mend_that_works(tokenizer, place, shared, tmp_path):
    """The names of local folders are right: it is of no use to check them."""
    mend = "download or save it again"
    base = cut(llama(tmp_path / "base", tokenizer), "model")
    fails(lambda: load_base(ModelConfig(model=str(base))), f"--model {base}: cannot be", mend)
    kind = {"kind": LlamaForSequenceClassification, "num_labels": 1}
    reward = cut(llama(tmp_path / "rm", tokenizer, **kind), "model")
    fails(lambda: load_score_model(shared, reward), f"{reward}: cannot be loaded", mend)
    config = peft.LoraConfig(r=4, target_modules=LAYERS)
    sft = cut(adapter(tmp_path / "sft", place, config), "adapter_model")
    fails(lambda: load_policy(shared, sft), f"{sft}: cannot be loaded", mend)
    edited(llama(tmp_path / "untyped", tokenizer), "config.json", model_type=None)
    untyped = ModelConfig(model=str(tmp_path / "untyped"))
    fails(lambda: load_base(untyped), "cannot be loaded", mend)


def test_an_index_names_files_of_its_folder_alone(tokenizer, tmp_path):
    """No hash of the folder would cover others."""
    folder = llama(tmp_path / "m", tokenizer)
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "../elsewhere.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    reason = "names ../elsewhere.safetensors, which is outside the folder"
    fails(lambda: load_base(ModelConfig(model=str(folder))), reason)


def test_a_base_with_one_number_that_is_none_is_refused(tokenizer, tmp_path):
    """A text that lacks that token would not show it."""

    def spoil(weights):
        weights["model.embed_tokens.weight"][300, 3] = float("nan")

    folder = rewritten(llama(tmp_path / "m", tokenizer), spoil)
    fails(lambda: load_base(ModelConfig(model=str(folder))), "its weights are not finite")


def test_reward_models_from_elsewhere_in_their_forms(tokenizer, shared, place, tmp_path):
    """Older files, another head, none, and an adapter that PEFT has put into a folder of its name."""
    kind = {"kind": LlamaForSequenceClassification, "num_labels": 1}
    whole = llama(tmp_path / "whole", tokenizer, **kind)
    expected = load_score_model(shared, whole).score.weight
    torch.save(load_file(whole / "model.safetensors"), whole / "pytorch_model.bin")
    (whole / "model.safetensors").unlink()
    assert resolve_adapter_dir("rm", str(whole)) == whole
    assert torch.equal(load_score_model(shared, whole).score.weight, expected)

    def saved(name, labels):
        base = LlamaForSequenceClassification.from_pretrained(place, num_labels=labels)
        config = peft.LoraConfig(r=4, target_modules=LAYERS, task_type="SEQ_CLS")
        peft.get_peft_model(base, config, adapter_name=name).save_pretrained(tmp_path / name)
        return tmp_path / name

    two = saved("default", labels=2)
    fails(lambda: load_score_model(shared, two), "it gives 2 numbers a text: give one with 1")
    named = saved("mine", labels=1)
    fails(lambda: resolve_adapter_dir("rm", str(named)), f"give {named / 'mine'}")
    headless = edited(named / "mine", modules_to_save=None)
    weights = load_file(headless / "adapter_model.safetensors")
    without("score")(weights)
    save_file(weights, headless / "adapter_model.safetensors")
    fails(lambda: load_score_model(shared, headless), 'by modules_to_save=["score"]')


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_of_several_templates_the_default_is_taken(tokenizer, tmp_path):
    many = copy.deepcopy(tokenizer)
    many.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "no"}
    many.save_pretrained(tmp_path)
    assert load_tokenizer_of(tmp_path).chat_template == "{{ messages[0].content }}"
    many.chat_template = {"rag": "x", "tool_use": "y"}
    shutil.rmtree(tmp_path)
    many.save_pretrained(tmp_path)
    fails(lambda: load_tokenizer_of(tmp_path), "several chat templates (")


def load_tokenizer_of(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(str(folder))


def test_a_hub_name_whose_cache_has_no_tokenizer(place, tmp_path, monkeypatch):
    commit = "0" * 40
    cached = tmp_path / "models--somebody--theirs"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    for name in ("config.json", "model.safetensors"):
        (cached / "snapshots" / commit).mkdir(exist_ok=True)
        shutil.copy(place / name, cached / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_base(ModelConfig(model="somebody/theirs"))
    reason = "--model somebody/theirs: no tokenizer (tokenizer.json): save the tokenizer there too"
    fails(lambda: load_tokenizer("somebody/theirs"), reason)


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
BESIDE = {
    "another template": ({"chat_template": TEMPLATE}, "another chat template than --model"),
    "another end": ({"eos_token": "<mask>"}, "ends texts by <mask>"),
}


@pytest.mark.parametrize("what", BESIDE)
def test_a_tokenizer_beside_an_adapter_is_the_one_in_use(
    what, tiny, sft, pairs, tokenizer, tmp_path, capsys
):
    """In training and for answers; a copy of the one in use, and one with a token for padding more, change nothing."""
    changes, reason = BESIDE[what]
    folder = shutil.copytree(sft, tmp_path / "adapter")
    words = {
        "rm": f"rm --sft {folder} --dataset {pairs} --rm_epochs 0.1 --output_dir",
        "export": f"export --policy {folder} --output_dir",
    }
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"pad_token": "<another pad>"})
    own.save_pretrained(folder)
    for name, command in words.items():
        assert not main([*command.split(), str(tmp_path / name), "--model", tiny.model])
    for name, value in changes.items():
        setattr(own, name, value)
    own.save_pretrained(folder)
    capsys.readouterr()
    for name, command in words.items():
        out = tmp_path / f"{name} again"
        assert main([*command.split(), str(out), "--model", tiny.model]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert str(folder) in error and reason in error and not out.exists()
    if "chat_template" in changes:
        advice = ["--chat_template", str(folder / "chat_template.jinja")]
        for name, command in words.items():
            out = str(tmp_path / f"{name} again")
            assert not main([*command.split(), out, "--model", tiny.model, *advice])


TEMPLATE_ALONE = {
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}),
}


@pytest.mark.parametrize("file", TEMPLATE_ALONE)
def test_a_template_beside_an_adapter_counts_without_its_tokenizer(file, tokenizer, tmp_path):
    (tmp_path / file).write_text(TEMPLATE_ALONE[file])
    reason = "its tokenizer has another chat template than --model base"
    fails(lambda: check_tokenizer_beside(tmp_path, tokenizer, "base", "auto"), reason)
    check_tokenizer_beside(tmp_path, tokenizer, "base", "none")


def test_an_end_beside_an_adapter_counts_without_its_tokenizer(tokenizer, tmp_path):
    end = {"content": "<mask>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    reason = "its tokenizer ends texts by <mask>, that of --model base by <eos>"
    fails(lambda: check_tokenizer_beside(tmp_path, tokenizer, "base", "auto"), reason)


def test_a_tokenizer_beside_an_adapter_cuts_texts_alike(tokenizer, tmp_path):
    """Equal vocabularies are not enough: one does not begin texts by BOS, and one joins fewer tokens."""
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer_beside(tmp_path, tokenizer, "base", "auto")
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    fewer_joins = values["model"] | {"merges": values["model"]["merges"][:20]}
    for name, value in {"post_processor": None, "model": fewer_joins}.items():
        file.write_text(json.dumps(values | {name: value}))
        reason = "makes other tokens of a text than that of --model base"
        fails(lambda: check_tokenizer_beside(tmp_path, tokenizer, "base", "auto"), reason)


def test_the_tokenizer_of_a_reward_model_is_named_by_its_option(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.eos_token = None
    own.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    reason = f"--rm {tmp_path}: its tokenizer has no EOS token"
    fails(lambda: load_tokenizer(str(tmp_path), option="rm"), reason)

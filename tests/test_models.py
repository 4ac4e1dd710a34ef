"""Four roles over one base: what they share, what is their own, what they start from, what is saved; LoRA layers."""

import copy
from dataclasses import replace

import datasets
import pytest
import torch
from conftest import changed, fails, nudge, snapshot
from peft import LoraConfig, get_peft_model, load_peft_weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from marlhf_lite.config.options import (
    DataConfig,
    ModelConfig,
    PPOTrainerConfig,
    RewardModelConfig,
    SFTStageConfig,
)
from marlhf_lite.extras.memory.estimate import empty_base
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.actor_critic import ScalarHeadModel, trainable
from marlhf_lite.models.adapters import resolve_adapter_dir
from marlhf_lite.models.fast.lora import use_merged_forward
from marlhf_lite.models.loading import (
    build_models,
    load_base,
    load_policy,
    load_score_model,
    load_tokenizer,
    model_path,
    new_policy,
    new_reward_model,
)
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.sft import train_sft

NAMES = ("policy", "reference", "reward", "critic")
IDS = torch.tensor([[2, 40, 50, 60, 70, 80], [2, 45, 55, 65, 75, 85]])
LAYERS, TARGETS = 2, 7  # q, k, v, o, gate, up, down


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def scores(model):
    model.eval()
    with torch.no_grad():
        return ScalarHeadModel(model)(IDS, torch.ones_like(IDS))


def adapter(model):
    return {
        k: v for k, v in model.named_parameters() if "lora_" in k or "score.modules_to_save" in k
    }


# -- what is shared ---------------------------------------------------------------------------------------------------


def test_roles_share_every_base_weight_and_buffer_and_train_what_is_their_own(base, roles):
    pointers = {v.data_ptr() for v in [*base.parameters(), *base.buffers()]}
    for name in NAMES:
        model = getattr(roles, name).model
        here = {v.data_ptr() for v in [*model.parameters(), *model.buffers()]}
        own = {v.data_ptr() for k, v in model.named_parameters() if "lora_" in k or "score" in k}
        missing = pointers - here
        assert not missing, f"{name} copied {len(missing)} tensors of the base"
        assert here - pointers == own, (
            f"{name} holds something that is neither base, adapter nor head"
        )
        trains = {k for k, p in model.named_parameters() if p.requires_grad}
        assert trains == (set(adapter(model)) if name in ("policy", "critic") else set())


def test_no_two_roles_share_a_weight_of_their_own(roles):
    seen = {}
    for name in NAMES:
        for key, value in adapter(getattr(roles, name).model).items():
            assert value.data_ptr() not in seen, (
                f"{name} {key} is also {seen.get(value.data_ptr())}"
            )
            seen[value.data_ptr()] = (name, key)


# -- what starts from what --------------------------------------------------------------------------------------------


def test_reward_model_starts_from_the_sft_adapter(base, sft, fresh):
    model = new_reward_model(base, sft)
    lora = {k: v for k, v in adapter(model).items() if "lora_" in k}
    policy = dict(adapter(fresh()))
    assert lora.keys() == policy.keys() and len(lora) == 2 * TARGETS * LAYERS
    assert all(torch.equal(v, policy[k]) and v.abs().sum() > 0 for k, v in lora.items())
    causal, classifier = fresh().get_base_model(), model.get_base_model()
    with torch.no_grad():
        assert torch.equal(causal.model(input_ids=IDS)[0], classifier.model(input_ids=IDS)[0])


def test_critic_starts_as_the_reward_model(roles):
    ours, theirs = adapter(roles.critic.model), adapter(roles.reward.model)
    assert ours.keys() == theirs.keys() and any("score" in k for k in ours)
    assert all(torch.equal(v, theirs[k]) for k, v in ours.items())
    assert torch.equal(scores(roles.critic.model), scores(roles.reward.model))
    assert scores(roles.critic.model).std() > 0.01


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_models_in_memory_start_the_roles_as_their_folders_do(finetune, tiny, tokenizer, tmp_path):
    options = replace(tiny, finetune=finetune)
    base = load_base(options)
    sft = nudge(new_policy(base, options), 1)
    rm = nudge(new_reward_model(base, sft), 2)
    sft.save_pretrained(tmp_path / "sft")
    rm.save_pretrained(tmp_path / "rm")
    before = snapshot(sft), snapshot(rm)
    for critic_init in ("rm", "sft"):
        from_folders = build_models(base, tmp_path / "sft", tmp_path / "rm", critic_init)
        from_memory = build_models(base, sft, rm, critic_init)
        for name in NAMES:
            saved = dict(getattr(from_folders, name).named_parameters())
            own = dict(getattr(from_memory, name).named_parameters())
            assert own.keys() == saved.keys()
            assert all(torch.equal(own[key], saved[key]) for key in own)
            assert all(own[key].requires_grad == saved[key].requires_grad for key in own)
    trainer = PPOTrainer(
        from_memory,
        tokenizer,
        ["a b c"],
        ModelReward(from_memory.reward),
        FixedNGram(2),
        PPOTrainerConfig(updates=1, batch_size=2, max_response_length=4),
    )
    trainer.train()
    assert changed(from_memory.policy, snapshot(from_folders.policy))
    assert not changed(sft, before[0]) and not changed(rm, before[1])


def test_ppo_starts_from_the_base_itself(base, tiny):
    policy = build_models(base, new_policy(base, tiny), None).policy
    assert torch.equal(logits(policy.model), logits(base))


def test_a_model_in_memory_that_does_not_fit_is_named(base, tiny):
    config = copy.deepcopy(base.config)
    config.num_labels = 2
    two_labels = AutoModelForSequenceClassification.from_config(config)
    start = new_policy(base, tiny)
    fails(
        lambda: build_models(base, start, two_labels),
        "GemmaForSequenceClassification in memory: it gives 2 numbers",
        "give one with 1",
    )
    config.hidden_size = 48
    other = new_policy(AutoModelForCausalLM.from_config(config), tiny)
    fails(lambda: build_models(base, other, None), "ForCausalLM in memory: does not fit --model")


@pytest.mark.parametrize("with_rm", [True, False])
def test_critic_from_sft(base, sft, rm, with_rm):
    roles = build_models(base, sft, rm if with_rm else None, critic_init="sft")
    assert (roles.reward is not None) == with_rm
    start = load_peft_weights(str(sft))
    lora = {
        k.replace(".default", ""): v for k, v in adapter(roles.critic.model).items() if "lora_" in k
    }
    assert lora.keys() == start.keys() and all(torch.equal(v, start[k]) for k, v in lora.items())
    assert trainable(roles.critic)


@pytest.mark.parametrize("with_rm", [True, False])
def test_a_new_head_of_zero_gives_values_of_zero_and_learns(base, sft, rm, with_rm):
    roles = build_models(
        base, sft, rm if with_rm else None, critic_init="sft", critic_head_init="zero"
    )
    values = roles.critic(IDS, torch.ones_like(IDS))
    assert not values.any()
    (values - 1.0).square().sum().backward()
    (head,) = (
        p for name, p in roles.critic.named_parameters() if "score" in name and p.requires_grad
    )
    assert head.grad.norm() > 0
    normal = build_models(base, sft, rm if with_rm else None, critic_init="sft").critic
    assert normal(IDS, torch.ones_like(IDS)).std() > 1e-3
    if with_rm:  # the head of the reward model stays
        kept = build_models(base, sft, rm, critic_init="rm", critic_head_init="zero").critic
        assert torch.equal(scores(kept.model), scores(roles.reward.model))


# -- scores -----------------------------------------------------------------------------------------------------------


def test_bfloat16_base_keeps_adapters_and_results_in_float32(tiny, sft, rm):
    half = load_base(ModelConfig(model=tiny.model, dtype="bfloat16"))
    roles = build_models(half, sft, rm)
    mask = torch.ones_like(IDS)
    assert next(half.parameters()).dtype == torch.bfloat16
    assert {p.dtype for r in (roles.policy, roles.critic) for p in trainable(r)} == {torch.float32}
    assert roles.policy(IDS, mask, 2)[0].dtype == roles.critic(IDS, mask).dtype == torch.float32


# -- training changes what it should ----------------------------------------------------------------------------------


def ppo_trainer(roles, tokenizer, **options):
    ppo = PPOTrainerConfig(
        updates=1, batch_size=4, micro_batch_size=4, max_response_length=5, **options
    )
    reward = ModelReward(roles.reward)
    return PPOTrainer(roles, tokenizer, ["a", "b c", "d"], reward, FixedNGram(2), ppo)


def test_no_stage_changes_the_base(base, tiny, tokenizer, tmp_path):
    before, grads = (
        snapshot(base),
        lambda: [p for p in base.parameters() if p.grad is not None or p.requires_grad],
    )
    data = DataConfig(max_response_length=4)
    rows = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "chosen": ["x y", "z"], "rejected": ["q", "r s"]}
    )
    policy = new_policy(base, tiny)
    start = snapshot(policy)
    train_sft(
        policy,
        tokenizer,
        rows,
        SFTStageConfig(sft_epochs=2, sft_batch_size=1),
        data,
        tmp_path / "sft",
    )
    assert changed(policy, start) == set(adapter(policy))
    assert not changed(base, before) and not grads()
    model = new_reward_model(base, tmp_path / "sft")
    start = snapshot(model)
    train_reward_model(
        model,
        tokenizer,
        rows,
        RewardModelConfig(rm_epochs=2, rm_batch_size=1),
        data,
        tmp_path / "rm",
    )
    assert changed(model, start) == set(adapter(model))
    assert not changed(base, before) and not grads()

    roles = build_models(base, tmp_path / "sft", tmp_path / "rm")
    starts = {name: snapshot(getattr(roles, name).model) for name in NAMES}
    ppo_trainer(roles, tokenizer).train()
    for name in NAMES:
        model = getattr(roles, name).model
        moves = set(adapter(model)) if name in ("policy", "critic") else set()
        assert changed(model, starts[name]) == moves, name
    assert not changed(base, before) and not grads()


# -- folders ----------------------------------------------------------------------------------------------------------


def test_saved_adapters_load_back_identically(base, tokenizer, moved, tmp_path):
    trainer = ppo_trainer(moved, tokenizer)
    trainer.save(tmp_path)
    for trainable_again in (True, False):
        again = load_policy(base, tmp_path / "policy", trainable_again)
        assert torch.equal(logits(again), logits(moved.policy.model))
        again = load_score_model(base, tmp_path / "critic", trainable_again)
        assert torch.equal(scores(again), scores(moved.critic.model))
    files = {f.name for f in (tmp_path / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files


def test_bad_folders_say_what_is_wrong(base, sft, tmp_path):
    with pytest.raises(ValueError, match="adapter_config.json"):  # of peft
        load_policy(base, tmp_path)
    fails(lambda: model_path("/nowhere/at/all"), "no such folder")
    (tmp_path / "model.gguf").touch()
    fails(
        lambda: empty_base(ModelConfig(model=str(tmp_path / "model.gguf"))),
        "model.gguf: no such folder",
    )
    fails(
        lambda: model_path(str(tmp_path)),
        "no config.json: give a folder that save_pretrained wrote",
    )
    fails(lambda: model_path(str(sft)), "it holds an adapter")
    for name in ("nobody-here/no-such-model", "models/my model", "models/foo--bar"):
        for look in (model_path, lambda name: empty_base(ModelConfig(model=name))):
            begins = f"--model {name}: no such folder, and the hub does not give it"
            fails(lambda look=look, name=name: look(name), begins, "check the name and the network")
    (tmp_path / "config.json").write_text("{}")
    fails(lambda: model_path(str(tmp_path)), "no tokenizer")


def test_a_tokenizer_without_eos_is_refused(base, tokenizer, tmp_path):
    """No response could end."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fails(
        lambda: load_tokenizer(str(tmp_path)),
        f"--model {tmp_path}: its tokenizer has no EOS token: set eos_token",
    )


def test_truncated_weights_are_refused(base, tokenizer, tmp_path):
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    fails(lambda: load_base(ModelConfig(model=str(tmp_path))), "cannot be loaded")


def test_an_adapter_of_another_base_is_refused(base, tokenizer, tmp_path):
    new_policy(base, ModelConfig(lora_r=2)).save_pretrained(tmp_path / "a")
    other = load_base(ModelConfig(model="tiny-gemma"))
    fails(lambda: load_policy(other, tmp_path / "a"), "does not fit --model")


# -- LoRA layers against the forward pass of PEFT ---------------------------------------------------------------------


@pytest.fixture
def pair():
    """`(PEFT's layer, the same one with the merged forward pass)`, with an adapter that is not 0."""
    return make_pair()


def make_pair(dtype=torch.float32, width=24, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 40)).to(dtype)
    plain = get_peft_model(net, LoraConfig(r=4, lora_alpha=8, target_modules=["0"], **settings))
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return plain, use_merged_forward(copy.deepcopy(plain))


def outputs_and_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def test_outputs_and_gradients_are_those_of_peft(pair):
    x = torch.randn(3, 7, 24)
    theirs, ours = (outputs_and_gradients(model, x) for model in pair)
    # output, input, A and B; none of the frozen weight
    assert theirs.keys() == ours.keys() and len(ours) == 4
    # float32 sums in another order: relative to the largest element
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=0, atol=2e-6 * float(expected.abs().max())
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_errors_are_those_of_peft(dtype):
    """Against float64: outputs and gradients are as near as PEFT's, which computes its adapter in float32."""
    plain, ours = make_pair(dtype=dtype, width=96)
    with torch.no_grad():
        for name, weight in [*plain.named_parameters(), *ours.named_parameters()]:
            if "lora_B" in name:
                weight.mul_(0.02)  # a small change of the layer's output
    x = torch.randn(30, 7, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = outputs_and_gradients(copy.deepcopy(plain).double(), x.double())
    theirs, mine = (outputs_and_gradients(model, x) for model in (plain, ours))
    assert mine.keys() == theirs.keys() == exact.keys() and len(mine) == 4
    assert all(mine[name].dtype == theirs[name].dtype for name in mine)
    for name, right in exact.items():
        error, other = (
            (found[name].double() - right).square().mean().sqrt() for found in (mine, theirs)
        )
        cosine = torch.cosine_similarity(mine[name].double().flatten(), right.flatten(), dim=0)
        assert cosine > 0.9999 and (error <= 1.1 * other if name in ("y", "x") else True)
    with plain.disable_adapter():
        change = exact["y"] - plain.double()(x.double())
    assert (mine["y"].double() - exact["y"]).norm() < 0.2 * change.norm()  # the adapter is there


def test_gradients_in_float16_do_not_overflow():
    """Each product fits, and their sum over tokens does not: half of the sum is beyond float16."""
    ours = make_pair(dtype=torch.float16)[1]
    x = torch.full((4096, 24), 8.0, dtype=torch.float16, requires_grad=True)
    (ours(x).float().sum() * 16).backward()
    grads = [p.grad for name, p in ours.named_parameters() if "lora_" in name]
    assert all(grad.isfinite().all() for grad in grads) and grads[1].abs().max() > 65504


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_other_layers_take_the_forward_pass_of_peft(settings):
    plain, ours = make_pair(**settings)
    x = torch.randn(3, 24)
    results = []
    for model in (plain.train(), ours.train()):
        torch.manual_seed(1)
        results.append(outputs_and_gradients(model, x))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_switched_off_and_merged_adapters(pair):
    x = torch.randn(3, 24)
    plain, ours = pair
    with ours.disable_adapter(), plain.disable_adapter():
        assert torch.equal(ours(x), plain(x))
    expected = plain(x)
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    assert type(ours.merge_and_unload()[0]) is nn.Linear


def test_the_run_of_a_stage_that_was_stopped_is_named(tmp_path):
    for step in (2, 12):
        (tmp_path / "sft" / f"checkpoint-{step}").mkdir(parents=True)
    for option, said in {
        "sft": f"by --resume, or give {tmp_path}/sft/checkpoint-",
        "rm": "`marlhf rm` wrote",
    }.items():
        fails(lambda: resolve_adapter_dir(option, str(tmp_path)), said)  # noqa: B023

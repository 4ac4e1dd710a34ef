"""Responses: answered, stored, resumed, scored anew: checkpoints by temperatures by prompts by samples."""

import copy
import json
import shutil

import pytest
import torch
from conftest import fails, nudge

from marlhf_lite.evaluation import responses as module
from marlhf_lite.evaluation.responses import (
    HeldOutPrompts,
    ResponseStore,
    answer,
    evaluate_checkpoints,
    restore,
)
from marlhf_lite.evaluation.scores import Scorers, to_frame
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.loading import load_policy, load_score_model, new_reward_model
from marlhf_lite.tasks.chats import expect_chats
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.utils.contents import model_hash
from marlhf_lite.utils.errors import InputError


@pytest.fixture(scope="session")
def ppo(base, sft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    nudge(load_policy(base, sft), 7, 0.03).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rm2(base, sft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm2")
    nudge(new_reward_model(base, sft, 1), 8).save_pretrained(folder)
    return folder


@pytest.fixture
def generated(monkeypatch):
    """How many responses were generated, batch by batch."""
    sizes, generate = [], module.generate_seeded

    def counted(model, tokenizer, prompts, *rest):
        sizes.append(len(prompts))
        return generate(model, tokenizer, prompts, *rest)

    monkeypatch.setattr(module, "generate_seeded", counted)
    return sizes


@pytest.fixture
def evaluate(base, sft, rm, ppo, tokenizer, texts, tmp_path):
    def run(names=("SFT", "PPO"), out=tmp_path / "out", prompts=None, **how):
        scorers = {
            "load": lambda path: PolicyModel(load_policy(base, path, trainable=False)),
            "reference": sft,
            "rm": rm,
            "load_rm": lambda path: ScalarHeadModel(load_score_model(base, path)),
            "gold": lambda p, r: [float(len(x)) for x in r],
        }
        scorers |= {name: how.pop(name) for name in list(how) if name in scorers}
        places = {"SFT": sft, "PPO": ppo}
        how = {
            "sampling": Sampling(8, 0.8),
            "seed": 3,
            "batch_size": 5,
            "temperatures": (0.5, 1.0),
            "samples": 2,
        } | how
        options = {
            name: how.pop(name) for name in ("temperatures", "samples", "model") if name in how
        }
        held_out = HeldOutPrompts(
            prompts or texts.prompts,
            **{"tokenizer": tokenizer, "sampler": module.generate_seeded} | how,
        )
        checkpoints = {name: places[name] for name in names}
        return evaluate_checkpoints(
            checkpoints, Scorers(**scorers), held_out, out, **options
        ).to_dict("records")

    return run


def responses(rows):
    return [
        (row["method"], row["temperature"], row["prompt"], row["sample"], row["response"])
        for row in rows
    ]


def test_rows_come_by_checkpoint_temperature_prompt_and_sample(evaluate, texts):
    rows = evaluate()
    assert [row[:4] for row in responses(rows)] == [
        (m, t, p, k)
        for m in ("SFT", "PPO")
        for t in (0.5, 1.0)
        for p in texts.prompts
        for k in (0, 1)
    ]
    for row in rows:
        assert row["gold"] == len(row["response"]) and row["tokens"] == len(row["token_ids"]) <= 8
        assert row["ended"] or row["tokens"] == 8
        assert (row["kl"] == 0) == (row["method"] == "SFT")
    assert len({row["response"] for row in rows}) > len(rows) // 2


@torch.no_grad()
@pytest.mark.parametrize("wrong", [float("nan"), None, "good"])
def test_a_gold_score_that_is_no_number_is_named(evaluate, wrong):
    def mine(prompts, responses):
        return [wrong] * len(responses)

    fails(lambda: evaluate(["SFT"], gold=mine), "reward mine: ", str(wrong))
    fails(lambda: evaluate(["SFT"], gold=lambda p, r: [0.1]), "shape (1,) for 5 responses")
    # as it was given
    assert {row["gold"] for row in evaluate(["SFT"], gold=lambda p, r: [0.1] * len(r))} == {0.1}


def test_scores_are_those_of_the_tokens_read_alone(evaluate, base, sft, rm, ppo, tokenizer):
    policy, reference = (
        PolicyModel(load_policy(base, path, trainable=False)) for path in (ppo, sft)
    )
    reward = ScalarHeadModel(load_score_model(base, rm)).eval()
    for row in evaluate(names=["PPO"]):
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = torch.tensor([prompt + row["token_ids"]])
        mask, count = torch.ones_like(tokens), len(row["token_ids"])
        gaps = policy(tokens, mask, count)[0] - reference(tokens, mask, count)[0]
        assert row["kl"] == pytest.approx(gaps.sum().item(), abs=1e-3)
        assert row["kl_k3"] == pytest.approx(((-gaps).exp() - 1 + gaps).sum().item(), abs=1e-3)
        assert row["rm_score"] == pytest.approx(reward(tokens, mask)[0, -1].item(), abs=1e-4)


def test_answers_to_prompts_that_were_read_as_other_tokens_are_not_used_again(
    evaluate, tokenizer, tmp_path
):
    """A chat template's special tokens are read as such; other templates end turns otherwise."""
    one = {"names": ["SFT"], "temperatures": (0.5,), "samples": 1}
    chats, others = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    for each, end in ((chats, "<eos>"), (others, "<bos>")):
        each.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        expect_chats(each)
        each.eos_token = end
    found = [
        responses(evaluate(**one, tokenizer=each)) for each in (tokenizer, chats, others, tokenizer)
    ]
    alone = [
        responses(evaluate(**one, tokenizer=each, out=tmp_path / "alone"))
        for each in (chats, others)
    ]
    assert found == [found[0], *alone, found[0]] and found[0] != found[1]
    assert len(list((tmp_path / "out").iterdir())) == 3


def refuse(path):
    raise AssertionError(f"{path} was loaded")


def test_only_what_is_new_is_loaded_and_generated(evaluate, generated, texts):
    rows = evaluate(names=["SFT"], temperatures=(0.5,), samples=1, prompts=texts.prompts[:4])
    more = evaluate(names=["SFT"], temperatures=(0.0, 0.5), samples=3, prompts=texts.prompts[:4])
    assert sum(generated) == 4 + 8 + 4  # greedy responses have one sample
    assert responses(rows) == [row for row in responses(more) if row[1] == 0.5 and row[3] == 0]
    assert (
        evaluate(
            names=["SFT"],
            temperatures=(0.0, 0.5),
            samples=3,
            prompts=texts.prompts[:4],
            load=refuse,
        )
        == more
    )
    twice = evaluate(
        names=["SFT"], temperatures=(), samples=1, prompts=["Why?", "a", "Why?"], batch_size=1
    )
    assert len({row["id"] for row in twice}) == 3 and {row["temperature"] for row in twice} == {0.8}


def test_scores_come_later_and_go_where_they_are_not_asked_for(evaluate, generated):
    plain = evaluate(rm=None, reference=None, gold=None, names=["PPO"])
    assert {"rm_score", "kl", "kl_k3", "gold", "rm", "reference"}.isdisjoint(plain[0])
    scored = evaluate(names=["PPO"])
    assert sum(generated) == 24 and {"rm_score", "kl", "gold"} <= scored[0].keys()
    assert evaluate(rm=None, reference=None, gold=None, names=["PPO"], load=refuse) == plain


def test_an_interrupted_evaluation_goes_on_where_it_was(evaluate, generated, monkeypatch, tmp_path):
    whole = evaluate(out=tmp_path / "whole")
    del generated[:]
    add, count, batches = ResponseStore.add, iter(range(100)), 4

    def killed(self, rows):
        if next(count) == batches:
            add(self, rows[:2])
            raise KeyboardInterrupt
        add(self, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ResponseStore, "add", killed)
        evaluate()
    before = sum(generated)
    broken = next((tmp_path / "out").glob("*/samples.jsonl"))
    broken.write_bytes(broken.read_bytes()[:-5])  # and its last line was cut off
    again = evaluate()
    assert responses(again) == responses(whole)
    for name in ("rm_score", "kl", "gold"):
        assert [row[name] for row in again] == pytest.approx([row[name] for row in whole], abs=1e-4)
    stored = sum(generated[:batches]) + 2 - 1
    assert sum(generated) - before == 48 - stored


def test_where_memory_ends_fewer_at_a_time_give_the_same(
    evaluate, generated, monkeypatch, tmp_path
):
    """Batches of 5 do not fit, nor do those of 2; of one, all fit, or none does."""
    whole, generate = evaluate(out=tmp_path / "whole"), module.generate_seeded

    def allocate(limit):
        def some(model, tokenizer, prompts, *rest):
            if len(prompts) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return generate(model, tokenizer, prompts, *rest)

        monkeypatch.setattr(module, "generate_seeded", some)

    allocate(1)
    del generated[:]
    assert responses(evaluate()) == responses(whole) and set(generated) == {1}
    allocate(0)
    with pytest.raises(InputError, match="out of memory .*--max_response_length"):
        evaluate(out=tmp_path / "none")


def test_another_reward_model_scores_the_same_responses_anew(evaluate, generated, rm2, tmp_path):
    few = {"names": ["PPO"], "temperatures": (0.5,)}
    old, new = evaluate(**few), evaluate(**few, rm=rm2)
    assert sum(generated) == 12 and responses(new) == responses(old)
    fresh = evaluate(**few, rm=rm2, out=tmp_path / "fresh")
    for name in ("rm_score", "kl", "gold"):
        assert [row[name] for row in new] == pytest.approx([row[name] for row in fresh], abs=1e-4)
    assert all(a["rm_score"] != b["rm_score"] and a["rm"] != b["rm"] for a, b in zip(new, old))
    assert (
        evaluate(**few, rm=rm2, load=refuse) == new
        and len(list((tmp_path / "out").glob("*/samples.jsonl"))) == 1
    )


# Fingerprints


def test_a_fingerprint_is_of_weights_and_not_of_places_or_the_order_of_sets(ppo, sft, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ppo, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    other = {
        "base_model_name_or_path": "elsewhere",
        "target_modules": config["target_modules"][::-1],
    }
    assert len(config["target_modules"]) > 1
    (copy / "adapter_config.json").write_text(json.dumps(config | other))
    assert model_hash(copy) == model_hash(ppo) != model_hash(sft)
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    assert model_hash(copy) != model_hash(ppo)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: shutil.rmtree(path),
        lambda path: (path / "adapter_model.safetensors").unlink(),
        lambda path: (path / "adapter_config.json").write_text("{"),
    ],
)
def test_a_missing_checkpoint_is_named_before_anything_loads(ppo, sft, tokenizer, tmp_path, spoil):
    broken, out = tmp_path / "broken", tmp_path / "out"
    shutil.copytree(ppo, broken)
    spoil(broken)
    given = (
        {"SFT": sft, "MA-PPO": broken},
        Scorers(refuse),
        HeldOutPrompts(["a"], tokenizer, Sampling(4)),
        out,
    )
    fails(lambda: evaluate_checkpoints(*given), f"MA-PPO: {broken}")
    assert not out.exists()


# Options


# Answers of a loaded policy


def test_answers_have_the_columns_and_the_numbers_of_an_evaluation(
    evaluate, base, sft, ppo, rm, tokenizer, texts
):
    """The same responses and scores as by folder; the policy is left in evaluation mode."""
    policy, reference = (
        PolicyModel(load_policy(base, path, trainable=False)) for path in (ppo, sft)
    )
    reward = ModelReward(ScalarHeadModel(load_score_model(base, rm)))
    policy.train()
    held_out = HeldOutPrompts(texts.prompts, tokenizer, Sampling(8, 0.8), seed=3, batch_size=4)
    rows = answer(
        policy, reference, held_out, reward, lambda p, r: [float(len(x)) for x in r], "PPO"
    )
    rows = rows.to_dict("records")
    stored = evaluate(names=["PPO"], temperatures=(), samples=1)
    assert not policy.training and all(p.grad is None for p in policy.parameters())
    assert rows[0].keys() == stored[0].keys() - {"reference", "rm"} and len(rows) == len(
        texts.prompts
    )
    for row, other in zip(rows, stored):
        for name, value in row.items():
            assert value == (
                pytest.approx(other[name], abs=1e-3)
                if name in ("kl", "kl_k3", "rm_score")
                else other[name]
            )


# Stores

SETTINGS = {"temperature": 0.8, "fingerprint": "abc", "top_k": 50}


def row(id="p", **more):
    plain = {
        "prompt": f"prompt {id}",
        "method": "PPO",
        "response": "yes",
        "token_ids": [5, 1],
        "ended": True,
    }
    return {"id": id, "sample": 0, "seed": 0, "temperature": 0.8} | plain | more


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a"), row("b"), row("a")], "id a of PPO"),
        ([row("a"), {k: v for k, v in row().items() if k != "response"}], "row 2: no response"),
        ([row("a", rm_score=float("inf"))], "row 1: rm_score"),
        ([row(token_ids=None)], "row 1: no token_ids"),
    ],
)
def test_faulty_stores_are_named(tmp_path, rows, words):
    path = ResponseStore(tmp_path, "PPO", SETTINGS).path
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fails(lambda: ResponseStore(tmp_path, "PPO", SETTINGS), str(path), words)


def test_restored_responses_are_the_very_tokens(moved, tokenizer, texts):
    torch.manual_seed(0)
    rollout = generate(moved.policy.eval().model, tokenizer, texts.prompts, Sampling(8))
    ids = [row[m].tolist() for row, m in zip(rollout.response_ids, rollout.mask)]
    columns = {"prompt": rollout.prompts, "response": rollout.responses, "token_ids": ids}
    rows = [
        dict(zip(columns, row), method="PPO", ended=bool(e))
        for *row, e in zip(*columns.values(), rollout.ended)
    ]
    again = restore(tokenizer, to_frame(rows))
    assert again.prompts == rollout.prompts and again.responses == rollout.responses
    for name in ("attention_mask", "mask", "ended"):
        assert torch.equal(getattr(again, name), getattr(rollout, name))
    attended = rollout.attention_mask.bool()
    assert torch.equal(again.tokens[attended], rollout.tokens[attended])

"""Responses: answered, stored, resumed, scored anew: checkpoints by temperatures by prompts by samples."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import nudge

from marlhf_lite.config.options import EvaluationConfig
from marlhf_lite.evaluation import responses as module
from marlhf_lite.evaluation.responses import (
    ResponseStore,
    answer,
    evaluate_checkpoints,
    fingerprint,
    restore,
)
from marlhf_lite.evaluation.scores import Scorers, to_frame
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.loading import load_policy, load_score_model, new_reward_model
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling, generate
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
        how = {"temperatures": (0.5, 1.0), "samples": 2, "seed": 3, "batch_size": 5} | how
        return evaluate_checkpoints(
            {name: places[name] for name in names}, Scorers(**scorers), tokenizer, prompts or texts.prompts, out,
            Sampling(8, 0.8), **how,
        ).to_dict("records")  # fmt: skip

    return run


def responses(rows):
    return [(row["method"], row["temperature"], row["prompt"], row["sample"], row["response"]) for row in rows]


def test_rows_come_by_checkpoint_temperature_prompt_and_sample(evaluate, texts):
    rows = evaluate()
    assert [row[:4] for row in responses(rows)] == [
        (m, t, p, k) for m in ("SFT", "PPO") for t in (0.5, 1.0) for p in texts.prompts for k in (0, 1)
    ]
    for row in rows:
        assert row["gold"] == len(row["response"]) and row["tokens"] == len(row["token_ids"]) <= 8
        assert row["ended"] or row["tokens"] == 8
        assert (row["kl"] == 0) == (row["method"] == "SFT")
    assert len({row["response"] for row in rows}) > len(rows) // 2


@torch.no_grad()
def test_scores_are_those_of_the_tokens_read_alone(evaluate, base, sft, rm, ppo, tokenizer):
    policy, reference = (PolicyModel(load_policy(base, path, trainable=False)) for path in (ppo, sft))
    reward = ScalarHeadModel(load_score_model(base, rm)).eval()
    for row in evaluate(names=["PPO"]):
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = torch.tensor([prompt + row["token_ids"]])
        mask, count = torch.ones_like(tokens), len(row["token_ids"])
        kl = policy(tokens, mask, count)[0].sum() - reference(tokens, mask, count)[0].sum()
        assert row["kl"] == pytest.approx(kl.item(), abs=1e-3)
        assert row["rm_score"] == pytest.approx(reward(tokens, mask)[0, -1].item(), abs=1e-4)


def refuse(path):
    raise AssertionError(f"{path} was loaded")


def test_nothing_is_loaded_or_generated_twice(evaluate, generated):
    rows = evaluate()
    assert sum(generated) == 48
    assert evaluate(load=refuse, load_rm=refuse) == rows
    assert sum(generated) == 48


def test_only_what_is_new_is_generated(evaluate, generated, texts):
    rows = evaluate(names=["SFT"], temperatures=(0.5,), samples=1, prompts=texts.prompts[:4])
    more = evaluate(names=["SFT"], temperatures=(0.5,), samples=3, prompts=texts.prompts[:4])
    assert sum(generated) == 4 + 8
    assert responses(rows) == [row for row in responses(more) if row[3] == 0]
    evaluate(names=["SFT"], temperatures=(0.5, 1.0), samples=1)
    assert sum(generated) == 12 + 2 + 6
    assert responses(evaluate(names=["SFT"], temperatures=(0.5,), samples=1, seed=4))[:4] != responses(rows)


@pytest.mark.parametrize("batches", [0, 4])
def test_an_interrupted_evaluation_goes_on_where_it_was(evaluate, generated, monkeypatch, tmp_path, batches):
    whole = evaluate(out=tmp_path / "whole")
    del generated[:]
    add, count = ResponseStore.add, iter(range(100))

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


def test_batches_change_nothing_but_rounding(evaluate, tmp_path):
    assert responses(evaluate(out=tmp_path / "a", batch_size=1)) == responses(
        evaluate(out=tmp_path / "b", batch_size=64)
    )


def test_another_reward_model_scores_the_same_responses_anew(evaluate, generated, rm2, tmp_path):
    old = evaluate()
    new = evaluate(rm=rm2)
    assert sum(generated) == 48 and responses(new) == responses(old)
    fresh = evaluate(rm=rm2, out=tmp_path / "fresh")
    for name in ("rm_score", "kl", "gold"):
        assert [row[name] for row in new] == pytest.approx([row[name] for row in fresh], abs=1e-4)
    assert all(a["rm_score"] != b["rm_score"] and a["rm"] != b["rm"] for a, b in zip(new, old))
    assert len(list((tmp_path / "out").glob("*/samples.jsonl"))) == 4


def test_scores_come_later_and_go_where_they_are_not_asked_for(evaluate, generated):
    plain = evaluate(rm=None, reference=None, gold=None, names=["PPO"])
    assert {"rm_score", "kl", "gold", "rm", "reference"}.isdisjoint(plain[0])
    scored = evaluate(names=["PPO"])
    assert sum(generated) == 24 and {"rm_score", "kl", "gold"} <= scored[0].keys()
    assert evaluate(rm=None, reference=None, gold=None, names=["PPO"], load=refuse) == plain


def test_greedy_has_one_sample(evaluate):
    rows = evaluate(names=["SFT"], temperatures=(0.0, 1.0))
    assert [row["temperature"] for row in rows] == [0.0] * 6 + [1.0] * 12
    assert {row["sample"] for row in rows[:6]} == {0}


def test_repeated_prompts_and_the_temperature_of_sampling(evaluate):
    rows = evaluate(names=["SFT"], temperatures=(), samples=1, prompts=["Why?", "a", "Why?"])
    assert [row["prompt"] for row in rows] == ["Why?", "a", "Why?"] and len({row["id"] for row in rows}) == 3
    assert {row["temperature"] for row in rows} == {0.8}


# Fingerprints


def test_a_fingerprint_is_of_weights_and_not_of_places(ppo, sft, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ppo, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    assert fingerprint(copy) == fingerprint(ppo) != fingerprint(sft)
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    assert fingerprint(copy) != fingerprint(ppo)


def test_whole_models_have_fingerprints_too(tiny):
    assert len(fingerprint(tiny.model)) == 12


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: shutil.rmtree(path), "there is no such folder"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "it holds no weights"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "adapter_config.json is damaged"),
        (lambda path: (path / "adapter_config.json").write_text("[]"), "adapter_config.json is damaged"),
    ],
)
def test_a_missing_checkpoint_is_named_before_anything_loads(ppo, sft, tokenizer, tmp_path, spoil, words):
    broken = tmp_path / "broken"
    shutil.copytree(ppo, broken)
    spoil(broken)
    with pytest.raises(InputError, match=f"MA-PPO: {broken}.*{words}"):
        evaluate_checkpoints(
            {"SFT": sft, "MA-PPO": broken}, Scorers(refuse), tokenizer, ["a"], tmp_path / "out", Sampling(4)
        )
    assert not Path(tmp_path / "out").exists()


# Options


def test_numbers_from_options():
    plain = EvaluationConfig()
    assert plain.temperatures == plain.sizes == EvaluationConfig(best_of="  ").sizes == ()
    options = EvaluationConfig(eval_temperatures="1, 0,0.4,1.0", eval_samples=8, best_of="8,1")
    assert (options.temperatures, options.sizes) == ((0.0, 0.4, 1.0), (1, 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eval_temperatures": "0.5,hot"}, "--eval_temperatures 0.5,hot: give numbers from 0 up"),
        ({"eval_temperatures": "-0.5"}, "--eval_temperatures -0.5"),
        ({"eval_temperatures": "inf"}, "--eval_temperatures inf"),
        ({"best_of": "2.5"}, "--best_of 2.5: give whole numbers from 1 up"),
        ({"best_of": "0"}, "--best_of 0"),
        (
            {"best_of": "1,32", "eval_samples": 16},
            "--best_of 1,32: there are 16 samples a prompt: add --eval_samples 32",
        ),
        ({"best_of": "1,,2"}, "--best_of 1,,2"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(InputError, match=words):
        EvaluationConfig(**options)


# Answers of a loaded policy


@pytest.fixture
def ask(moved, tokenizer, texts):
    """Answers of the moved policy, with a reward model and a gold function that counts letters."""

    def run(policy=None, prompts=None, **kwargs):
        prompts = texts.prompts if prompts is None else prompts
        kwargs = {"reward": ModelReward(moved.reward), "gold": lambda p, r: [len(x) for x in r]} | kwargs
        rows = answer(policy or moved.policy, moved.reference, tokenizer, prompts, Sampling(8), **kwargs)
        return rows.to_dict("records")

    return run


def test_answers_have_the_columns_and_the_numbers_of_an_evaluation(evaluate, base, sft, ppo, rm, tokenizer, texts):
    """The same responses and scores as by folder; the policy is left in evaluation mode."""
    policy, reference = (PolicyModel(load_policy(base, path, trainable=False)) for path in (ppo, sft))
    reward = ModelReward(ScalarHeadModel(load_score_model(base, rm)))
    policy.train()
    rows = answer(
        policy, reference, tokenizer, texts.prompts, Sampling(8, 0.8), reward, lambda p, r: [float(len(x)) for x in r],
        name="PPO", seed=3, batch_size=4,
    ).to_dict("records")  # fmt: skip
    stored = evaluate(names=["PPO"], temperatures=(), samples=1)
    assert not policy.training and all(p.grad is None for p in policy.parameters())
    assert rows[0].keys() == stored[0].keys() - {"reference", "rm"} and len(rows) == len(texts.prompts)
    for row, other in zip(rows, stored):
        for name, value in row.items():
            assert value == (pytest.approx(other[name], abs=1e-3) if name in ("kl", "rm_score") else other[name])


def test_columns_only_where_known(ask):
    assert {"rm_score", "gold"}.isdisjoint(ask(reward=None, gold=None)[0])
    assert ask(prompts=[]) == []


def test_random_numbers_belong_to_seed_and_prompt_and_not_to_batches(ask, texts):
    together = [row["response"] for row in ask()]
    torch.rand(5)
    assert [row["response"] for row in ask(batch_size=2)] == together
    assert [row["response"] for row in ask(seed=4)] != together
    assert [row["response"] for row in ask(prompts=texts.prompts[3:])] == together[3:]
    twice = ask(prompts=[texts.prompts[0]] * 6)
    assert len({row["response"] for row in twice}) > 1, "a prompt that comes again has numbers of its own"


def test_the_reference_has_no_distance_to_itself(ask, moved):
    assert all(row["kl"] == 0 for row in ask(moved.reference))
    assert any(row["kl"] != 0 for row in ask())


# Stores

SETTINGS = {"temperature": 0.8, "fingerprint": "abc", "top_k": 50}


def row(id="p", sample=0, **more):
    plain = {"prompt": f"prompt {id}", "method": "PPO", "response": "yes", "token_ids": [5, 1], "ended": True}
    return {"id": id, "sample": sample, "seed": 0, "temperature": 0.8} | plain | more


def keyed(*rows):
    return to_frame(rows).set_index(module.KEY)


def test_what_was_added_is_there_again(tmp_path):
    store = ResponseStore(tmp_path, "PPO", SETTINGS)
    assert not len(store.rows) and not list(tmp_path.iterdir())
    store.add(keyed(row("a"), row("b", response="né\ud83d")))
    store.add(keyed(row("a", 1, rm_score=0.5)))
    again = ResponseStore(tmp_path, "PPO", SETTINGS)
    assert list(again.rows.index) == list(store.rows.index) == [("a", 0, 0), ("b", 0, 0), ("a", 1, 0)]
    pd.testing.assert_frame_equal(again.rows, store.rows)
    assert json.loads((again.folder / "settings.json").read_text()) == {"method": "PPO", **SETTINGS}


def test_every_setting_has_a_folder_of_its_own(tmp_path):
    settings = [SETTINGS, SETTINGS | {"temperature": 1.0}, SETTINGS | {"fingerprint": "abd"}, SETTINGS | {"top_k": 0}]
    folders = {ResponseStore(tmp_path, "MA-PPO n=∞ / ../x", s).folder for s in settings}
    assert len(folders) == 4 and all(folder.parent == tmp_path for folder in folders)
    assert ResponseStore(tmp_path, "PPO", SETTINGS).folder.name.startswith("PPO-T0.8-")


def test_a_line_cut_off_by_a_crash_is_made_again(tmp_path):
    store = ResponseStore(tmp_path, "PPO", SETTINGS)
    store.add(keyed(row("a"), row("b")))
    store.path.write_bytes(store.path.read_bytes()[:-9])
    again = ResponseStore(tmp_path, "PPO", SETTINGS)
    assert list(again.rows.index) == [("a", 0, 0)]
    again.add(keyed(row("c")))
    assert [id for id, _, _ in ResponseStore(tmp_path, "PPO", SETTINGS).rows.index] == ["a", "c"]


def test_replacing_keeps_order_and_the_others(tmp_path):
    store = ResponseStore(tmp_path, "PPO", SETTINGS)
    store.add(keyed(row("a"), row("b")))
    store.replace(keyed(row("a", rm_score=2.0)))
    rows = ResponseStore(tmp_path, "PPO", SETTINGS).rows.reset_index()
    assert rows["id"].tolist() == ["a", "b"] and rows["rm_score"].fillna(-1).tolist() == [2.0, -1]
    assert sorted(path.name for path in store.folder.iterdir()) == ["samples.jsonl", "settings.json"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a"), row("b"), row("a")], "row 3: id a of PPO stands in row 1 too"),
        ([row("a"), {k: v for k, v in row().items() if k != "response"}], "row 2: no response"),
        ([{k: v for k, v in row().items() if k != "id"}], "row 1: no id"),
        ([row(token_ids=None)], "row 1: no token_ids"),
    ],
)
def test_faulty_stores_are_named(tmp_path, rows, words):
    path = ResponseStore(tmp_path, "PPO", SETTINGS).path
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=f"{path}, {words}"):
        ResponseStore(tmp_path, "PPO", SETTINGS)


def test_restored_responses_are_the_very_tokens(moved, tokenizer, texts):
    torch.manual_seed(0)
    rollout = generate(moved.policy.eval().model, tokenizer, texts.prompts, Sampling(8))
    rows = [
        {"prompt": p, "method": "PPO", "response": r, "token_ids": ids[m].tolist(), "ended": bool(e)}
        for p, r, ids, m, e in zip(
            rollout.prompts, rollout.responses, rollout.response_ids, rollout.mask, rollout.ended
        )
    ]
    again = restore(tokenizer, to_frame(rows))
    assert again.prompts == rollout.prompts and again.responses == rollout.responses
    for name in ("attention_mask", "mask", "ended"):
        assert torch.equal(getattr(again, name), getattr(rollout, name))
    attended = rollout.attention_mask.bool()
    assert torch.equal(again.tokens[attended], rollout.tokens[attended])

"""Checkpoints by temperatures by prompts by samples: generated once, stored, resumed, scored anew."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import nudge

from marlhf_lite.config.options import EvaluationConfig
from marlhf_lite.evaluation import checkpoints as module
from marlhf_lite.evaluation.checkpoints import Scorers, evaluate_checkpoints, fingerprint
from marlhf_lite.evaluation.plan import Plan, make_plan, numbers
from marlhf_lite.evaluation.responses import Store
from marlhf_lite.models.actor_critic import PolicyModel, ScalarHeadModel
from marlhf_lite.models.loading import load_policy, load_score_model, new_reward_model
from marlhf_lite.training.rollout import Sampling
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
        )  # fmt: skip

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
    add, count = Store.add, iter(range(100))

    def killed(self, rows):
        if next(count) == batches:
            add(self, rows[:2])
            raise KeyboardInterrupt
        add(self, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "add", killed)
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


def test_nothing_to_do_is_refused(evaluate, tokenizer, tmp_path):
    with pytest.raises(InputError, match="0 prompts and 1 samples"):
        evaluate_checkpoints({}, Scorers(refuse), tokenizer, [], tmp_path, Sampling(4))
    with pytest.raises(InputError, match="6 prompts and 0 samples"):
        evaluate(samples=0)


# Plans


def test_plans_from_options():
    assert make_plan(EvaluationConfig(), 0.8) == Plan((0.8,))
    options = EvaluationConfig(eval_temperatures="1, 0,0.4,1.0", eval_samples=8, best_of="8,1")
    assert make_plan(options, 0.8) == Plan((0.0, 0.4, 1.0), 8, (1, 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eval_temperatures": "0.5,hot"}, "--eval_temperatures 0.5,hot: give numbers from 0 up"),
        ({"eval_temperatures": "-0.5"}, "--eval_temperatures -0.5"),
        ({"eval_temperatures": "inf"}, "--eval_temperatures inf"),
        ({"best_of": "2.5"}, "--best_of 2.5: give whole numbers from 1 up"),
        ({"best_of": "0"}, "--best_of 0"),
        ({"best_of": "1,32", "eval_samples": 16}, "best_of 32: .*16 samples a prompt: give at most 16"),
        ({"best_of": "1,,2"}, "--best_of 1,,2"),
    ],
)
def test_bad_plans_are_named(options, words):
    with pytest.raises(InputError, match=words):
        make_plan(EvaluationConfig(**options), 0.8)


def test_no_numbers():
    assert numbers("x", "  ") == ()

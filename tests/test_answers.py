"""Answers to held-out prompts and what is made of them: summary and table, by hand-made rows with known numbers."""

import pytest
import torch

from marlhf_lite.evaluation import scores as answers
from marlhf_lite.evaluation.scores import answer, column, summarise, table
from marlhf_lite.evaluation.statistics import paired_bootstrap
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import Sampling
from marlhf_lite.utils.errors import InputError

SCORES = {"SFT": [0.0, 1.0, 2.0, 3.0], "PPO": [1.0, 2.0, 3.0, 4.0], "MA-PPO": [0.0, 3.0, 2.0, 5.0]}


def rows_of(scores, **more):
    return [
        {"prompt": f"p{i}", "method": method, "tokens": 10 * (i + 1), "ended": i > 0, "kl": 0.5, "rm_score": score}
        | {name: value for name, value in more.items()}
        for method, values in scores.items()
        for i, score in enumerate(values)
    ]


# summarise


def test_means_of_each_method():
    rows = summarise(rows_of(SCORES))
    assert [row["method"] for row in rows] == ["SFT", "PPO", "MA-PPO"]
    assert [row["rm_score"] for row in rows] == [1.5, 2.5, 2.5]
    for row in rows:
        assert (row["prompts"], row["tokens"], row["ended"], row["kl"]) == (4, 25.0, 0.75, 0.5)
        assert "gold" not in row


def test_gains_are_paired_by_prompt():
    sft, ppo, macro = summarise(rows_of(SCORES))
    assert "rm_score_gain" not in sft
    # every prompt gains 1: no doubt at all, though the scores themselves are far apart
    assert ppo["rm_score_gain"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "level": 0.95}
    gain = paired_bootstrap(SCORES["MA-PPO"], SCORES["SFT"])._asdict()
    assert macro["rm_score_gain"] == gain
    assert gain["mean"] == 1.0 and gain["low"] == 0.0 and gain["high"] == 2.0


def test_gold_has_gains_of_its_own():
    rows = rows_of({"SFT": [0.0, 0.0], "PPO": [4.0, 4.0]}, gold=2.0)
    sft, ppo = summarise(rows)
    assert sft["gold"] == ppo["gold"] == 2.0
    assert ppo["gold_gain"]["mean"] == 0.0 and ppo["rm_score_gain"]["mean"] == 4.0


def test_baseline_by_name_or_else_the_first():
    by_name = summarise(rows_of(SCORES), baseline="PPO")
    assert by_name[0]["rm_score_gain"]["mean"] == -1.0 and "rm_score_gain" not in by_name[1]
    without_sft = summarise(rows_of({k: v for k, v in SCORES.items() if k != "SFT"}))
    assert "rm_score_gain" not in without_sft[0] and without_sft[1]["rm_score_gain"]["mean"] == 0.0


def test_without_a_reward_model():
    rows = [{k: v for k, v in row.items() if k != "rm_score"} for row in rows_of(SCORES)]
    assert all("rm_score" not in row and "rm_score_gain" not in row for row in summarise(rows))


def test_no_rows():
    assert summarise([]) == []


def test_methods_with_different_prompts_are_refused():
    with pytest.raises(InputError, match="a has 3 values and b 4"):
        summarise(rows_of(SCORES | {"PPO": [1.0, 2.0, 3.0]}))


def test_column_keeps_the_order_of_prompts():
    assert column(rows_of(SCORES), "rm_score", "MA-PPO") == SCORES["MA-PPO"]
    assert column(rows_of(SCORES), "rm_score", "nobody") == []


# table


def test_table_to_the_letter():
    lines = table(summarise(rows_of(SCORES))).split("\n")
    assert lines == [
        "| method | RM score | KL (nats) | tokens |",
        "| --- | --- | --- | --- |",
        "| SFT | 1.50 | 0.50 | 25.00 |",
        "| PPO | 2.50 (+1.00 [+1.00, +1.00]) | 0.50 | 25.00 |",
        "| MA-PPO | 2.50 (+1.00 [+0.00, +2.00]) | 0.50 | 25.00 |",
    ]


def test_table_marks_what_is_missing():
    summary = [{"method": "SFT", "rm_score": 1.0}, {"method": "PPO", "rm_score": None, "updates_to_ppo": 12}]
    lines = table(summary).split("\n")
    assert lines[0] == "| method | RM score | updates to PPO's final RM score |"
    assert lines[2:] == ["| SFT | 1.00 | - |", "| PPO | - | 12 |"]


def test_table_of_columns_and_intervals_of_ones_own():
    summary = [{"who": "a", "share": {"mean": 0.5, "low": 0.25, "high": 0.75, "level": 0.9}}, {"who": "b", "more": 1}]
    lines = table(summary, {"who": "rater", "share": "wins", "absent": "x"}).split("\n")
    assert lines == ["| rater | wins |", "| --- | --- |", "| a | 0.50 [0.25, 0.75] |", "| b | - |"]


# answer


@pytest.fixture
def ask(moved, tokenizer, texts):
    """Answers of the moved policy, with a reward model and a gold function that counts letters."""

    def run(policy=None, prompts=None, **kwargs):
        prompts = texts.prompts if prompts is None else prompts
        kwargs = {"reward": ModelReward(moved.reward), "gold": lambda p, r: [len(x) for x in r]} | kwargs
        return answer(policy or moved.policy, moved.reference, tokenizer, prompts, Sampling(8), **kwargs)

    return run


def test_a_row_for_every_prompt(ask, texts):
    rows = ask(name="mine", batch_size=4)
    assert [row["prompt"] for row in rows] == texts.prompts
    for row in rows:
        assert set(row) == {"prompt", "method", "response", "tokens", "ended", "kl", "rm_score", "gold"}
        assert row["method"] == "mine" and row["gold"] == len(row["response"])
        assert 1 <= row["tokens"] <= 8 and (row["ended"] or row["tokens"] == 8)
        assert all(type(row[name]) in (int, float, bool) for name in ("tokens", "ended", "kl", "rm_score"))


def test_columns_only_where_known(ask):
    assert {"rm_score", "gold"}.isdisjoint(ask(reward=None, gold=None)[0])
    assert ask(prompts=[]) == []


def test_same_seed_same_answers(ask):
    assert ask(seed=3) == ask(seed=3) != ask(seed=4)


def test_noise_belongs_to_prompts_and_not_to_batches(ask, texts):
    whole = ask()
    torch.rand(5)
    assert [row["response"] for row in ask(batch_size=2)] == [row["response"] for row in whole]
    assert [row["response"] for row in ask(prompts=texts.prompts[3:])] == [row["response"] for row in whole[3:]]
    twice = ask(prompts=[texts.prompts[0]] * 6)
    assert len({row["response"] for row in twice}) > 1, "a prompt that comes again has noise of its own"


def test_the_reference_has_no_distance_to_itself(ask, moved):
    assert all(row["kl"] == 0 for row in ask(moved.reference))
    assert any(row["kl"] != 0 for row in ask())


@torch.no_grad()
def test_scores_and_kl_are_those_of_the_responses(ask, moved, monkeypatch):
    """The very tokens that were sampled, scored again one row at a time, without padding."""
    seen, generate = [], answers.generate_seeded

    def noted(*args):
        seen.append(generate(*args))
        return seen[-1]

    monkeypatch.setattr(answers, "generate_seeded", noted)
    rows = ask(batch_size=4)
    alone = [(rollout, i) for rollout in seen for i in range(len(rollout))]
    assert len(alone) == len(rows) and len(seen) == 2
    for row, (rollout, i) in zip(rows, alone):
        count = int(rollout.lengths[i])
        attended = rollout.attention_mask[i].bool()
        tokens = rollout.tokens[i : i + 1, attended]
        mask = torch.ones_like(tokens)
        k1 = moved.policy(tokens, mask, count)[0].sum() - moved.reference(tokens, mask, count)[0].sum()
        assert row["kl"] == pytest.approx(k1.item(), abs=1e-4)
        assert row["rm_score"] == pytest.approx(moved.reward(tokens, mask)[0, -1].item(), abs=1e-4)
        assert row["tokens"] == count and row["response"] == rollout.responses[i]


def test_policy_is_left_in_eval_mode_and_gradients_off(ask, moved):
    moved.policy.train()
    ask()
    assert not moved.policy.training
    assert all(p.grad is None for p in moved.policy.parameters())

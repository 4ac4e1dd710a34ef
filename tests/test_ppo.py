"""The PPO trainer, end to end on a random model: learning, repetition, records, number of passes, bad input."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_runs import build, early_letters, timeless

from marlhf_lite.macro import FixedNGram, MacroActions, RandomizedNGram
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.loading import build_models
from marlhf_lite.parsing import ParsedSentence, Parsing
from marlhf_lite.training import sampler_checks
from marlhf_lite.training.loop import Callback
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import from_texts, generate
from marlhf_lite.utils.errors import InputError

KEYS = set(
    "update score_mean score_std kl_k1 kl_k3 response_length eos_rate clip_fraction entropy policy_loss "
    "value_loss explained_variance advantage_norm advantage_rms q_norm q_rms policy_grad_norm critic_grad_norm "
    "macro_actions macro_length tokens_per_second seconds seconds_generation seconds_scoring seconds_macro "
    "seconds_training".split()
)
NAMES = ("policy", "critic", "reference", "reward")


# -- learning ---------------------------------------------------------------------------------------------------------


def test_reward_rises(make):
    trainer = make(
        termination=FixedNGram(3),
        updates=15,
        batch_size=64,
        micro_batch_size=64,
        temperature=1.0,
        top_k=0,
        policy_learning_rate=0.1,
        critic_learning_rate=0.03,
        warmup_updates=1,
        kl_coef=0.0,
    )
    scores = [row["score_mean"] for row in trainer.train()]
    assert sum(scores[-3:]) / 3 > 0.15 + sum(scores[:3]) / 3


# -- repetition -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_ppo_epochs": 2, "num_mini_batches": 2}])
def test_same_seed_same_run(base, sft, rm, tokenizer, options):
    def history(seed):
        torch.seed()  # whatever the state before
        roles = build_models(base, sft, rm)
        return timeless(
            build(roles, tokenizer, seed=seed, termination=RandomizedNGram(), **options).train()
        )

    first = history(0)
    assert first == history(0)
    assert first[0]["score_mean"] != history(1)[0]["score_mean"]


# -- records ----------------------------------------------------------------------------------------------------------


def test_metrics_have_every_key_and_are_finite(make, run, roles):
    trainer = make(run=run, reward=ModelReward(roles.reward), gold=early_letters, updates=3)
    history = trainer.train()
    rows = run.metrics()
    assert [row["update"] for row in rows] == [1, 2, 3] and rows == history
    for row in rows:
        assert row.keys() >= KEYS | {"gold_mean"}
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in row.values())
        assert row["seconds"] >= sum(v for k, v in row.items() if k.startswith("seconds_")) > 0
        assert 0 <= row["eos_rate"] <= 1 <= row["macro_length"] <= 2 and row["kl_k3"] >= 0
        assert row["macro_actions"] * row["macro_length"] == pytest.approx(row["response_length"])


def test_processes_draw_otherwise_than_those_of_other_seeds(make, monkeypatch):
    drawn = set()
    for seed, process in itertools.product(range(3), range(3)):
        trainer = make(seed=seed, updates=1)
        trainer.state.updates_done = 1  # it has made all its updates
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        trainer.train()
        drawn.add(torch.rand(1).item())
    assert len(drawn) == 9


def test_samples_partition_the_tokens(make, run, roles):
    rule = RandomizedNGram((1, 2, 3), repeats=1)
    make(run=run, termination=rule, updates=1, length=9).train()
    rows = run.samples()
    assert len(rows) == 4
    for row in rows:
        starts, ends = zip(*row["spans"])
        assert starts[0] == 0 and ends[-1] == row["tokens"] and list(starts[1:]) == list(ends[:-1])
        assert all(a < b for a, b in row["spans"])
        assert row["score"] == pytest.approx(early_letters([row["prompt"]], [row["response"]])[0])


def test_held_out_tests_are_a_function_that_the_trainer_is_given(make, run, roles, capsys):
    """Called with the models every so many updates and at the end; recorded, and one line each in the terminal."""
    seen = []

    def held_out(models):
        seen.append(models)
        return {
            "score_mean": 0.5,
            "score_sft": 0.25,
            "score_win_rate": 0.75,
            "kl": -1.5,
            "kl_k3": 1.5,
        }

    make(run=run, held_out=held_out, eval_every=2, updates=3).train()
    assert seen == [roles, roles] and [row["update"] for row in run.tests()] == [2, 3]
    line = "ppo: update 2, held-out prompts: score 0.50 (SFT 0.25, win rate 75%), KL 1.50"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    make(run=run, held_out=held_out, updates=1).train()
    assert len(seen) == 2


def test_a_held_out_test_may_find_any_numbers(make, run, capsys):
    """Printed by their own names, in the history of their update, and again in that of a resumed run."""
    found = iter([0.25, 0.75, 1.0])

    def held_out(models):
        return {"accuracy": next(found), "words": 1234567}

    made = make(run=run, held_out=held_out, eval_every=2, updates=3)
    history = made.train()
    line = "ppo: update 2, held-out prompts: accuracy 0.25, words 1.235e+06"
    assert line in capsys.readouterr().out.splitlines()
    assert [row.get("test/accuracy") for row in history] == [None, 0.25, 0.75]
    longer = make(run=run, held_out=held_out, eval_every=2, updates=4)
    assert [row.get("test/accuracy") for row in longer.train(resume=True)] == [
        None,
        0.25,
        0.75,
        1.0,
    ]


def test_callbacks_are_told_of_every_update(make):
    told = []

    class Told(Callback):
        def after_update(self, trainer, row, rollout):
            told.append((trainer, row, rollout))

    made = make(updates=2, callbacks=[Told(), Callback()])
    history = made.train()
    assert [trainer for trainer, _, _ in told] == [made, made]
    assert [row for _, row, _ in told] == history
    for row, (_, _, rollout) in zip(history, told, strict=True):
        assert rollout.scores.mean().item() == pytest.approx(row["score_mean"])


@pytest.mark.parametrize("kind", ["silent", "with log-probabilities", "drawn here"])
def test_a_sampler_that_nobody_can_check_is_noted(make, capsys, kind):
    """Once, in the first update: training is off-policy without correction if another policy has sampled."""

    def sampler(model, tokenizer, prompts, sampling):
        rollout = generate(model, tokenizer, prompts, sampling)
        if kind != "with log-probabilities":
            return rollout
        width = rollout.mask.shape[1]
        logprobs, _ = PolicyModel(model)(rollout.tokens, rollout.attention_mask, width)
        return replace(rollout, sampled_logprobs=logprobs.detach())

    sampler.draws_from_policy = kind == "drawn here"
    make(sampler=sampler, updates=2).train()
    shown = capsys.readouterr().out
    assert shown.count("note: the sampler gives no log-probabilities") == (kind == "silent")


# -- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, passes",
    [
        ({}, 1),
        ({"num_ppo_epochs": 2}, 2),
        ({"num_ppo_epochs": 3}, 3),
        ({"whiten": True}, 2),
        ({"num_ppo_epochs": 2, "whiten": True}, 3),
        ({"num_mini_batches": 2}, 2),
        ({"num_ppo_epochs": 2, "num_mini_batches": 2}, 3),
    ],
)
def test_number_of_forward_passes(make, roles, tokenizer, texts, options, passes, monkeypatch):
    """Policy and critic run once an epoch, and once more where old outputs are needed before the first step."""
    rollout = from_texts(tokenizer, texts.prompts, texts.responses, limit=6)
    rows = Counter()
    for name in NAMES:
        getattr(roles, name).register_forward_pre_hook(
            lambda _, args, name=name: rows.update({name: len(args[0])})
        )
    trainer = make(
        reward=ModelReward(roles.reward, 4), batch_size=6, sampler=lambda *_: rollout, **options
    )
    monkeypatch.setattr(
        sampler_checks, "check_merged_policy_agrees_with_trained", lambda *_: None
    )  # after the first update
    trainer.update(texts.prompts)
    expected = {"policy": passes, "critic": passes, "reference": 1, "reward": 1}
    assert rows == {name: count * len(rollout) for name, count in expected.items()}


def test_scoring_in_micro_batches_changes_nothing(make, roles, texts):
    parts = []
    for size in (1, 4, 64):
        trainer = make(reward=ModelReward(roles.reward, size), micro_batch_size=size)
        torch.manual_seed(0)
        parts.append(trainer.score(trainer.generate_rollout(texts.prompts)))
    for part in parts[1:]:
        torch.testing.assert_close(part.scores, parts[0].scores)
        torch.testing.assert_close(part.ref_logprobs * part.mask, parts[0].ref_logprobs * part.mask)


# -- a user's own rule and reward -------------------------------------------------------------------------------------


def test_own_rule_sees_the_documented_context(make, run, tokenizer):
    seen = []

    def rule(mask, **context):
        seen.append(context)
        place = torch.arange(mask.shape[1])
        starts = (context["token_ids"] % 2 == 0) | (place == 0)
        return MacroActions.from_starts(starts, mask)

    row = make(termination=rule, run=run, updates=2).train()[-1]
    assert [context["step"] for context in seen] == [0, 1] and row["macro_length"] >= 1
    for context in seen:
        assert context["tokenizer"] is tokenizer and context["process"] == 0
        assert context["token_ids"].shape == context["ref_logprobs"].shape
        assert (context["ref_logprobs"] <= 0).all()


def no_trees(text):
    """A parser that finds a tree for nothing."""
    return [ParsedSentence(0, len(text), None)] if text else []


def test_parsing_that_falls_back_everywhere_stops_at_the_first_update(make, run):
    """It would be token-level PPO under another name."""
    with pytest.raises(
        InputError, match="no tree for 100% .* --parser python for programs, or for English"
    ):
        make(termination=Parsing(no_trees), run=run).train()
    assert run.metrics() == []

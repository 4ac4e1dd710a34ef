"""What goes wrong in a long run: numbers that are not finite, odd responses, rewards of anybody, a full disk."""

import itertools
import math
from pathlib import Path
from unittest import mock

import pandas
import pytest
import torch
from conftest import fails, nudge
from small_runs import (
    PROMPTS,
    build,
    early_letters,
    run_child,
    same,
    start,
    state,
    timeless,
    wait,
    watch,
)

from marlhf_lite.macro import FixedNGram, MacroActions
from marlhf_lite.models.loading import build_models
from marlhf_lite.training import sampler_checks
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.run_folder import RunFolder

NAMES = ("policy", "critic")


# -- not finite -------------------------------------------------------------------------------------------------------


def said(name, value):
    """What role `name` says near the end of its first row is `value`, where the critic is asked for the last token."""

    def plant(trainer, is_due):
        def hook(_, args, out):
            first, *rest = out if isinstance(out, tuple) else (out,)
            where = torch.zeros_like(first, dtype=torch.bool)
            where[0, -2] = is_due()
            first = first.masked_fill(where, value)
            return (first, *rest) if isinstance(out, tuple) else first

        getattr(trainer.models, name).register_forward_hook(hook)

    return plant


def infinite_gradient(name):
    def plant(trainer, is_due):
        trainer.parameters[name][0].register_hook(lambda g: g * (math.inf if is_due() else 1.0))

    return plant


def too_large_loss(trainer, is_due):
    """Values that float32 holds, but not their squares."""
    head = trainer.models.critic.model.get_base_model().score
    head.register_forward_hook(lambda *x: x[-1] * (1e25 if is_due() else 1.0))


FAULTS = {
    "policy log-probabilities": said("policy", math.nan),
    "policy log-probabilities, infinite": said("policy", -math.inf),
    "reference log-probabilities": said("reference", math.nan),
    "critic values": said("critic", math.inf),
    "gradient of the policy": infinite_gradient("policy"),
    "gradient of the critic": infinite_gradient("critic"),
    "gradient of the critic, from its loss": too_large_loss,
}


def spoil(trainer, fault, updates):
    """Plant a fault that shows at these updates."""
    FAULTS[fault](trainer, lambda: trainer.state.updates_done + 1 in updates)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_is_not_finite_is_left_out(make, run, fault):
    """Weights and moments stay as they were, and the updates around it train; also where it is the first."""
    trainer = make(run, updates=5, kl_ceiling=1e3)
    spoil(trainer, fault, (1, 3))
    states = watch(trainer, lambda: state(trainer))
    assert [row["skipped_steps"] for row in trainer.train()] == [1, 0, 1, 0, 0]
    lost = [
        row["policy_grad_norm"] is None or row["critic_grad_norm"] is None for row in run.metrics()
    ]
    assert (
        [same(*pair) for pair in itertools.pairwise(states)]
        == lost
        == [True, False, True, False, False]
    )
    assert {int(moments["step"]) for moments in trainer.optimizer.state.values()} == {3}


@pytest.mark.parametrize("fault", list(FAULTS)[::2])
def test_several_in_a_row_stop_the_run_and_say_where(make, run, fault):
    trainer = make(run, updates=9)
    spoil(trainer, fault, range(2, 10))
    states = watch(trainer, lambda: state(trainer))
    fails(trainer.train, "3 updates in a row were not finite and were left out", "_grad_norm")
    assert (
        len(run.metrics()) == 3
        and same(states[1], states[-1])
        and trainer.checkpoints.updates() == [2, 3]
    )


@pytest.mark.parametrize(
    ("several", "bad", "steps"),
    [
        # old log-probabilities spoil every step, though the second pass is right
        ({"num_ppo_epochs": 2}, 3, 2),
        ({"num_mini_batches": 2}, 5, 3),  # one step of two
    ],
)
def test_one_bad_pass_of_several(make, several, bad, steps, monkeypatch):
    """The policy's forward pass number `bad`, in the second update, leaves out the steps that need it."""
    trainer, calls = make(updates=2, **several), []
    monkeypatch.setattr(
        sampler_checks, "check_merged_policy_agrees_with_trained", lambda *_: None
    )  # after the first update

    def hook(_, args, out):
        calls.append(1)
        return (out[0] * math.nan, out[1]) if len(calls) == bad else None

    trainer.models.policy.register_forward_hook(hook)
    first, second = (row["skipped_steps"] for row in trainer.train())
    assert first == 0 < second and {
        int(moments["step"]) for moments in trainer.optimizer.state.values()
    } == {steps}


def test_counted_over_a_restart(make, base, sft, rm, tokenizer, run):
    """Two bad updates, a checkpoint, and a third bad one after it are three in a row."""
    trainer = make(run, updates=3)
    spoil(trainer, "policy log-probabilities", (2, 3))
    trainer.train()
    again = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path), updates=4)
    spoil(again, "policy log-probabilities", (4,))
    fails(lambda: again.train(resume=True), "3 updates")


def test_a_policy_that_cannot_be_sampled_ends_the_run_in_a_line(make):
    trainer = make(updates=2)
    trainer.parameters["policy"][0].data.fill_(math.nan)
    fails(trainer.train, "not finite")


def test_a_failed_check_on_the_gpu_names_its_likely_cause(make, run):
    """It is not taken for the end of memory, and nothing is tried again."""
    asked = []

    def generator(*args):
        asked.append(args)
        raise torch.AcceleratorError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might come late"
        )

    fails(make(run, sampler=generator).train, "probabilities are not finite", "lower learning rate")
    assert len(asked) == 1


# -- responses and rewards of anybody ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "how"), [(1, {"num_ppo_epochs": 2}), (3, {}), (math.inf, {"whiten": True})]
)
@pytest.mark.parametrize("never", [True, False])
def test_all_responses_are_as_long_as_can_be_or_eos_alone(make, tokenizer, how, n, never):
    """A model never writes EOS, or at once."""
    bias = torch.zeros(len(tokenizer))
    bias[tokenizer.eos_token_id] = -1e9 if never else 1e9

    def generator(model, *args):
        handle = model.get_output_embeddings().register_forward_hook(lambda _, __, out: out + bias)
        try:
            return generate(model, *args)
        finally:
            handle.remove()

    for row in make(sampler=generator, termination=FixedNGram(n), updates=2, **how).train():
        assert (row["eos_rate"], row["response_length"], row["skipped_steps"]) == (
            (0, 6, 0) if never else (1, 1, 0)
        )
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


@pytest.mark.parametrize("how", [{}, {"whiten": True}])
def test_identical_rewards(make, how):
    """No spread: whitened scores are 0, not NaN, and only KL and the critic are left to train on."""
    for row in make(reward=FunctionReward(lambda p, r: [2.0] * len(r)), updates=2, **how).train():
        assert (row["score_std"], row["score_mean"], row["skipped_steps"]) == (0, 2, 0)
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


def divides(prompts, responses):
    return [1 / 0 for _ in responses]


def lazily(prompts, responses):
    yield 1.0
    raise OSError("the judge hung up")


BAD = [  # a reward of four responses -> what the message names
    (divides, "ZeroDivisionError"),
    (lazily, "the judge hung up"),
    (lambda p, r: [0.0] * (len(r) - 1), "3"),
    (lambda p, r: None, "None"),
    (lambda p, r: 3.0, "shape ()"),
    (lambda p, r: [0.0, math.nan, 0.0, 0.0], "scores[1]"),
    (lambda p, r: [0.0, 0.0, 0.0, -math.inf], "scores[3]"),
    (lambda p, r: [1e39, 0.0, 0.0, 0.0], "scores[0]"),
    (lambda p, r: [10**400, 0, 0, 0], "too large"),
    (lambda p, r: ["good", 0.0, 0.0, 0.0], "'good'"),
    (lambda p, r: [None] * len(r), "None"),
    (lambda p, r: torch.zeros(4, 2), "returned"),
    (lambda p, r: torch.zeros(4, 2).numpy(), "returned"),
    (lambda p, r: pandas.DataFrame(torch.zeros(4, 4).numpy()), "not a sequence"),
    (lambda p, r: torch.zeros(4).numpy() + 1j, "must be real number"),
    (lambda p, r: torch.ones(4).to_sparse(), "Sparse"),
    (lambda p, r: [b"1"] * 4, "shape (4, 1)"),
    (lambda p, r: dict(enumerate(r)), "not dict"),
    (lambda p, r: {1: 0}.keys(), "dict_keys"),
    (lambda p, r: {1.0, 2.0, 3.0, 4.0}, "not set"),
    (lambda p, r: b"1234", "bytes"),
]


@pytest.mark.parametrize(("function", "named"), BAD)
def test_a_reward_that_is_wrong_is_named(make, run, function, named):
    trainer = make(run, reward=FunctionReward(function, "my.module:mine"))
    before = state(trainer)
    fails(trainer.train, "reward my.module:mine: ", named)
    assert run.metrics() == [] and same(before, state(trainer))


@pytest.mark.parametrize(
    "kind", [list, tuple, torch.tensor, lambda x: (s for s in x), lambda x: map(int, x)]
)
def test_numbers_of_any_kind_will_do(make, kind):
    row = make(reward=FunctionReward(lambda p, r: kind([1, 2, 3, 4])), updates=1).train()[0]
    assert row["score_mean"] == 2.5


def in_place(function):
    """The function, which then turns around, empties and overwrites all that it got."""

    def spoiling(*given, **context):
        out = function(*given, **context)
        for x in (*given, *context.values(), *getattr(given[0], "__dict__", {}).values()):
            if isinstance(x, list):
                x.sort()
                x.pop()
            elif torch.is_tensor(x):
                x.zero_()
        return out

    return spoiling


def lengths(rollout):
    return [float(len(response)) for response in rollout.responses]


@pytest.mark.parametrize("reward", [FunctionReward(in_place(early_letters)), in_place(lengths)])
def test_a_function_of_the_user_gets_copies(make, reward):
    """Reward, gold score and rule change what they get; the trainer's rollout stays, and its scores belong to it."""

    def rule(mask, token_ids, **context):
        return MacroActions.from_starts(token_ids % 3 == 0, mask)

    trainer = make(reward=reward, gold=in_place(early_letters), termination=in_place(rule))
    rollout = trainer.generate_rollout(PROMPTS[:4])
    before, scored = rollout.copy(), trainer.score(rollout)
    macro_actions = trainer.segment(scored)
    for name, x in vars(before).items():
        assert (
            torch.equal(x, getattr(rollout, name))
            if torch.is_tensor(x)
            else x == getattr(rollout, name)
        ), name
    letters = early_letters(before.prompts, before.responses)
    assert scored.gold.tolist() == pytest.approx(letters)
    assert scored.scores.tolist() == pytest.approx(
        letters if isinstance(reward, FunctionReward) else lengths(before)
    )
    assert macro_actions.spans() == rule(before.mask, before.response_ids).spans()


@pytest.mark.parametrize(("gold", "named"), [BAD[0], BAD[2], BAD[5], BAD[-4]])
def test_a_gold_score_that_is_wrong_is_named(make, gold, named):
    fails(make(reward=FunctionReward(early_letters), gold=gold).train, "reward gold: ", named)


def test_a_rule_that_breaks_the_partition_is_named(make):
    def rule(mask, **context):
        return MacroActions.from_lengths([[1]] * len(mask), mask.shape[1])

    fails(make(termination=rule, reward=FunctionReward(early_letters)).train, "tokens")


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tiny, sft, rm, tmp_path_factory):
    """The folders that a run takes, and a run whose disk is large enough."""
    folders, path = (tiny.model, str(sft), str(rm)), tmp_path_factory.mktemp("disk") / "plain"
    wait(process := start(run_child, path, folders, {}))
    assert process.exitcode == 0
    return folders, path


@pytest.mark.parametrize("full", ["checkpoints/update-000003.pt", "metrics.jsonl"])
def test_a_full_disk_is_said_and_the_last_checkpoint_goes_on(plain, full):
    """From the second update on, files may grow no larger than one byte less than `full` needs."""
    folders, plain = plain
    path, size = plain.with_name(Path(full).name), (plain / full).stat().st_size
    limit = size // 2 if full == "metrics.jsonl" else size - 1
    wait(process := start(run_child, path, folders, {}, 0, 0, (1, limit)))
    error = (path / "error.txt").read_text()
    assert process.exitcode == 1 and "File too large" in error
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["update-000001.pt"]
    wait(again := start(run_child, path, folders, {}, 5))
    assert again.exitcode == 0
    assert timeless(RunFolder.open(path).metrics()) == timeless(RunFolder.open(plain).metrics())
    for name in NAMES:
        file = f"{name}/adapter_model.safetensors"
        assert (path / file).read_bytes() == (plain / file).read_bytes()


def test_models_that_do_not_fit_leave_the_older_ones(make, tmp_path, monkeypatch):
    """Saved under another name first; what is there stays until the new one is whole."""
    trainer = make(updates=1)
    trainer.save(tmp_path)
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    nudge(trainer.models.policy, 5)

    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old
    assert not [*tmp_path.glob(".*")]

"""What goes wrong in a long run: numbers that are not finite, odd responses, rewards of anybody, a full disk."""

import math
from pathlib import Path

import pytest
import torch
from conftest import nudge
from small_runs import build, early_letters, run_child, start, timeless, wait

from marlhf_lite.evaluation.held_out import HeldOutEvaluation
from marlhf_lite.macro import FixedNGram, MacroActions
from marlhf_lite.models.actor_critic import build_models
from marlhf_lite.training import safeguards
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.run_folder import RunFolder

NAMES = ("policy", "critic")


@pytest.fixture
def make(roles, tokenizer):
    return lambda run=None, **changes: build(roles, tokenizer, run, **changes)


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {})


def spoil(trainer, name, updates, value=math.nan):
    """At these updates, what role `name` says near the end of its first row is `value`."""

    def hook(_, args, out):
        if trainer.updates_done + 1 not in updates:
            return None
        first, *rest = out if isinstance(out, tuple) else (out,)
        where = torch.zeros_like(first, dtype=torch.bool)
        where[0, -2] = True  # where the critic is asked for the value of the last token
        first = first.masked_fill(where, value)
        return (first, *rest) if isinstance(out, tuple) else first

    getattr(trainer.models, name).register_forward_hook(hook)


def state(trainer):
    """Copies of all weights that train, and of what the optimizer holds of them."""
    parameters = [p for name in NAMES for p in trainer.parameters[name]]
    moments = [{k: v.clone() for k, v in trainer.optimizer.state.get(p, {}).items()} for p in parameters]
    return [p.detach().clone() for p in parameters], moments


def same(ours, theirs):
    return all(map(torch.equal, ours[0], theirs[0])) and all(
        mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)
        for mine, other in zip(ours[1], theirs[1], strict=True)
    )


def by_update(trainer):
    """The trainer's state after each update, filled while it trains."""
    states, update = [state(trainer)], trainer.update

    def watched(prompts):
        row = update(prompts)
        states.append(state(trainer))
        return row

    trainer.update = watched
    return states


# -- not finite -------------------------------------------------------------------------------------------------------


def infinite_gradient(trainer, name, updates):
    for parameter in trainer.parameters[name][:1]:
        parameter.register_hook(lambda g: g * (math.inf if trainer.updates_done + 1 in updates else 1.0))


def too_large_loss(trainer, updates):
    """Values that float32 holds, but not their squares."""
    head = trainer.models.critic.model.get_base_model().score
    head.register_forward_hook(lambda *x: x[-1] * (1e25 if trainer.updates_done + 1 in updates else 1.0))


FAULTS = {
    "policy log-probabilities": lambda t, updates: spoil(t, "policy", updates),
    "policy log-probabilities, infinite": lambda t, updates: spoil(t, "policy", updates, -math.inf),
    "reference log-probabilities": lambda t, updates: spoil(t, "reference", updates),
    "critic values": lambda t, updates: spoil(t, "critic", updates, math.inf),
    "gradient of the policy": lambda t, updates: infinite_gradient(t, "policy", updates),
    "gradient of the critic": lambda t, updates: infinite_gradient(t, "critic", updates),
    "gradient of the critic, from its loss": too_large_loss,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_is_not_finite_is_left_out(make, run, fault):
    """Weights and moments stay as they were; the updates around it train, and the count starts anew."""
    trainer = make(run, updates=5, kl_ceiling=1e3)
    FAULTS[fault](trainer, (2, 4))
    states = by_update(trainer)
    history = trainer.train()
    assert [row["skipped_steps"] for row in history] == [0, 1, 0, 1, 0]
    for update, before, after in zip(range(1, 6), states, states[1:]):
        assert same(before, after) == (update in (2, 4))
    steps = {int(x["step"]) for x in states[-1][1]}
    assert steps == {3}
    for row in history:
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["rm_score_mean"])
    assert trainer.nonfinite_in_row == 0
    assert [row["skipped_steps"] for row in run.metrics()] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("fault", list(FAULTS)[::2])
def test_several_in_a_row_stop_the_run_and_say_where(make, run, fault):
    trainer = make(run, updates=9)
    FAULTS[fault](trainer, range(2, 10))
    before = by_update(trainer)
    with pytest.raises(InputError, match=f"3 updates in a row were not finite.*{fault.split(',')[0]}.*start again"):
        trainer.train()
    assert len(run.metrics()) == 3 and same(before[1], before[-1])
    assert trainer.checkpoints.updates() == [2, 3]


def test_the_first_update_may_be_bad(make):
    """It is not taken for a policy that starts elsewhere, and does not set off the ceiling."""
    trainer = make(updates=2, kl_ceiling=0.5)
    spoil(trainer, "policy", (1,), -math.inf)
    history = trainer.train()
    assert [row["skipped_steps"] for row in history] == [1, 0]


def test_bad_in_the_pass_before_several_steps(make):
    """Old log-probabilities that are wrong spoil every step on the rollout, though the second epoch's pass is right."""
    trainer = make(updates=2, num_ppo_epochs=2)
    calls = []

    def hook(_, args, out):
        calls.append(1)  # of update 2, the first of two passes
        return (out[0] * math.nan, out[1]) if len(calls) == 3 else None

    trainer.models.policy.register_forward_hook(hook)
    states = by_update(trainer)
    assert [row["skipped_steps"] for row in trainer.train()] == [0, 1]
    assert len(calls) == 4 and same(states[1], states[2])


def test_one_bad_step_of_several(make, monkeypatch):
    """It and those after it are left out; the update counts as bad, and where is remembered."""
    monkeypatch.setattr(safeguards, "NONFINITE_IN_ROW", 1)
    trainer = make(updates=2, num_mini_batches=2)
    calls = []

    def hook(_, args, out):
        calls.append(1)  # of update 2: old values of four rows, then two steps of two
        return (out[0] * math.nan, out[1]) if len(calls) == 5 else None

    trainer.models.policy.register_forward_hook(hook)
    states = by_update(trainer)
    with pytest.raises(InputError, match="1 updates in a row .*policy log-probabilities"):
        trainer.train()
    assert len(calls) == 6 and len(states) == 2
    assert {int(x["step"]) for x in state(trainer)[1]} == {2}


def test_counted_over_a_restart(make, base, sft, rm, tokenizer, run):
    """Two bad updates, a checkpoint, and a third bad one after it are three in a row."""
    trainer = make(run, updates=3)
    spoil(trainer, "policy", (2, 3))
    trainer.train()
    again = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path), updates=4)
    spoil(again, "policy", (4,))
    with pytest.raises(InputError, match="3 updates in a row"):
        again.train(resume=True)


def test_a_policy_that_cannot_be_sampled_ends_the_run_in_a_line(make):
    trainer = make(updates=2)
    trainer.parameters["policy"][0].data.fill_(math.nan)
    with pytest.raises(InputError, match="probabilities are not finite: start again with a lower learning rate"):
        trainer.train()


# -- responses --------------------------------------------------------------------------------------------------------


def ends(tokenizer, never):
    """A generator whose model never writes EOS, or at once."""
    from marlhf_lite.training.rollout import generate

    def generator(model, *args):
        head = model.get_output_embeddings()
        bias = torch.zeros(len(tokenizer))
        bias[tokenizer.eos_token_id] = -1e9 if never else 1e9
        handle = head.register_forward_hook(lambda _, __, out: out + bias)
        try:
            return generate(model, *args)
        finally:
            handle.remove()

    return generator


@pytest.mark.parametrize("how", [{}, {"num_ppo_epochs": 2}, {"whiten": True}])
@pytest.mark.parametrize("n", [1, 3, math.inf])
def test_a_batch_without_eos(make, tokenizer, how, n):
    trainer = make(generator=ends(tokenizer, never=True), termination=FixedNGram(n), updates=2, **how)
    for row in trainer.train():
        assert row["eos_rate"] == 0 and row["response_length"] == 6 and row["skipped_steps"] == 0
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


@pytest.mark.parametrize("how", [{}, {"num_ppo_epochs": 2}, {"whiten": True}])
def test_responses_of_eos_alone(make, tokenizer, how):
    """Length 1 and empty text."""
    trainer = make(generator=ends(tokenizer, never=False), termination=FixedNGram(5), updates=2, **how)
    for row in trainer.train():
        assert row["eos_rate"] == row["response_length"] == row["macro_actions"] == 1 and row["skipped_steps"] == 0
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


@pytest.mark.parametrize("how", [{}, {"whiten": True}])
def test_identical_rewards(make, how):
    """No spread: whitened scores are 0, not NaN, and only KL and the critic are left to train on."""
    history = make(reward=FunctionReward(lambda p, r: [2.0] * len(r)), updates=2, **how).train()
    for row in history:
        assert row["rm_score_std"] == 0 and row["rm_score_mean"] == 2 and row["skipped_steps"] == 0
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


# -- rewards of anybody -----------------------------------------------------------------------------------------------


def divides(prompts, responses):
    return [1 / 0 for _ in responses]


def lazily(prompts, responses):
    yield 1.0
    raise OSError("the judge hung up")


BAD = [
    (divides, "raised ZeroDivisionError: division by zero.*go on with --resume"),
    (lazily, "raised OSError: the judge hung up"),
    (lambda p, r: [0.0] * (len(r) - 1), "3,. for 4 responses"),
    (lambda p, r: [], "0,. for 4 responses"),
    (lambda p, r: None, "returned None"),
    (lambda p, r: 3.0, "returned 3.0"),
    (lambda p, r: [0.0, math.nan, 0.0, 0.0], r"scores\[1\] is nan"),
    (lambda p, r: [0.0, 0.0, 0.0, -math.inf], r"scores\[3\] is -inf"),
    (lambda p, r: [1e39, 0.0, 0.0, 0.0], r"scores\[0\] is inf"),
    (lambda p, r: [10**400, 0, 0, 0], "too large"),
    (lambda p, r: ["good", 0.0, 0.0, 0.0], "'good' is a text"),
    (lambda p, r: [None] * len(r), "NoneType"),
    (lambda p, r: torch.zeros(4, 2), "returned"),
]


@pytest.mark.parametrize("function, reason", BAD)
def test_a_reward_that_is_wrong_is_named(make, run, function, reason):
    trainer = make(run, reward=FunctionReward(function, "my.module:mine"))
    before = state(trainer)
    with pytest.raises(InputError, match=f"reward my.module:mine: .*{reason}"):
        trainer.train()
    assert run.metrics() == [] and same(before, state(trainer))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda x: (s for s in x), lambda x: map(int, x)])
def test_numbers_of_any_kind_will_do(make, kind):
    row = make(reward=FunctionReward(lambda p, r: kind([1, 2, 3, 4])), updates=1).train()[0]
    assert row["rm_score_mean"] == 2.5


def test_a_mended_reward_goes_on(make, base, sft, rm, tokenizer, run, tmp_path):
    """After a reward broke at the third update, the run resumes from the second and ends as if nothing had been."""
    calls = []

    def breaks(prompts, responses):
        calls.append(1)
        return divides(prompts, responses) if len(calls) == 3 else early_letters(prompts, responses)

    with pytest.raises(InputError, match="reward breaks: raised"):
        make(run, reward=FunctionReward(breaks)).train()
    repaired = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path))
    plain = build(build_models(base, sft, rm), tokenizer, RunFolder.create(tmp_path / "plain", {}))
    assert timeless(repaired.train(resume=True)) == timeless(plain.train())


def test_a_bad_reward_in_a_test_leaves_the_training_state(roles, tokenizer):
    """Random generators and modes come back although the reward raised."""
    from marlhf_lite.training.rollout import Sampling

    test = HeldOutEvaluation(["a"], tokenizer, Sampling(3), FunctionReward(divides))
    drawn = torch.get_rng_state()
    with pytest.raises(InputError, match="divides"):
        test(roles)
    assert torch.equal(torch.get_rng_state(), drawn) and roles.policy.training


def test_a_rule_that_breaks_the_partition_is_named(make):
    def rule(mask, **context):
        return MacroActions.from_lengths([[1]] * len(mask), mask.shape[1])

    with pytest.raises(InputError, match="left response tokens out"):
        make(termination=rule, reward=FunctionReward(early_letters)).train()


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tiny, sft, rm, tmp_path_factory):
    return (tiny.model, str(sft), str(rm)), tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def plain(places):
    """A run whose disk is large enough."""
    folders, root = places
    process = start(run_child, root / "plain", folders, {})
    wait(process)
    assert process.exitcode == 0
    return root / "plain"


@pytest.mark.parametrize("full", ["checkpoints/update-000003.pt", "metrics.jsonl"])
def test_a_full_disk_is_said_and_the_last_checkpoint_goes_on(places, plain, full):
    """From the second update on, files may grow no larger than one byte less than `full` needs."""
    folders, root = places
    path, log = root / Path(full).name, full == "metrics.jsonl"
    size = (plain / full).stat().st_size
    limit = size // 2 if log else size - 1
    process = start(run_child, path, folders, {}, 0, 0, (1, limit))
    wait(process)
    error = (path / "error.txt").read_text()
    assert process.exitcode == 1 and error.startswith("InputError") and "free some disk space" in error
    if not log:
        assert "checkpoint not written" in error and "the one of update 1 is complete" in error
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["update-000001.pt"]
    again = start(run_child, path, folders, {}, 5)
    wait(again)
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

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(InputError, match="policy: not written .*No space left on device.*free some disk space"):
        trainer.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old
    assert not [*tmp_path.glob(".*")]

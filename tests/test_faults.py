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
    """Copies of all weights that train, and of what the optimizer holds of them, by number and name."""
    copies = {}
    for i, weights in enumerate(p for name in NAMES for p in trainer.parameters[name]):
        values = {"weights": weights.detach()} | trainer.optimizer.state.get(weights, {})
        copies |= {(i, name): value.clone() for name, value in values.items()}
    return copies


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def steps_taken(trainer):
    return {int(moments["step"]) for moments in trainer.optimizer.state.values()}


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
    """Weights and moments stay as they were, and the updates around it train."""
    trainer = make(run, updates=5, kl_ceiling=1e3)
    FAULTS[fault](trainer, (2, 4))
    states = by_update(trainer)
    history = trainer.train()
    assert [row["skipped_steps"] for row in history] == [0, 1, 0, 1, 0]
    for update, before, after in zip(range(1, 6), states, states[1:]):
        assert same(before, after) == (update in (2, 4))
    assert steps_taken(trainer) == {3}
    assert [row["policy_grad_norm"] is None or row["critic_grad_norm"] is None for row in run.metrics()] == [
        bool(row["skipped_steps"]) for row in history
    ]


@pytest.mark.parametrize("fault", list(FAULTS)[::2])
def test_several_in_a_row_stop_the_run_and_say_where(make, run, fault):
    trainer = make(run, updates=9)
    FAULTS[fault](trainer, range(2, 10))
    before = by_update(trainer)
    with pytest.raises(InputError, match="3 updates in a row were not finite and were left out .*_grad_norm"):
        trainer.train()
    assert len(run.metrics()) == 3 and same(before[1], before[-1])
    assert trainer.checkpoints.updates() == [2, 3]


def test_the_first_update_may_be_bad(make):
    """It is not taken for a policy that starts elsewhere, and does not set off the ceiling."""
    trainer = make(updates=2, kl_ceiling=0.5)
    spoil(trainer, "policy", (1,), -math.inf)
    history = trainer.train()
    assert [row["skipped_steps"] for row in history] == [1, 0]


@pytest.mark.parametrize(
    ("several", "bad", "steps"),
    [
        ({"num_ppo_epochs": 2}, 3, 2),  # old log-probabilities spoil every step, though the second pass is right
        ({"num_mini_batches": 2}, 5, 3),  # one step of two
    ],
)
def test_one_bad_pass_of_several(make, several, bad, steps):
    """The policy's forward pass number `bad`, in the second update, leaves out the steps that need it."""
    trainer, calls = make(updates=2, **several), []

    def hook(_, args, out):
        calls.append(1)
        return (out[0] * math.nan, out[1]) if len(calls) == bad else None

    trainer.models.policy.register_forward_hook(hook)
    first, second = (row["skipped_steps"] for row in trainer.train())
    assert first == 0 < second and steps_taken(trainer) == {steps}


def test_counted_over_a_restart(make, base, sft, rm, tokenizer, run):
    """Two bad updates, a checkpoint, and a third bad one after it are three in a row."""
    trainer = make(run, updates=3)
    spoil(trainer, "policy", (2, 3))
    trainer.train()
    again = build(build_models(base, sft, rm), tokenizer, RunFolder.open(run.path), updates=4)
    spoil(again, "policy", (4,))
    with pytest.raises(InputError, match="3 updates"):
        again.train(resume=True)


def test_a_policy_that_cannot_be_sampled_ends_the_run_in_a_line(make):
    trainer = make(updates=2)
    trainer.parameters["policy"][0].data.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
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
@pytest.mark.parametrize("never", [True, False])
def test_all_responses_are_as_long_as_can_be_or_eos_alone(make, tokenizer, how, n, never):
    trainer = make(generator=ends(tokenizer, never), termination=FixedNGram(n), updates=2, **how)
    for row in trainer.train():
        assert (row["eos_rate"], row["response_length"], row["skipped_steps"]) == ((0, 6, 0) if never else (1, 1, 0))
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


@pytest.mark.parametrize("how", [{}, {"whiten": True}])
def test_identical_rewards(make, how):
    """No spread: whitened scores are 0, not NaN, and only KL and the critic are left to train on."""
    for row in make(reward=FunctionReward(lambda p, r: [2.0] * len(r)), updates=2, **how).train():
        assert (row["rm_score_std"], row["rm_score_mean"], row["skipped_steps"]) == (0, 2, 0)
        assert math.isfinite(row["policy_loss"]) and math.isfinite(row["value_loss"])


# -- rewards of anybody -----------------------------------------------------------------------------------------------


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
    (lambda p, r: 3.0, "3.0"),
    (lambda p, r: [0.0, math.nan, 0.0, 0.0], "scores[1]"),
    (lambda p, r: [0.0, 0.0, 0.0, -math.inf], "scores[3]"),
    (lambda p, r: [1e39, 0.0, 0.0, 0.0], "scores[0]"),
    (lambda p, r: [10**400, 0, 0, 0], "too large"),
    (lambda p, r: ["good", 0.0, 0.0, 0.0], "'good'"),
    (lambda p, r: [None] * len(r), "None"),
    (lambda p, r: torch.zeros(4, 2), "returned"),
]


@pytest.mark.parametrize(("function", "named"), BAD)
def test_a_reward_that_is_wrong_is_named(make, run, function, named):
    trainer = make(run, reward=FunctionReward(function, "my.module:mine"))
    before = state(trainer)
    with pytest.raises(InputError) as caught:
        trainer.train()
    message = str(caught.value).removeprefix("reward my.module:mine: ")
    assert named in message != str(caught.value) and "\n" not in message
    assert run.metrics() == [] and same(before, state(trainer))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda x: (s for s in x), lambda x: map(int, x)])
def test_numbers_of_any_kind_will_do(make, kind):
    row = make(reward=FunctionReward(lambda p, r: kind([1, 2, 3, 4])), updates=1).train()[0]
    assert row["rm_score_mean"] == 2.5


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

    with pytest.raises(InputError, match="tokens"):
        make(termination=rule, reward=FunctionReward(early_letters)).train()


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tiny, sft, rm, tmp_path_factory):
    return (tiny.model, str(sft), str(rm)), tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def plain(places):
    """A run whose disk is large enough."""
    folders, root = places
    wait(process := start(run_child, root / "plain", folders, {}))
    assert process.exitcode == 0
    return root / "plain"


@pytest.mark.parametrize("full", ["checkpoints/update-000003.pt", "metrics.jsonl"])
def test_a_full_disk_is_said_and_the_last_checkpoint_goes_on(places, plain, full):
    """From the second update on, files may grow no larger than one byte less than `full` needs."""
    folders, root = places
    path, size = root / Path(full).name, (plain / full).stat().st_size
    limit = size // 2 if full == "metrics.jsonl" else size - 1
    wait(process := start(run_child, path, folders, {}, 0, 0, (1, limit)))
    error = (path / "error.txt").read_text()
    assert process.exitcode == 1 and error.startswith("InputError") and "free some disk space" in error
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

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(InputError, match="policy.*No space left.*disk space"):
        trainer.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old
    assert not [*tmp_path.glob(".*")]

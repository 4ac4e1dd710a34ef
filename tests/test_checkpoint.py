"""Checkpoints: what they hold, that nothing else changes by them, and which ones are refused, with which words."""

import copy
import math
import random
import shutil
from functools import partial

import numpy
import pytest
import torch
from accelerate import Accelerator
from conftest import fails, snapshot
from small_runs import build, early_letters, noisy, same, same_checkpoints, state, timeless

from marlhf_lite.models.loading import build_models, new_policy, new_reward_model
from marlhf_lite.training import checkpoint
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import generate
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.random_states import random_states, set_random_states
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.seals import seal


@pytest.fixture
def fresh_roles(base, sft, rm):
    return lambda: build_models(base, sft, rm)


@pytest.fixture
def make(fresh_roles, tokenizer):
    """A trainer with roles of its own; `run` is a RunFolder."""
    return lambda run=None, **changes: build(fresh_roles(), tokenizer, run, **changes)


@pytest.fixture(scope="module")
def stored(base, sft, rm, tokenizer, tmp_path_factory):
    """A run of three updates with checkpoints of the last two; it is copied, never changed."""
    run = RunFolder.create(tmp_path_factory.mktemp("stored") / "run", {})
    build(build_models(base, sft, rm), tokenizer, run, updates=3, save_total_limit=2).train()
    return run


@pytest.fixture
def copied(stored, tmp_path):
    shutil.copytree(stored.path, tmp_path / "copy")
    return RunFolder.open(tmp_path / "copy")


def again(run):
    return RunFolder.open(run.path)


# -- what is held -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"critic_warmup": 9}, {"num_ppo_epochs": 2}])
def test_loading_gives_back_what_was_saved(make, run, changes):
    """Weights, moments (also: that there are none), counters, the KL coefficient, and every random generator."""
    made = make(run, updates=10, checkpoint_every=1, **changes)
    made.train(asked_to_stop=lambda: made.state.updates_done == 2)
    saved, drawn = state(made), [torch.rand(3), random.random(), numpy.random.rand()]
    if changes.get("critic_warmup"):
        assert {name for i, name in saved if i < len(made.parameters["policy"])} == {"weights"}
    other = make(again(run), updates=10, checkpoint_every=1, **changes)
    torch.rand(7), random.random(), numpy.random.rand()
    other.resume()
    assert same(state(other), saved) and other.state == made.state
    assert (
        torch.equal(torch.rand(3), drawn[0]) and [random.random(), numpy.random.rand()] == drawn[1:]
    )
    assert (
        other.state.generated_tokens == made.state.generated_tokens > 0
        and other.history == again(run).metrics()
    )


def test_the_scale_of_the_loss_in_float16(make, run, copied):
    """It has grown since the start, and grows on from there; a checkpoint without one leaves it as it is."""

    def trainer(run):
        accelerator = Accelerator()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return make(run, updates=3, accelerator=accelerator)

    made, other, none = trainer(run), trainer(again(run)), trainer(copied)
    made.train()
    saved = made.accelerator.scaler.state_dict()
    assert saved["scale"] == 16 and saved["_growth_tracker"] == 1
    other.train(resume=True), none.train(resume=True)
    assert (
        other.accelerator.scaler.state_dict() == saved and none.accelerator.scaler.get_scale() == 8
    )


def test_a_machine_with_fewer_gpus(monkeypatch):
    """A checkpoint with the states of four GPUs, as older versions wrote it, is resumed on one."""
    states, taken = torch.arange(4), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[2])
    monkeypatch.setattr(torch.cuda, "set_rng_state", taken.append)
    cpu, cuda, *others = random_states()
    assert cuda == [states[2]]
    for held in (list(states), cuda, []):
        set_random_states((cpu, held, *others))
    assert taken == [states[0], states[2]]


def test_frozen_weights_are_not_written(make, stored):
    parameters = make().parameters
    state = torch.load(stored.path / "checkpoints" / "update-000003.pt", weights_only=True)
    weights = [x.numel() for name, x in state["tensors"].items() if name.startswith("weights.")]
    assert sum(weights) == sum(p.numel() for ps in parameters.values() for p in ps)


@pytest.mark.parametrize("spoilt", [False, True])
def test_checkpoints_change_nothing(make, tmp_path, spoilt):
    """Metrics are those of a run without them, also where the first update was left out and Adam has no moments."""
    histories = []
    for every in (0, 1):
        made = make(RunFolder.create(tmp_path / str(every), {}), updates=4, checkpoint_every=every)
        if spoilt:
            made.models.policy.register_forward_hook(
                lambda _, args, out, made=made: tuple(
                    x * (math.nan if made.state.updates_done == 0 else 1) for x in out
                )
            )
        histories.append(timeless(made.train()))
    assert repr(histories[0]) == repr(histories[1])  # NaN included
    assert histories[0][0]["skipped_steps"] == float(spoilt)


# -- when and how many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "every, keep, expected",
    [(1, 9, [1, 2, 3, 4, 5]), (1, 2, [4, 5]), (2, 9, [2, 4, 5]), (9, 1, [5]), (0, 1, [])],
)
def test_every_k_updates_and_at_the_end(make, run, every, keep, expected):
    made = make(
        run, updates=5, batch_size=2, length=2, checkpoint_every=every, save_total_limit=keep
    )
    made.train()
    assert made.checkpoints.updates() == expected
    left = {path.name for path in made.checkpoints.folder.iterdir()} if expected else set()
    assert left == {f"update-{update:06d}.pt" for update in expected}


# -- going on ---------------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(make, copied):
    def files():
        return {
            path: path.read_bytes() for path in sorted(copied.path.rglob("*")) if path.is_file()
        }

    before, other = files(), make(copied)
    assert other.train(resume=True) == copied.metrics() and len(other.history) == 3
    assert files() == before


def test_more_updates_are_those_of_a_longer_run(make, run, tmp_path):
    options = {"reward": FunctionReward(noisy), "checkpoint_every": 2}
    random.seed(0), numpy.random.seed(0)
    make(run, updates=3, **options).train()
    longer = make(again(run), updates=5, **options)
    longer.train(resume=True)
    random.seed(0), numpy.random.seed(0)
    whole = make(RunFolder.create(tmp_path / "whole", {}), updates=5, **options)
    whole.train()
    assert timeless(longer.history) == timeless(whole.history) and len(whole.history) == 5
    assert same(state(longer), state(whole)) and longer.state == whole.state


def test_a_smaller_number_of_responses_at_a_time_stays(make, run, tmp_path):
    """Where memory ended before the stop, the run goes on with what was in force; a number that is asked for counts."""

    def little(model, tokenizer, prompts, *rest):
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(model, tokenizer, prompts, *rest)

    made = make(run, updates=4, sampler=little)
    made.train(asked_to_stop=lambda: made.state.updates_done == 2)
    asked = make(again(run), updates=4, generation_batch_size=1)
    asked.resume()
    assert asked.state.generation_batch.now == 1
    longer = make(again(run), updates=4)
    whole = make(RunFolder.create(tmp_path / "whole", {}), updates=4, generation_batch_size=2)
    assert (
        timeless(longer.train(resume=True)) == timeless(whole.train())
        and longer.state.generation_batch.now == 2
    )


def test_from_the_one_before_a_damaged_one(make, stored, copied):
    """Which is deleted, as the message says: the logs are cut back, and what came later is made again."""
    seen = []

    def reward(prompts, responses):
        seen.append(
            ([path.name for path in (copied.path / "checkpoints").iterdir()], len(copied.metrics()))
        )
        return early_letters(prompts, responses)

    (copied.path / "checkpoints" / "update-000003.pt").unlink()
    other = make(copied, reward=FunctionReward(reward))
    other.train(resume=True)
    assert seen == [(["update-000002.pt"], 2)] and other.checkpoints.updates() == [2, 3]
    assert timeless(copied.metrics()) == timeless(stored.metrics())
    assert same_checkpoints(
        *(run.path / "checkpoints" / "update-000003.pt" for run in (stored, copied))
    )


def test_from_an_earlier_one_on_request(make, stored, copied):
    """The later one goes, and what came after is made again, bit by bit."""
    other = make(copied)
    assert timeless(other.train(resume=True, at=2)) == timeless(stored.metrics())
    assert other.checkpoints.updates() == [2, 3]
    for update in (2, 3):
        name = f"checkpoints/update-{update:06d}.pt"
        assert same_checkpoints(stored.path / name, copied.path / name)


@pytest.mark.parametrize(
    ("updates", "at", "parts"),
    [
        (3, 1, ["--at 1: ", "no checkpoint of that update: choose from 2, 3"]),
        (2, None, ["--updates 2: the run has made 3 already: ", "--updates 3", "--at"]),
        (2, 3, ["--updates 2: the run has made 3 already"]),
    ],
)
def test_a_length_or_a_checkpoint_that_is_not_there(make, copied, updates, at, parts):
    other = make(copied, updates=updates)
    fails(lambda: other.train(resume=True, at=at), *parts)
    assert other.checkpoints.updates() == [2, 3] and len(copied.metrics()) == 3


def test_one_that_does_not_fit_deletes_nothing(make, copied, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(checkpoint, "local_tensors", full)
    with pytest.raises(torch.OutOfMemoryError):
        make(copied).train(resume=True)
    assert make(copied).checkpoints.updates() == [2, 3] and len(copied.metrics()) == 3


def test_what_is_newer_than_it_is_removed(make, stored, copied):
    """Logs between the last checkpoint and the kill, the last line half, and half a checkpoint."""
    (copied.path / "checkpoints" / ".update-000004.pt").write_bytes(b"half")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(copied.path / name, "ab") as file:
            file.write(b'{"update": 4}\n{"upda')
    (copied.path / "tests.jsonl").write_text('{"update": 4, "score_mean": 9}\n')
    make(copied).train(resume=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (copied.path / name).read_bytes() == (stored.path / name).read_bytes()
    assert copied.tests() == [] and not [*(copied.path / "checkpoints").glob(".*")]


def test_another_micro_batch_may_be_asked_for(make, run, copied):
    """A smaller or larger one, or 0 for the most that fits; the one in force stays where nothing new is asked for."""
    for asked, expected in ((2, 2), (64, 64), (0, 4)):
        other = make(copied, micro_batch_size=asked)
        other.train(resume=True)
        assert other.state.micro_batch.now == expected
    made = make(run, updates=1)
    made.state.micro_batch.now = 1  # as where memory ended
    made.train()
    other = make(again(run), updates=2)
    other.train(resume=True)
    assert (other.state.micro_batch.now, other.config.micro_batch_size) == (1, 4)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [-1, 1000, 0])
def test_damage_is_found_and_named(make, copied, kept):
    path = copied.path / "checkpoints" / "update-000003.pt"
    path.write_bytes(path.read_bytes()[:kept])
    logs = (copied.path / "metrics.jsonl").read_bytes()
    other = make(copied)
    before = copy.deepcopy(snapshot(other.actor_critic))
    with pytest.raises(
        InputError,
        match="update-000003.pt: .*damaged.*: delete it, and --resume takes the one before",
    ):
        other.train(resume=True)
    # nothing half loaded
    assert all(torch.equal(before[k], v) for k, v in snapshot(other.actor_critic).items())
    assert (copied.path / "metrics.jsonl").read_bytes() == logs and other.checkpoints.updates() == [
        2,
        3,
    ]


def test_none_is_there(make, run):
    fails(partial(make(run).train, resume=True), "there is no checkpoint: train without resuming")


def test_other_adapters(base, tiny, tokenizer, copied, tmp_path):
    options = copy.copy(tiny)
    options.lora_r = 2
    torch.manual_seed(0)
    new_policy(base, options).save_pretrained(tmp_path / "sft")
    new_reward_model(base, tmp_path / "sft").save_pretrained(tmp_path / "rm")
    other = build(build_models(base, tmp_path / "sft", tmp_path / "rm"), tokenizer, copied)
    with pytest.raises(InputError, match="another model or other adapters"):
        other.train(resume=True)


def test_one_of_another_number_of_processes(make, copied):
    """The way out is the number of processes, not an older checkpoint."""
    path = copied.path / "checkpoints" / "update-000003.pt"
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"random": saved["random"] * 2}, path)
    seal(path)
    resume = partial(make(copied).train, resume=True)
    fails(resume, "update-000003.pt: made by 2 processes, not 1: launch it with --num_processes 2")


def test_logs_that_are_not_its_own(make, copied):
    (copied.path / "samples.jsonl").write_text("")
    fails(
        lambda: make(copied).train(resume=True),
        "update-000003.pt: samples.jsonl has 0 bytes instead of",
    )

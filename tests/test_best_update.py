"""The best update by a held-out number, and early stopping: what transformers' trainer does with the same numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import fails, snapshot
from small_runs import build, state, timeless
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from marlhf_lite.config.commands import PPOCommand
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.evaluation.held_out import numbers_of_tests
from marlhf_lite.experiments.context import check_keep_best
from marlhf_lite.models.loading import build_models, load_policy
from marlhf_lite.training.best_update import BestUpdate
from marlhf_lite.training.run_state import BatchSize, RunState
from marlhf_lite.utils.run_folder import RunFolder


def compared(number, patience, found):
    """After which tests a run would stop, and the best update, where update i finds `found[i - 1]`."""
    size = BatchSize(asked=1, now=1)
    state = RunState(micro_batch=size, generation_batch=size, gradient_checkpointing=False)
    best = BestUpdate(score_name=number, patience=patience, state=state)
    for state.updates_done, x in enumerate(found, start=1):
        best.remember_if_best({number: x})
        if best.is_out_of_patience():
            return state.updates_done, state.best_update
    return None, state.best_update


def of_transformers(name, patience, found, tmp_path):
    """The same by `EarlyStoppingCallback`, and by the rule of `load_best_model_at_end`."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model=name,
        report_to="none",
        use_cpu=True,
    )
    callback, seen = EarlyStoppingCallback(patience), TrainerState()
    for step, x in enumerate(found, start=1):
        control = TrainerControl()
        callback.on_evaluate(arguments, seen, control, {f"eval_{name}": x})
        better = x > (seen.best_metric if seen.best_metric is not None else -math.inf)
        if not arguments.greater_is_better:
            better = x < (seen.best_metric if seen.best_metric is not None else math.inf)
        if better:
            seen.best_metric, seen.best_global_step = x, step
        if control.should_training_stop:
            return step, seen.best_global_step
    return None, seen.best_global_step


@pytest.mark.parametrize("name", ["score_mean", "my_loss"])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(
    "found",
    [
        (1.0, 2.0, 3.0, 4.0),
        (4.0, 3.0, 2.0, 1.0, 0.0),
        (1.0, 1.0, 1.0, 1.0),
        (2.0, 1.0, 3.0, 2.0, 1.0, 2.0),
        (0.0, -1.0, math.nan, 1.0, 1.0, 1.0),
    ],
)
def test_the_best_update_and_the_stop_are_those_of_transformers(name, patience, found, tmp_path):
    assert compared(name, patience, found) == of_transformers(name, patience, found, tmp_path)


def held_out(numbers):
    """A test that finds these numbers, one after another, and whose other number nobody asked for."""
    left = iter(numbers)
    return lambda models: {"accuracy": next(left), "other": 0.5}


def test_a_run_ends_with_the_policy_of_its_best_update(base, sft, rm, tokenizer, tmp_path, capsys):
    """The checkpoint of it stays beside the last one, also after a resume."""

    def trainer(name, numbers, updates, **changes):
        run = tmp_path / name
        run = RunFolder.open(run) if run.exists() else RunFolder.create(run, {})
        roles = build_models(base, sft, rm)
        made = {"held_out": held_out(numbers), "eval_every": 1, "save_total_limit": 1}
        return build(roles, tokenizer, run, updates=updates, **made, **changes)

    short = trainer("short", [0.1, 0.3], 2)
    short.train()
    made = trainer("run", [0.1, 0.3, 0.2], 3, keep_best="accuracy")
    made.train()
    assert same_weights(made, short) and made.checkpoints.updates() == [2, 3]
    assert "takes the policy of update 2, the best: accuracy 0.3" in "".join(capsys.readouterr())
    made.save(tmp_path / "run")
    saved = load_policy(base, tmp_path / "run" / "policy")
    assert snapshot(saved).keys() == snapshot(made.models.policy.model).keys()
    assert (tmp_path / "run" / "policy" / "updates.json").read_text() == '{\n "update": 2\n}'

    longer = trainer("run", [0.25, 0.4], 5, keep_best="accuracy")
    longer.train(resume=True)
    whole = trainer("whole", [0.1, 0.3, 0.2, 0.25, 0.4], 5, keep_best="accuracy")
    assert timeless(whole.train()) == timeless(longer.history)
    assert same_weights(whole, longer) and longer.checkpoints.updates() == [5]


def same_weights(one, other):
    ours, theirs = state(one), state(other)
    names = [name for name in ours if name[1] == "weights"]
    return all(torch.equal(ours[name], theirs[name]) for name in names)


def test_a_run_stops_when_its_tests_find_nothing_better(make, run, capsys):
    made = make(
        run,
        held_out=held_out([0.3, 0.2, 0.3, 9.0]),
        eval_every=1,
        updates=9,
        keep_best="accuracy",
        patience=2,
    )
    made.train()
    line = "ppo: stopped at update 3: no better accuracy in 2 tests"
    assert line in capsys.readouterr().out.splitlines() and len(made.history) == 3
    assert made.checkpoints.updates()[-1] == 3 and made.update_of_weights == 1


def test_what_cannot_be_kept_is_refused(make, run):
    fails(
        lambda: PPOTrainerConfig(keep_best="score_mean"), "--keep_best score_mean: ", "eval_every"
    )
    fails(lambda: PPOTrainerConfig(patience=2), "--patience 2: ", "give --keep_best")
    fails(lambda: make(eval_every=1, keep_best="accuracy"), "--keep_best accuracy: ", "run folder")
    fails(lambda: make(run, eval_every=1, keep_best="accuracy"), "no held-out tests")
    made = make(run, held_out=held_out([0.1]), eval_every=1, keep_best="acuracy")
    fails(made.train, "--keep_best acuracy: ", "choose from accuracy, other")


def test_the_command_line_knows_the_numbers_of_its_tests(make, run, tokenizer, roles):
    """A misspelled one ends it before anything is loaded: these are what its tests find."""
    made = make(run, test_prompts=["a", "b"], eval_every=1, updates=1, gold=lambda *x: [0.0] * 2)
    found = made.loop.test_held_out()
    assert sorted(found) == sorted(numbers_of_tests(has_gold=True))
    options = PPOCommand(keep_best="score_maen", eval_every=1)
    plan = SimpleNamespace(options=options, task=SimpleNamespace(gold=None))
    fails(lambda: check_keep_best(plan), "--keep_best score_maen: ", "score_mean?")
    plan.options = replace(options, keep_best="gold_mean")
    fails(lambda: check_keep_best(plan), "no such number")

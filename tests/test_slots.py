"""The three slots of the method: a rule, an objective and a reward of the user's own, by name and in Python."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import fails
from plain_update import far, learner, options, record

from marlhf_lab.studies.study import load_study, plan
from marlhf_lite.cli import main
from marlhf_lite.config.options import MacroConfig, PPOTrainerConfig
from marlhf_lite.experiments.named_rules import make_rule
from marlhf_lite.macro import FixedNGram
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.objectives import make_objective
from marlhf_lite.training.rewards import FunctionReward

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SLOTS = [
    "--termination",
    "my_rule:halves",
    "--objective",
    "my_objective:MonteCarlo",
    "--reward",
    "my_reward:short",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the examples and `mine.py` in it; modules of other tests are forgotten."""
    for path in EXAMPLES.glob("my_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("mine", "my_rule", "my_objective", "my_reward"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.long
def test_a_stranger_runs_the_examples_from_an_empty_folder(installed, tmp_path):
    """With the installed wheel, by `marlhf run`; the record says that the rule and the reward were used."""
    for path in EXAMPLES.glob("my_*.py"):
        assert len(path.read_text().splitlines()) <= 30
        shutil.copy(path, tmp_path)
    small = "--size 60 --updates 1 --batch_size 4 --eval_prompts 2 --max_response_length 8 --sft_epochs 0.2".split()
    command = [
        sys.executable,
        str(installed / "bin" / "marlhf"),
        "run",
        *SLOTS,
        *small,
        "--output_dir",
        "run",
    ]
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = map(
        json.loads, (tmp_path / "run" / "ma-ppo" / "metrics.jsonl").read_text().splitlines()
    )
    assert 1 < row["macro_actions"] <= 2 and row["score_mean"] <= 0
    # The evaluation shows the reward under its name beside the embedded task's true score.
    for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        answer = json.loads(line)
        assert answer["my_reward:short"] == pytest.approx(-len(answer["response"].split()) / 50)
        assert "gold" in answer


def test_a_protocol_names_them(folder):
    (folder / "own.yaml").write_text(
        "seeds: [0]\nbaseline: A\ntarget_method: A\nshared: {reward: 'my_reward:short', critic_init: sft}\n"
        "methods: {A: {command: ppo, options: {termination: 'my_rule:halves', objective: 'my_objective:Reinforce'}}}\n"
    )
    (run,) = plan(load_study("own.yaml"))
    assert (
        run.options["termination"] == "my_rule:halves"
        and run.options["objective"] == "my_objective:Reinforce"
    )
    for name in ("my_rule:halves", "my_objective:Reinforce", "my_reward:short"):
        other = (folder / "own.yaml").read_text().replace(name, name + "s")
        (folder / "other.yaml").write_text(other)
        fails(lambda: plan(load_study("other.yaml")), f"{name}s: cannot be imported")


# -- what the examples compute ----------------------------------------------------------------------------------------


def test_monte_carlo_is_gae_with_lambda_1(moved, batch, folder):
    rows = []
    for changes in ({"lam": 1.0}, {"objective": "my_objective:MonteCarlo"}):
        made = learner(
            moved, options(**changes, policy_learning_rate=1e-12, critic_learning_rate=1e-12)
        )
        made.state.updates_done = 1
        rows.append(made.learn(batch, FixedNGram(3)(batch.mask)))
    for name in (
        "policy_loss",
        "value_loss",
        "policy_grad_norm",
        "advantage_norm",
        "q_norm",
        "value_clip_fraction",
    ):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4, abs=1e-6), name


def test_the_first_gradient_of_reinforce_is_ppos(moved, batch, folder):
    """Where π is π_old the gradient of ρ Â is that of log π Â; PPO's clip fraction is not recorded."""
    grads = []
    for objective in ("", "my_objective:Reinforce"):
        made = learner(
            moved,
            options(objective=objective, policy_learning_rate=1e-12, critic_learning_rate=1e-12),
        )
        steps = record(made)
        row = made.learn(batch, FixedNGram(3)(batch.mask))
        grads.append(steps["policy"][0][0])
        assert ("clip_fraction" in row) == (not objective) and "value_clip_fraction" in row
    assert far(*grads) < 1e-4


def test_the_trainer_takes_a_class(moved, batch):
    class Doubled(Objective):
        def rewards(self, batch, outputs):
            return 2 * super().rewards(batch, outputs)

    macro_actions, rows = FixedNGram(3)(batch.mask), []
    # without values and KL, all rewards are scores
    for scale, objective in ((1.0, Doubled), (2.0, None)):
        made = learner(
            moved, options(kl_coef=0.0, policy_learning_rate=1e-12, lam=1.0), objective=objective
        )
        rows.append(
            made.learn(replace(batch, scores=scale * batch.scores), macro_actions)["q_norm"]
        )
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["four", "any", "three"])
def test_an_estimate_may_see_the_outputs_of_the_models(moved, batch, kind):
    """Log-probabilities, entropy and values of the tokens; one without this argument works as before."""
    seen = []

    class Four(Objective):
        def estimate(self, rewards, values, batch, outputs):
            seen.append(outputs)
            return super().estimate(rewards, values, batch, outputs)

    class Any(Objective):
        def estimate(self, *arguments):
            seen.append(arguments[3])
            return super().estimate(*arguments)

    class Three(Objective):
        def estimate(self, rewards, values, batch):
            return super().estimate(rewards, values, batch)

    objective = {"four": Four, "any": Any, "three": Three}[kind]
    macro_actions = FixedNGram(3)(batch.mask)
    plain = learner(moved, options(policy_learning_rate=1e-12, critic_learning_rate=1e-12))
    made = learner(
        moved, options(policy_learning_rate=1e-12, critic_learning_rate=1e-12), objective=objective
    )
    row = made.learn(batch, macro_actions)
    assert row["advantage_norm"] == plain.learn(batch, macro_actions)["advantage_norm"]
    if kind != "three":
        (outputs,) = seen
        assert outputs.entropy.shape == outputs.values.shape == batch.mask.shape
        assert (outputs.entropy[batch.mask] > 0).all() and (outputs.logprobs[batch.mask] < 0).all()


def test_a_rule_may_be_a_class(folder):
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert make_rule(MacroConfig(termination="mine:Threes"))(mask).lengths.tolist() == [
        [3, 1],
        [3, 1],
    ]


# -- faults -----------------------------------------------------------------------------------------------------------


MINE = """
import torch
from marlhf_lite.macro import FixedNGram, TerminationRule
from marlhf_lite.training.objective import Objective

number = 3


class Threes(TerminationRule):
    def segment(self, mask, **context):
        return FixedNGram(3)(mask)


def gap(mask, **context):
    return FixedNGram(2)(mask & (mask.cumsum(1) < 3))


def raises(mask, **context):
    return context["no such thing"]


def leaves(mask, **context):
    raise SystemExit(0)


def tensor(mask, **context):
    return mask


class Flat(Objective):
    def rewards(self, batch, outputs):
        return batch.rollout.scores


class Lonely(Objective):
    def estimate(self, rewards, values, batch):
        return rewards


class Wide(Objective):
    def estimate(self, rewards, values, batch):
        return rewards, torch.zeros(len(batch), 99)


class NaN(Objective):
    def estimate(self, rewards, values, batch):
        return rewards / 0 * 0, values


class Log(Objective):
    def policy_loss(self, batch, outputs, old, count):
        return outputs.logprobs.mean().log(), {}


class Terms(Objective):
    def value_loss(self, batch, outputs, old, count):
        return outputs.values, {}


class PlainNumber(Objective):
    def value_loss(self, batch, outputs, old, count):
        return 0.5, {}


class Uncounted(Objective):
    def policy_loss(self, batch, outputs, old, count):
        return outputs.logprobs.sum() / count, {"clip_fraction": torch.tensor(0.5)}


class Bonus(Objective):
    def policy_loss(self, batch, outputs, old, count):
        loss, stats = super().policy_loss(batch, outputs, old, count)
        return loss - 0.01 * outputs.entropy.sum() / count, stats


class Weighed(Objective):
    def policy_loss(self, batch, outputs, old, count):
        return -(outputs.entropy.detach() * outputs.logprobs).sum() / count, {}


class NoStats(Objective):
    def value_loss(self, batch, outputs, old, count):
        return outputs.values.sum()


class Misspelled(Objective):
    def estimates(self, rewards, values, batch):
        return rewards, rewards


class Wrong(Objective):
    def estimate(self, rewards, values, batch):
        return rewards.no_such_method()
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("halves", ["unknown", "fixed", "package.module:function"]),
        ("mine:", ["unknown"]),
        ("nowhere:rule", ["cannot be imported"]),
        ("mine:nothing", ["cannot be imported"]),
        ("mine:number", ["int"]),
    ],
)
def test_wrong_names_of_rules(folder, name, parts):
    fails(lambda: make_rule(MacroConfig(termination=name)), f"--termination {name}: ", *parts)


def test_user_code_that_leaves_does_not_end_a_run_as_done(folder, batch):
    (folder / "script.py").write_text("raise SystemExit(0)")
    fails(
        lambda: make_rule(MacroConfig(termination="script:rule")),
        "cannot be imported (SystemExit: 0)",
    )
    fails(
        lambda: FunctionReward(lambda *texts: sys.exit(0), "mine")(batch),
        "reward mine: raised SystemExit: 0",
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mine", ["unknown", "vc_ppo", "package.module:Class"]),
        ("mine:nothing", ["cannot be imported"]),
        ("mine:number", ["int"]),
        ("mine:gap", ["give a subclass of marlhf_lite.training.objective.Objective"]),
        ("mine:Threes", ["subclass"]),
        ("mine:Misspelled", ["changes no equation", "estimate"]),
        ("vapo=0", ["alpha above 0"]),
        ("vc_ppo=1.5", ["from 0 to 1"]),
        ("vc_ppo=x", ["from 0 to 1"]),
        ("sae=2", ["no number"]),
    ],
)
def test_wrong_names_of_objectives(folder, name, parts):
    fails(lambda: make_objective(PPOTrainerConfig(objective=name)), f"--objective {name}: ", *parts)
    fails(
        lambda: make_objective(PPOTrainerConfig(objective=f"sae,{name}")),
        f"--objective {name}: ",
        *parts,
    )


def test_two_classes_are_to_be_written_as_one(folder):
    name = "my_objective:MonteCarlo,vapo,mine:NaN"
    fails(
        lambda: make_objective(PPOTrainerConfig(objective=name)),
        "--objective mine:NaN: a second class",
        "inherits from both",
    )


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("sae", "sigma", "unit"),
        ("vc_ppo,sae", "rho", 0.5),
        ("sae,mine:NaN", "ratio", "macro"),
        ("sae", "value_target", "macro"),
        ("sae", "reward_pooling", "mean"),
        ("vapo=0.3,vc_ppo", "lam", 0.3),
    ],
)
def test_an_option_without_effect_beside_an_objective_is_refused(folder, name, option, value):
    config = PPOTrainerConfig(objective=name)
    make_objective(config)
    (word,) = [word for word in name.split(",") if word.startswith(("sae", "vapo"))]
    fails(
        lambda: make_objective(replace(config, **{option: value})),
        f"--{option} {value}: ",
        f"--objective {word}: ",
    )


@pytest.mark.parametrize("name", ["released,mine:Log", "mine:Terms,vapo,released"])
def test_released_beside_a_loss_of_the_users_own_is_refused(folder, name):
    """That loss is divided by `count`, which `released` makes the number of responses."""
    (own,) = [word for word in name.split(",") if ":" in word]
    fails(
        lambda: make_objective(PPOTrainerConfig(objective=name)),
        f"--objective {own}: ",
        "_loss",
        "released",
    )
    make_objective(PPOTrainerConfig(objective="released,my_objective:MonteCarlo"))


@pytest.mark.parametrize("slot", ["termination", "objective", "reward"])
def test_the_command_line_names_the_option_before_anything_is_loaded(folder, sft, rm, capsys, slot):
    words = [
        "ppo",
        "--sft",
        str(sft),
        "--rm",
        str(rm),
        f"--{slot}",
        "mine:nothing",
        "--output_dir",
        "run",
    ]
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "marlhf: error" in line]
    assert f"--{slot} mine:nothing: cannot be imported" in line and not Path("run").exists()


@pytest.mark.parametrize(
    ("option", "name", "parts"),
    [
        ("termination", "gap", ["left response tokens out", "response 0"]),
        ("termination", "tensor", ["returned Tensor"]),
        ("termination", "raises", ["raised KeyError", "of mine.py"]),
        ("termination", "leaves", ["raised SystemExit: 0", "of mine.py"]),
        ("objective", "Flat", ["rewards: ", "got (4,)"]),
        ("objective", "Lonely", ["estimate: ", "advantages and returns"]),
        ("objective", "Wide", ["returns: ", "got (4, 99)"]),
        ("objective", "NaN", ["advantages", "of the first update are not finite"]),
        ("objective", "Log", ["policy_loss of the first update are not finite"]),
        ("objective", "Terms", ["value_loss: return a tensor of one number"]),
        ("objective", "PlainNumber", ["value_loss: return a tensor of one number"]),
        ("objective", "Uncounted", ["policy_loss: stats with clip_fraction, but no count"]),
        ("objective", "Bonus", ["outputs.entropy", "no gradient", "detach()"]),
        ("objective", "NoStats", ["value_loss: ", "dict"]),
        ("objective", "Wrong", ["raised AttributeError", "mine.py"]),
    ],
)
def test_wrong_ones_end_the_first_update(folder, make, option, name, parts):
    name = f"mine:{name}"
    rule = (
        {"termination": make_rule(MacroConfig(termination=name))} if option == "termination" else {}
    )
    trainer = make(**rule, **({"objective": name} if option == "objective" else {}))
    fails(trainer.train, f"--{option} {name}: ", *parts)
    assert not trainer.history


def test_entropy_may_be_a_weight(folder, make):
    assert make(objective="mine:Weighed", updates=1).train()

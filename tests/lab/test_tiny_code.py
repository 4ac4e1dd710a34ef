"""The embedded task tiny-code: its programs in the sandbox, its form, its texts through a tokenizer."""

import json
import random
from pathlib import Path

import pytest
import yaml
from conftest import ready

from marlhf_lab.corpora.tiny_code import make_problem, write, write_with_bug
from marlhf_lab.studies.command import StudyCommand
from marlhf_lab.studies.results import read_results
from marlhf_lite.cli import main
from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.evaluation.pass_at_k import pass_at_k
from marlhf_lite.extras.programs import TestRunner, read_problem
from marlhf_lite.extras.programs.rewards import SHARES, ProgramTests, with_tests
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.utils.jsonl import read_lines
from marlhf_lite.utils.run_folder import RunFolder
from marlhf_lite.utils.shipped import shipped


def problems(count, seed=1):
    rng = random.Random(seed)
    return rng, [make_problem(rng) for _ in range(count)]


@pytest.mark.long
def test_right_programs_pass_and_programs_with_a_bug_fail():
    ready("monty")
    rng, made = problems(1000)
    tests = [read_problem(problem.tests).tests for problem in made]
    runner = TestRunner("monty")
    right = runner.run([write(rng, problem) for problem in made], tests)
    assert not [
        p.prompt
        for p, outcome in zip(made, right)
        if not all(outcome.passed) or outcome.status != "ran"
    ]
    programs = [write_with_bug(rng, problem) for problem in made]
    outcomes = runner.run(programs, tests)
    assert not [program for program, outcome in zip(programs, outcomes) if all(outcome.passed)]
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count("ran") > 700 and {"compile_error", "runtime_error"} <= set(statuses)
    assert "unsupported" not in statuses and "timeout" not in statuses
    # a part of the tests is something to climb from
    assert sum(any(outcome.passed) for outcome in outcomes) > 200


def test_both_sandboxes_agree():
    for name in ("monty", "bubblewrap"):
        ready(name)
    rng, made = problems(25, 3)
    programs = [write_with_bug(rng, problem) for problem in made]
    tests = [read_problem(problem.tests).tests for problem in made]
    outcomes = [TestRunner(name).run(programs, tests) for name in ("monty", "bubblewrap")]
    assert [o.passed for o in outcomes[0]] == [o.passed for o in outcomes[1]]


def test_the_task():
    ready("monty")
    task = with_tests(load_task("tiny-code", size=200), ProgramConfig())
    rows, taught = task.splits["test"], task.splits["sft"]
    assert task.gold(rows["prompt"], rows["chosen"]) == [1.0] * 20
    right = {row["chosen"] for row in read_file(shipped("tiny-code.jsonl.gz"))[:200]}
    # demonstrations have bugs
    assert 0.2 < sum(row["chosen"] not in right for row in taught) / len(taught) < 0.6
    assert set(rows["difficulty"]) <= {"lists", "texts", "numbers"}


# End to end, with the committed model

SIZES = {
    "size": 60,
    "updates": 1,
    "batch_size": 4,
    "micro_batch_size": 4,
    "sft_batch_size": 4,
    "sft_epochs": 1.0,
}
SIZES |= {"max_response_length": 24, "eval_prompts": 4, "num_generations": 2, "checkpoint_every": 0}


def words(*names):
    return [f"--{name}={SIZES[name]}" for name in names]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run of `marlhf run --dataset tiny-code`: SFT, MA-PPO and evaluation, and no reward model."""
    ready("monty")
    folder = tmp_path_factory.mktemp("code") / "run"
    names = [name for name in SIZES if name != "num_generations"]
    rule = "--termination parsing --parser python --eval_samples 5".split()
    assert (
        main(["run", "--dataset", "tiny-code", *words(*names), *rule, "--output_dir", str(folder)])
        == 0
    )
    return folder


def test_run_takes_the_tests_for_a_reward(start):
    config = yaml.safe_load((start / "config.yaml").read_text())
    assert (config["model"], config["reward"], config["critic_init"]) == (
        "tiny-codegemma",
        "tests",
        "sft",
    )
    assert not (start / "rm").exists()
    (row,) = RunFolder.open(start / "ma-ppo").metrics()
    assert sum(row[name] for name in SHARES) == pytest.approx(1.0) and 1 <= row["macro_length"] < 24
    rates = json.loads((start / "pass.json").read_text())
    assert {line["method"] for line in rates} == {"SFT", "MA-PPO"}
    assert all(0 <= line["pass@1"]["mean"] <= line["pass@5"]["mean"] <= 1 for line in rates)


def test_rloo_starts_from_its_sft_model(start, tmp_path):
    names = [
        "size",
        "updates",
        "batch_size",
        "micro_batch_size",
        "max_response_length",
        "num_generations",
    ]
    assert (
        main(["rloo", "--sft", str(start), *words(*names), "--output_dir", str(tmp_path / "run")])
        == 0
    )
    (row,) = RunFolder.open(tmp_path / "run" / "rloo").metrics()
    assert sum(row[name] for name in SHARES) == pytest.approx(1.0)


def test_other_limits_score_stored_answers_again(start, tmp_path, monkeypatch):
    """And other tests, and another executor; with the same ones, no program runs a second time."""
    runs = []

    def shares(self, prompts, responses):
        runs.append(len(responses))
        return [self.executor.seconds] * len(responses)

    monkeypatch.setattr(ProgramTests, "shares", shares)
    for seconds, count in ((0.5, 1), (0.25, 2), (0.25, 2)):
        words = f"evaluate --sft {start} --eval_prompts 2 --eval_samples 1 --test_seconds {seconds} --output_dir"
        assert main([*words.split(), str(tmp_path / "answers")]) == 0
        assert {row["gold"] for row in RunFolder.open(tmp_path / "answers").samples()} == {seconds}
        assert len(runs) == count
    texts = {"a": "1", "b": "2"}
    names = [
        ProgramTests(texts, ProgramConfig(**limit)).name for limit in ({}, {"test_memory": 64}, {})
    ]
    assert (
        names[0] == names[2] != names[1]
        and ProgramTests(texts | {"b": "3"}, ProgramConfig()).name != names[0]
    )


STUDY = {
    "seeds": [0],
    "shared": SIZES | {"dataset": "tiny-code", "reward": "tests"},
    "methods": {
        "SFT": {"command": "sft", "samples": 5},
        "PPO": {"command": "ppo", "samples": 5, "options": {"n": 1}},
    },
}


@pytest.mark.long
def test_a_study_with_unit_tests_needs_no_reward_model(tmp_path, monkeypatch, capsys):
    ready("monty")
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(STUDY))
    StudyCommand(name="small.yaml", output_dir="results", workers=1).run()
    assert not list(tmp_path.glob("runs/**/rm"))
    result = read_results(Path("results"))["PPO-seed0"]
    (row,) = result["curve"]
    assert sum(row[name] for name in SHARES) == pytest.approx(1.0)
    rows = read_lines(next(Path("runs").glob("**/responses/policy*/samples.jsonl")))
    counts = [
        [r["gold"] == 1 for r in rows if r["id"] == id]
        for id in dict.fromkeys(r["id"] for r in rows)
    ]
    for k in (1, 5):
        expected = [pass_at_k(5, sum(passed), k) for passed in counts]
        assert sorted(result["final"][f"pass@{k}"]) == pytest.approx(sorted(expected))
    assert "RM score" not in (Path("results") / "table.md").read_text()
    assert (Path("results") / "figures" / "outcomes.png").is_file()

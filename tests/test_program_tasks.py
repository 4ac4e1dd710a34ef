"""Tasks with unit tests through the pipeline: APPS's format, both kinds, from a local file to pass@k."""

import json
from collections import Counter

import pytest
from conftest import fails, ready

from marlhf_lite.cli import main
from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.evaluation.compare import compare
from marlhf_lite.experiments.named_rewards import text_reward
from marlhf_lite.extras.programs import rewards
from marlhf_lite.extras.programs.rewards import SHARES, with_tests
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.utils.run_folder import RunFolder

LEVELS = ("introductory", "interview", "competition")
SMALL = (
    "--sft_epochs 1 --sft_batch_size 2 --per_device_train_batch_size 2 --updates 1 --batch_size 4 --micro_batch_size 4 "
    "--max_response_length 12 --eval_prompts 4 --finetune lora "
    "--lora_r 4 --lora_alpha 8 --dtype float32 --gradient_checkpointing false"
).split()


def apps(i):
    """A problem in APPS's form: its texts are those of the data set on the hub; odd ones call a function."""
    if i % 2:
        tests = {
            "fn_name": "add",
            "inputs": [[j, i] for j in range(3)],
            "outputs": [[j + i] for j in range(3)],
        }
        solution, starter = f"def add(a, b):\n    return a + b  # {i}\n", "def add(a, b):\n\t "
    else:
        tests = {
            "inputs": [f"{j}\n" for j in range(3)],
            "outputs": [f"{j + i}\n" for j in range(3)],
        }
        solution, starter = f"print(int(input()) + {i})\n", ""
    return {
        **{
            "problem_id": i,
            "question": f"Add {i}.",
            "solutions": json.dumps([solution]),
            "starter_code": starter,
        },
        **{"input_output": json.dumps(tests), "difficulty": LEVELS[i % 3], "url": ""},
    }


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return written(tmp_path_factory.mktemp("apps") / "problems.jsonl", [apps(i) for i in range(30)])


# Rewards of texts


def test_solutions_pass_and_others_do_not(problems, executor, monkeypatch):
    task = with_tests(load_task(problems), ProgramConfig(executor=executor))
    rows = task.splits["ppo"]
    assert task.gold(rows["prompt"], rows["chosen"]) == [1.0] * len(rows)
    reward = text_reward("tests", task)
    other = ["\nprint(1", "\n1 / 0", "\nprint(int(input()) * 0)", rows["chosen"][3]]
    scores = reward(rows["prompt"][:4], other)
    assert scores[:2] == [-1.0, -0.6] and scores[3] == pytest.approx(1.0)
    at = next(i for i, prompt in enumerate(rows["prompt"]) if "Standard Input" in prompt)
    one = [f"\nprint({rows['prompt'][at].split()[2].rstrip('.')} if input() == '0' else 'no')"]
    for name, expected in (("tests", -0.3 + 1.3 / 3), ("all_tests", -0.3)):
        assert text_reward(name, task)([rows["prompt"][at]], one) == [pytest.approx(expected)]
    assert task.gold([rows["prompt"][at]], one) == [pytest.approx(1 / 3)]
    shares = reward.metrics()
    assert list(shares) == list(SHARES) and sum(shares.values()) == 1.0
    assert (shares["share_compile_error"], shares["share_passed"]) == (0.25, 0.25)
    with monkeypatch.context() as patch:  # another process has two programs, which pass
        patch.setattr(rewards, "gather_object", lambda ours: [*ours, Counter(share_passed=2)])
        assert reward.metrics()["share_passed"] == pytest.approx(3 / 6)


# Bad problems


def test_problems_without_good_tests_are_counted(tmp_path):
    ready("monty")
    broken = {"input_output": '{"inputs": ["1"]}'}
    for name, columns in (("no_tests", {"input_output": ""}), ("bad_tests", broken)):
        some = load_task(
            written(
                tmp_path / "some.jsonl", [apps(i) | ({} if i % 10 else columns) for i in range(30)]
            )
        )
        counts = with_tests(some, ProgramConfig(), "drop").counts
        assert (
            counts[name] > 0 and counts[name] + counts["ppo"] + counts["test"] == 30 - counts["sft"]
        )
    none = load_task(
        written(tmp_path / "none.jsonl", [apps(i) | {"input_output": ""} for i in range(30)])
    )
    fails(lambda: with_tests(none, ProgramConfig()), "no problem of the part ppo has tests")
    fails(lambda: with_tests(some, ProgramConfig()), "problem 'QUESTION: Add ", "--bad_rows drop")


def test_problems_that_share_a_prompt_and_not_their_tests_are_dropped(tmp_path):
    """Else one would be judged by the tests of the other. Rows that are the same stay."""
    ready("monty")
    rows = [apps(i) for i in range(0, 20, 2)]
    tests = [
        {"input_output": json.dumps({"inputs": ["1\n"], "outputs": [f"{n}\n"]})} for n in (1, 2)
    ]
    twins = [row | columns for row in rows for columns in tests]
    task = load_task(
        written(tmp_path / "twins.jsonl", [*(apps(i) for i in range(1, 20, 2)), *twins, apps(1)])
    )
    done = with_tests(task, ProgramConfig())
    before, after = (counts["ppo"] + counts["test"] for counts in (task.counts, done.counts))
    assert done.counts["different_tests"] == before - after > 0
    assert all("add" in tests for part in ("ppo", "test") for tests in done.splits[part]["tests"])
    kept = [row for part in ("ppo", "test") for row in task.splits[part] if "add" in row["tests"]]
    assert len(kept) == after


def test_a_task_without_tests(tmp_path):
    rows = [{"prompt": f"p {i}", "chosen": " a", "rejected": " b"} for i in range(20)]
    task = load_task(written(tmp_path / "pairs.jsonl", rows))
    assert with_tests(task, ProgramConfig()) is task
    fails(lambda: text_reward("tests", task), "--reward tests: ")


# Through the pipeline


@pytest.mark.long
def test_the_preset_of_apps_makes_an_update_without_a_reward_model(
    problems, tiny, tmp_path, capsys
):
    """SFT, PPO with unit tests, evaluation: --preset codegemma-2b/apps on a file and the random two-layer Gemma."""
    ready("bubblewrap")
    run, other = tmp_path / "run", tmp_path / "evaluation"
    common = ["--preset", "codegemma-2b/apps", "--dataset", problems, "--model", tiny.model]
    # The preset counts passes over the prompts; --updates wins over them.
    assert main(["run", *common, *SMALL, "--output_dir", str(run)]) == 0
    (row,) = RunFolder.open(run / "ma-ppo").metrics()
    assert sum(row[name] for name in SHARES) == pytest.approx(1.0) and not (run / "rm").exists()
    table = json.loads((run / "pass.json").read_text())
    assert {line["method"] for line in table} == {"SFT", "MA-PPO"}
    assert table[-1]["difficulty"] == "all" and table[-1]["problems"] == 3
    policies = [
        "--sft",
        str(run / "sft"),
        "--policies",
        f"MA-PPO={run / 'ma-ppo'}",
        "--output_dir",
        str(other),
    ]
    sizes = "--eval_prompts 3 --eval_samples 5".split()
    assert main(["evaluate", *policies, *sizes, "--executor", "bubblewrap"]) == 0
    shown = capsys.readouterr().out
    assert "pass@1" in shown and "pass@5" in shown and "MA-PPO" in shown
    # of all five samples, as the table that was printed
    found = {row["method"]: row for row in compare([other])}
    assert {row["samples"] for row in found.values()} == {5}
    passed = [row["gold"] for row in RunFolder.open(other).samples() if row["method"] == "MA-PPO"]
    assert len(passed) == 15 and found["MA-PPO"]["gold"] == pytest.approx(sum(passed) / 15)

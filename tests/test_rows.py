"""Rewards and environments that take the row's other columns by name, in every command that scores."""

import copy
import json
import pickle
import sys
from collections import Counter
from functools import partial
from itertools import islice
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import fails
from small_runs import PROMPTS, batches

from marlhf_lite.cli import main
from marlhf_lite.tasks.loading import load_task
from marlhf_lite.tasks.prompts import Prompt, RowColumns, prompts_of
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import prompt_batches

# Each row's `id` says which answer is its own; prompts come twice, with different answers.
ROWS = [
    {
        "prompt": f"Say {i % 30}.",
        "answer": f"{i % 30}-{i // 30}",
        "id": i,
        "facts": {"half": i / 2, "none": None},
    }
    for i in range(60)
]
REWARD = """
import json

def right(prompts, responses, answer, **row):
    assert {*row} == {"id", "facts"}, row
    with open("seen.jsonl", "a") as file:
        for prompt, text, ours, i, facts in zip(prompts, responses, answer, row["id"], row["facts"], strict=True):
            assert type(prompt) is str and facts == {"half": i / 2, "none": None}
            assert prompt == f"Say {i % 30}." and ours == f"{i % 30}-{i // 30}", (prompt, ours, i)
            file.write(json.dumps([i, prompt, text]) + "\\n")
        for facts in row["facts"]:
            facts["half"] = None  # what it gets is its own
    return [float(len(a) + sum(map(text.count, a))) for text, a in zip(responses, answer, strict=True)]

def lacks(prompts, responses, solution):
    return [0.0] * len(prompts)

class Asker:
    def reset(self, prompts, answer, id):
        assert [f"{i % 30}-{i // 30}" for i in id] == answer and [f"Say {i % 30}." for i in id] == prompts
        return list(answer)

    def step(self, states, texts):
        rewards = [float(text.count(state[0])) for state, text in zip(states, texts)]
        return [f"It was {state}." for state in states], rewards, [True] * len(texts)
"""
SMALL = (
    "--dataset rows.jsonl --micro_batch_size 4 --max_response_length 6 --updates 2 --batch_size 8 --eval_every 1 "
    "--test_prompts 4 --reward rows_reward:right"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current folder, with a data file, the reward, and a run from an empty start."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows_reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        assert (
            main(
                [
                    "run",
                    *SMALL,
                    "--eval_prompts",
                    "6",
                    "--output_dir",
                    "run",
                    "--checkpoint_every",
                    "1",
                ]
            )
            == 0
        )
        yield folder


def seen(folder):
    """What the reward was asked for since the last time: (id, prompt, response)."""
    file = folder / "seen.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return lines


def test_a_run_scores_every_row_with_its_own_columns(folder, capsys):
    calls, parts = seen(folder), json.loads((folder / "run" / "data.json").read_text())
    samples = [
        json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 2 * 6 and len({i for i, *_ in calls}) > 16
    # Training, held-out tests (SFT once, then each update), and the evaluation of SFT and MA-PPO.
    assert len(calls) == 2 * 8 + 3 * 4 + 2 * 6 and parts["test"] == parts["test_prompts"] == 6
    by_prompt = Counter(row["prompt"] for row in samples if row["method"] == "SFT")
    # rows of one prompt with different answers are different
    assert sorted(by_prompt.values()) == [2, 2, 2]
    # The same prompt and the same words, another answer: another score for each.
    for row in samples:
        number = row["prompt"][4:-1]
        possible = [f"{number}-{k}" for k in (0, 1)]
        assert row["rows_reward:right"] in [
            len(a) + sum(map(row["response"].count, a)) for a in possible
        ]


@pytest.mark.parametrize("command", ["rloo", "grpo"])
def test_groups_get_the_row(folder, command):
    words = [*SMALL, "--num_generations", "2", "--sft", "run", "--output_dir", command]
    assert main([command, *words]) == 0
    calls = seen(folder)
    assert len(calls) == 2 * 8 + 3 * 4
    for one, two in zip(calls[:8:2], calls[1:8:2]):  # training comes before the first test
        assert one[0] == two[0]  # a group has one row


def test_evaluation_scores_again_when_the_answers_change(folder, capsys):
    words = [
        "--dataset rows.jsonl --sft run --eval_prompts 6 --max_response_length 6".split(),
        ["--output_dir", "eval"],
    ]
    command = [
        "evaluate",
        "--policies",
        "run",
        "--reward",
        "rows_reward:right",
        *words[0],
        *words[1],
    ]
    assert main(command) == 0 and len(seen(folder)) == 2 * 6
    assert main(command) == 0 and not (folder / "seen.jsonl").exists()  # all is stored
    changed = [row | {"id": (row["id"] + 30) % 60} for row in ROWS]
    changed = [
        row | {"answer": f"{row['id'] % 30}-{row['id'] // 30}", "facts": ROWS[row["id"]]["facts"]}
        for row in changed
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert main(command) == 2  # the run was made with other rows
    assert main([*command, "--accept_changed"]) == 0 and len(seen(folder)) == 2 * 6
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def test_ppo_resumes_with_the_same_rows(folder):
    start = ["ppo", *SMALL, "--sft", "run", "--critic_init", "sft", "--checkpoint_every", "1"]
    assert main([*start, "--output_dir", "whole"]) == 0
    whole = seen(folder)
    assert main([*start, "--output_dir", "parts", "--updates", "1"]) == 0
    first = seen(folder)
    assert main([*start, "--resume", "parts"]) == 0
    rest = seen(folder)
    # the first test scores SFT's answers, too
    assert first[:8] + rest[:8] == whole[:8] + whole[16:24]
    ours, theirs = (
        (folder / name / "ppo" / "metrics.jsonl").read_text() for name in ("parts", "whole")
    )
    for one, two in zip(
        *([json.loads(x) for x in text.splitlines()] for text in (ours, theirs)), strict=True
    ):
        assert {k: x for k, x in one.items() if "second" not in k} == {
            k: x for k, x in two.items() if "second" not in k
        }


def test_an_environment_gets_the_row(folder, capsys):
    words = "--environment rows_reward:Asker --reward environment --termination turn --max_turns 2".split()
    assert (
        main(
            [
                "ppo",
                *SMALL[:-2],
                *words,
                "--sft",
                "run",
                "--critic_init",
                "sft",
                "--output_dir",
                "turns",
            ]
        )
        == 0
    )
    assert "note: columns not used: facts\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["run"], ["ppo", "--sft", "run", "--critic_init", "sft"], ["rloo", "--sft", "run"]]
)
def test_a_column_that_is_not_there_is_refused_before_training(folder, capsys, words):
    assert main([*words, *SMALL[:-1], "rows_reward:lacks", "--output_dir", "none"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "marlhf: error: --reward rows_reward:lacks: asks for the column solution, which is not there"
    )
    assert "answer, id, facts" in error and not (folder / "none").exists()


def test_what_a_reward_takes_is_no_longer_unused(folder):
    takes_one = RowColumns(lambda prompts, responses, answer: 0, 2, "mine")
    task = load_task("rows.jsonl", row_columns=[takes_one])
    assert task.unused == ("id", "facts") and json.loads(task.splits["ppo"]["row"][0]).keys() == {
        "answer"
    }
    assert load_task("rows.jsonl").splits["ppo"].column_names == ["prompt", "chosen"]
    both = [takes_one, RowColumns(lambda prompts, facts=None, **rest: 0, 1, "other")]
    assert load_task("rows.jsonl", row_columns=both).unused == ()
    two_arguments = [
        RowColumns(FunctionReward, 2, ""),
        RowColumns(max, 2, ""),
        RowColumns(lambda *texts: 0, 2, ""),
    ]
    assert load_task("rows.jsonl", row_columns=two_arguments).splits["ppo"].column_names == [
        "prompt",
        "chosen",
    ]


def test_columns_that_rows_are_read_by_go_along_by_name(tmp_path):
    """Of question and answer, SFT learns the answer, and a reward may check it; `**row` leaves it out."""
    rows = [{"question": f"{i} + 1?", "answer": f"{i + 1}", "level": i % 3} for i in range(40)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for function, names in (
        (lambda p, r, answer: 0, {"answer"}),
        (lambda p, r, **row: 0, {"level"}),
        (lambda p, r, *, level=0, answer, other=1: 0, {"answer", "level"}),
    ):
        task = load_task(
            str(tmp_path / "rows.parquet"), row_columns=[RowColumns(function, 2, "mine")]
        )
        for prompt in prompts_of(task.splits["ppo"]):
            row = json.loads(prompt.row)
            assert (
                row.keys() == names
                and row.get("answer", f"{int(prompt[:-5]) + 1}") == f"{int(prompt[:-5]) + 1}"
            )
    embedded = partial(load_task, "tiny-steps", size=40)
    fails(
        lambda: embedded(row_columns=[RowColumns(lambda p, r, chosen: 0, 2, "mine")]),
        "mine: asks for the column chosen",
    )
    embedded(row_columns=[RowColumns(lambda p, r, chosen=None, **row: 0, 2, "mine")])


def test_columns_of_programs_are_those_of_their_rows(tmp_path):
    row = {"solutions": '["x"]', "input_output": "", "difficulty": "interview", "starter_code": ""}
    rows = [row | {"question": f"Task {i}.", "level": i} for i in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(
        str(tmp_path / "a.jsonl"), row_columns=[RowColumns(lambda p, r, level, **row: 0, 2, "mine")]
    )
    for prompt in prompts_of(task.splits["ppo"]):
        found = json.loads(prompt.row)
        assert f"Task {found['level']}." in prompt and found.keys() == {"level"}


def test_a_row_without_a_column_that_is_needed_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"Say {i}.", "answer": str(i)} | ({"hint": "h"} if i == 3 else {})
        for i in range(30)
    ]
    del rows[4]["answer"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [RowColumns(lambda p, r, answer, hint=None: 0, 2, "mine")]
    fails(lambda: load_task(str(path), row_columns=asked), "row 5: no 'answer'", "--bad_rows drop")
    task = load_task(str(path), row_columns=asked, bad_rows="drop")
    assert task.counts["missing_column"] == 1
    everything = [json.loads(row) for part in task.splits.values() for row in part["row"]]
    assert sorted(row["hint"] is None for row in everything) == [False] + [True] * 28


# -- the mechanism ----------------------------------------------------------------------------------------------------


def with_answers(texts):
    return [
        Prompt(text, json.dumps({"answer": f"{text}!", "number": i}))
        for i, text in enumerate(texts)
    ]


def test_a_prompt_is_its_text_and_keeps_its_row():
    prompt = Prompt("a text", '{"x": 1}')
    for same in (
        prompt,
        pickle.loads(pickle.dumps(prompt)),
        copy.deepcopy(prompt),
        [prompt][:1][0],
    ):
        assert same == "a text" and hash(same) == hash("a text") and same.row == '{"x": 1}'
    assert json.dumps([prompt]) == '["a text"]' and type(str(prompt)) is str


def test_rows_follow_prompts_through_rollouts(make):
    """Against a table by number: sorting, selecting, copies and micro-batches keep the pairs."""

    def check(prompts, responses, answer, number):
        assert answer == [f"{PROMPTS[i]}!" for i in number] and prompts == [
            PROMPTS[i] for i in number
        ]
        return [float(i) for i in number]

    trainer = make(
        prompts=with_answers(PROMPTS),
        reward=FunctionReward(check),
        updates=2,
        generation_batch_size=1,
    )
    rollout = trainer.score(trainer.generate_rollout(next(batches(trainer))))
    assert [PROMPTS[int(x)] for x in rollout.scores] == rollout.prompts
    part = rollout.select(torch.tensor([2, 0])).copy()
    assert [json.loads(p.row)["number"] for p in part.prompts] == [
        int(rollout.scores[2]),
        int(rollout.scores[0]),
    ]


@pytest.mark.parametrize("processes", [2, 4])
def test_shares_of_processes_have_their_rows(processes):
    """Two processes see what one sees, and a plain list of the same prompts is drawn in the same order."""
    config, texts = SimpleNamespace(batch_size=8, rollouts=2), [f"{i % 5}" for i in range(20)]
    prompts = [Prompt(text, str(i)) for i, text in enumerate(texts)]

    def drawn(of, process=0, processes=1):
        place = SimpleNamespace(process_index=process, num_processes=processes)
        return list(islice(prompt_batches(of, config, place, seed=3), 6))

    shares = [drawn(prompts, process, processes) for process in range(processes)]
    for update, (whole, plain) in enumerate(zip(drawn(prompts), drawn(texts), strict=True)):
        rows = Counter(prompt.row for share in shares for prompt in share[update])
        assert whole == plain and rows == Counter(prompt.row for prompt in whole)
        assert all(texts[int(prompt.row)] == prompt for prompt in whole)


def test_plain_prompts_have_no_columns(make):
    def asks(prompts, responses, answer):
        return [0.0] * len(prompts)

    fails(
        make(reward=FunctionReward(asks, "asks")).train,
        "reward asks: asks for the column answer",
        "leave it out",
    )
    assert RowColumns(asks, 2, "").arguments([]) == {"answer": []}

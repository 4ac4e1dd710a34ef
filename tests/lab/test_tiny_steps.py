"""The embedded reasoning task: its problems, its reward and its first wrong steps, against a plain interpreter."""

import random
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lab.corpora.tiny_steps import demonstrate, make_problem, one_slip, verify, write
from marlhf_lite.cli import main
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.tiny_steps.gold import LETTERS, Problem, gold_scores, read_prompt
from marlhf_lite.utils.jsonl import read_lines

SEEDS = st.integers(0, 2**32)
OPERATIONS = st.tuples(st.sampled_from("+-"), st.integers(1, 9)) | st.just(("*", 2))
PROBLEMS = st.builds(
    Problem, st.integers(0, 99), st.lists(OPERATIONS, min_size=1, max_size=16).map(tuple)
)


def run_by_hand(prompt):
    """The steps of a prompt, evaluated by Python itself."""
    start, *lines = prompt.splitlines()[:-1]
    value, results = int(start.removeprefix("Start ")), []
    for line in lines:
        value = eval(f"({value} {line[1:]}) % 100")
        results.append(value)
    return results


def problem_of(seed):
    rng = random.Random(seed)
    return rng, make_problem(rng)


# Problems and right responses


@given(PROBLEMS)
def test_the_right_response_is_what_python_computes(problem):
    assert problem.results == run_by_hand(problem.prompt) and read_prompt(problem.prompt) == problem
    response = write(problem, problem.results)
    assert (
        "".join(line[0] for line in response.split("\n"))
        == LETTERS[: len(problem.operations)] + "A"
    )
    assert all(steps_of(response)) and response.endswith(f"\nAnswer {problem.results[-1]}")
    assert (
        verify(problem.prompt, response) is None
        and verify(problem.prompt, response + " \n") is None
    )
    assert gold_scores([problem.prompt], [response]) == [1.0]


# Slips


def steps_of(response):
    """Whether each step's own arithmetic is right, by Python."""
    steps = [re.split("[:>]", line) for line in response.split("\n")[:-1]]
    return [eval(taken + operation[1:]) % 100 == int(given) for operation, taken, given in steps]


@given(SEEDS, st.integers(0, 15))
def test_a_slip_is_found_at_its_step(seed, at):
    """Of a slip alone, which ruins the answer, and of the first in a demonstration, where two may cancel."""
    rng, problem = problem_of(seed)
    at %= len(problem.operations)
    for response in (one_slip(rng, problem, at), demonstrate(rng, problem)):
        right, fault = steps_of(response), verify(problem.prompt, response)
        (score,) = gold_scores([problem.prompt], [response])
        assert score == response.endswith(f"\nAnswer {run_by_hand(problem.prompt)[-1]}")
        if all(right):
            assert fault is None and score == 1
        else:
            assert (fault.line, fault.reason) == (right.index(False), "result")
            assert response[fault.start : fault.end] == response.split("\n")[fault.line]
    slipped = one_slip(rng, problem, at)
    assert steps_of(slipped).index(False) == at and gold_scores([problem.prompt], [slipped]) == [
        0.0
    ]


# Faults


PROBLEM = Problem(47, (("+", 5), ("-", 3), ("*", 2)))
RIGHT = "a+5:47>52\nb-3:52>49\nc*2:49>98\nAnswer 98"


@pytest.mark.parametrize(
    ("response", "line", "text", "reason", "gold"),
    [
        # two slips that cancel
        ("a+5:47>42\nb-3:42>49\nc*2:49>98\nAnswer 98", 0, "a+5:47>42", "result", 1),
        ("a+5:47>42\nb-3:42>39\nc*2:39>78\nAnswer 78", 0, "a+5:47>42", "result", 0),
        ("a+5:47>52\nb-3:42>39\nc*2:39>78\nAnswer 78", 1, "b-3:42>39", "begin", 0),
        ("a+5:47>52\nb-4:52>48\nc*2:48>96\nAnswer 96", 1, "b-4:52>48", "operation", 0),
        ("a+5:47>52\nb-3:52>49\nAnswer 98", 2, "Answer 98", "form", 1),
        (RIGHT.replace("98\nAnswer 98", "98\nAnswer 89"), 3, "Answer 89", "answer", 0),
        (RIGHT.replace("Answer", "answer"), 3, "answer 98", "form", 0),
        (RIGHT.replace(">52", ">152"), 0, "a+5:47>152", "form", 1),
        (RIGHT.removesuffix("\nAnswer 98"), 3, "", "missing", 0),
        ("", 0, "", "missing", 0),
        ("\n" + RIGHT, 0, "", "form", 1),
        (RIGHT + "\nd+1:98>99", 4, "d+1:98>99", "more", 0),
        (RIGHT + "\nAnswer 98", 4, "Answer 98", "more", 1),
        ("La casa es azul.", 0, "La casa es azul.", "form", 0),
    ],
)
def test_faults(response, line, text, reason, gold):
    fault = verify(PROBLEM.prompt, response)
    assert (fault.line, response[fault.start : fault.end], fault.reason) == (line, text, reason)
    assert gold_scores([PROBLEM.prompt], [response]) == [gold]


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=200)
def test_any_text_is_taken(prompt, response):
    assert verify(prompt, response) is not None and gold_scores([prompt], [response]) == [0.0]
    for other in ("", "Start 47\nSteps\n", "Start 7\na+5\nc-1\nSteps\n", "Start 7\na+5\nSteps"):
        assert read_prompt(other) is None
    fault = verify(PROBLEM.prompt, response)
    assert (
        0 <= fault.start <= fault.end <= len(response)
        and "\n" not in response[fault.start : fault.end]
    )


# Task


# Blame

FAILED = [
    "a+5:47>52\nb-3:52>39\nc*2:39>78\nAnswer 78",
    "a+5:47>51\nb-3:51>48\nc*2:48>96\nAnswer 96",
]


@pytest.fixture(scope="module")
def steps_tokenizer():
    return load_tokenizer("tiny-gemma-steps")


# End to end


def test_all_stages_run_and_a_line_is_a_macro_action(tmp_path):
    sizes = {
        "size": 40,
        "updates": 1,
        "batch_size": 4,
        "eval_prompts": 4,
        "sft_batch_size": 4,
        "rm_batch_size": 4,
    }
    words = [
        "run",
        "--dataset",
        "tiny-steps",
        "--termination",
        "sentence",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert main([*words, *(f"--{name}={value}" for name, value in sizes.items())]) == 0
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (config["model"], config["max_response_length"]) == ("tiny-gemma-steps", 176)
    (row,) = read_lines(next((tmp_path / "out").rglob("metrics.jsonl")))
    assert 0 <= row["gold_mean"] <= 1 and row["eos_rate"] > 0.5
    assert 7 < row["macro_length"] < 11  # such as "a+5:47>52" and a line break

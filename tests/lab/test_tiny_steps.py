"""The embedded reasoning task: its problems, its reward and its first wrong steps, against a plain interpreter."""

import random
import re
from dataclasses import replace

import pytest
import torch
import yaml
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lab.corpora.tiny_steps import (
    demonstrate,
    make_problem,
    one_slip,
    verify,
    write,
)
from marlhf_lab.credit import first_wrong_step
from marlhf_lab.credit.first_wrong_step import blame, blame_by_estimator, first_wrong_tokens
from marlhf_lab.credit.gradients import Estimator
from marlhf_lite.cli import main
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.macro import FixedNGram
from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.tasks.answers import encode_responses
from marlhf_lite.tasks.tiny_steps.gold import LETTERS, Problem, gold_scores, read_prompt
from marlhf_lite.training.experience import ModelOutputs
from marlhf_lite.training.ppo import PPOTrainer
from marlhf_lite.training.rollout import from_tokens
from marlhf_lite.utils.jsonl import read_lines

SEEDS = st.integers(0, 2**32)
OPERATIONS = st.tuples(st.sampled_from("+-"), st.integers(1, 9)) | st.just(("*", 2))
PROBLEMS = st.builds(Problem, st.integers(0, 99), st.lists(OPERATIONS, min_size=1, max_size=16).map(tuple))


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
    assert "".join(line[0] for line in response.split("\n")) == LETTERS[: len(problem.operations)] + "A"
    assert all(steps_of(response)) and response.endswith(f"\nAnswer {problem.results[-1]}")
    assert verify(problem.prompt, response) is None and verify(problem.prompt, response + " \n") is None
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
    assert steps_of(slipped).index(False) == at and gold_scores([problem.prompt], [slipped]) == [0.0]


# Faults


PROBLEM = Problem(47, (("+", 5), ("-", 3), ("*", 2)))
RIGHT = "a+5:47>52\nb-3:52>49\nc*2:49>98\nAnswer 98"


@pytest.mark.parametrize(
    ("response", "line", "text", "reason", "gold"),
    [
        ("a+5:47>42\nb-3:42>49\nc*2:49>98\nAnswer 98", 0, "a+5:47>42", "result", 1),  # two slips that cancel
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
    assert 0 <= fault.start <= fault.end <= len(response) and "\n" not in response[fault.start : fault.end]


# Task


# Blame

FAILED = ["a+5:47>52\nb-3:52>39\nc*2:39>78\nAnswer 78", "a+5:47>51\nb-3:51>48\nc*2:48>96\nAnswer 96"]


@pytest.fixture(scope="module")
def steps_tokenizer():
    return load_tokenizer("tiny-gemma-steps")


def rollout_of(tokenizer, texts):
    ids = encode_responses(tokenizer, texts, 100)
    made = from_tokens(tokenizer, [PROBLEM.prompt] * len(texts), ids, [tokenizer.eos_token_id])
    scores = torch.tensor(gold_scores(made.prompts, texts))
    return ids, replace(made, scores=scores, ref_logprobs=torch.zeros(made.mask.shape))


def test_blame_falls_on_the_tokens_of_the_first_wrong_step(steps_tokenizer):
    ids, rollout = rollout_of(steps_tokenizer, [RIGHT, FAILED[0], "a+5:47>52", FAILED[1]])
    wrong = first_wrong_tokens(rollout, steps_tokenizer)
    marked = [steps_tokenizer.decode([i for i, m in zip(row, flags) if m]) for row, flags in zip(ids, wrong.tolist())]
    assert marked == ["", "b-3:52>39", "", "a+5:47>51"]

    advantages = torch.randn(wrong.shape, generator=torch.Generator().manual_seed(0)).double()
    found = blame(advantages, wrong, rollout.mask, rollout.scores)
    for place, row in enumerate((1, 3)):
        negative = (-advantages[row, : len(ids[row])]).clamp(min=0)
        at = wrong[row].nonzero()[:, 0].tolist()
        parts = [negative[at].sum() / negative.sum(), negative[: at[0]].sum() / negative.sum(), len(at) / len(ids[row])]
        assert [found.share[place], found.before[place], found.tokens[place]] == pytest.approx(list(map(float, parts)))
    assert not blame(torch.ones_like(advantages), wrong, rollout.mask, torch.zeros(4)).share.any()


class Given(PPOTrainer):
    """A trainer whose critic gives these values [B, T], and whose policy is the reference."""

    def __init__(self, tokenizer, values):
        self.tokenizer, self.values, self.kl_coef = tokenizer, values, 0.0
        self.micro_batch_size, self.updates_done, self.accelerator = len(values), 0, Accelerator()

    def compute_outputs(self, rollout):
        return ModelOutputs(torch.zeros_like(self.values), torch.zeros_like(self.values), self.values)


def test_blame_by_estimator_in_closed_form(steps_tokenizer):
    """A blind critic blames by distance to the end; one that sees a slip at once blames its last token."""
    _, rollout = rollout_of(steps_tokenizer, FAILED)
    wrong, lengths = first_wrong_tokens(rollout, steps_tokenizer), rollout.lengths.tolist()

    def estimator(lam, n="1"):
        return Estimator(PPOTrainerConfig(lam=lam, n=n), FixedNGram(int(n)))

    estimators = {"token": estimator(0.9), "n=5": estimator(0.9, "5"), "one": estimator(1.0)}
    blind = blame_by_estimator(Given(steps_tokenizer, 0.4 * rollout.mask.float()), rollout, estimators)
    for row, length in enumerate(lengths):
        at = [i for i in range(length) if wrong[row, i]]
        for name, weights in {
            "token": [0.9 ** (length - 1 - i) for i in range(length)],
            "n=5": [0.9 ** ((length - 1) // 5 - i // 5) for i in range(length)],
            "one": [1.0] * length,
        }.items():
            share, before = sum(weights[i] for i in at) / sum(weights), sum(weights[: at[0]]) / sum(weights)
            assert blind[name].share[row].item() == pytest.approx(share, rel=1e-5)
            assert blind[name].before[row].item() == pytest.approx(before, rel=1e-5)
    after = torch.nn.functional.pad(wrong.cumsum(1) == wrong.sum(1, keepdim=True), (1, -1))  # behind the slip
    seeing = Given(steps_tokenizer, (~after & rollout.mask).float())
    found = blame_by_estimator(seeing, rollout, {"zero": estimator(0.0)})["zero"]
    assert torch.allclose(found.share, torch.ones(2).double())


# End to end


def test_all_stages_run_and_a_line_is_a_macro_action(tmp_path, capsys):
    sizes = {"size": 40, "updates": 1, "batch_size": 4, "eval_prompts": 4, "sft_batch_size": 4, "rm_batch_size": 4}
    words = ["run", "--dataset", "tiny-steps", "--termination", "sentence", "--output_dir", str(tmp_path / "out")]
    assert main([*words, *(f"--{name}={value}" for name, value in sizes.items())]) == 0
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (config["model"], config["max_response_length"]) == ("tiny-gemma-steps", 176)
    (row,) = read_lines(next((tmp_path / "out").rglob("metrics.jsonl")))
    assert 0 <= row["gold_mean"] <= 1 and row["eos_rate"] > 0.5
    assert 7 < row["macro_length"] < 11  # such as "a+5:47>52" and a line break

    out = str(tmp_path / "out")
    assert first_wrong_step.main(["--sft", out, "--policy", out, "--eval_prompts", "4"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in ("RLOO", "PPO lam=1", "MA-PPO lines"))
    assert first_wrong_step.main(["--sft", out, "--policy", f"{out}/sft", "--eval_prompts", "4"]) == 2
    assert "no critic beside it" in capsys.readouterr().err

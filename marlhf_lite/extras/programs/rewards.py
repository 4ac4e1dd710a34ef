"""Unit tests of a task's problems as gold score and as reward of the responses."""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import datasets
from accelerate.utils import gather_object

from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.extras.programs import EXECUTORS, Outcome, program_reward, read_problem
from marlhf_lite.extras.programs.tests import STATUSES
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.errors import InputError

# Metrics of a rollout: shares of its programs by outcome, which sum to 1.
SHARES = tuple(f"share_{name}" for name in (*STATUSES[:-1], "failed", "passed"))
JUDGED = ("ppo", "test")  # the parts of a task whose responses are run


class ProgramTests:
    """Run each response with the tests of its prompt's problem, once: `(prompts, responses) -> outcomes`.

    Args:
        texts: the tests of each prompt, in a format of `read_problem`.
        config: the executor and its limits.
    """

    def __init__(self, texts: Mapping[str, str], config: ProgramConfig):
        self.executor = EXECUTORS[config.executor](config.test_seconds, config.test_memory)
        self.known: dict[tuple[str, str], Outcome] = {}  # by prompt and response
        limits = [config.executor, config.test_seconds, config.test_memory]
        self.problem = functools.cache(lambda prompt: read_problem(texts[prompt]))
        everything = json.dumps([limits, sorted(texts.items())])
        digest = hashlib.sha256(everything.encode()).hexdigest()
        self.name = f"tests {digest[:12]}"  # a hash of everything that the scores depend on

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Outcome]:
        """Return the outcome of each response; one that was run before, for the same prompt, is not run again."""
        pairs = list(zip(prompts, responses, strict=True))
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self.known]
        if new:
            programs = []
            tests = []
            for prompt, response in new:
                problem = self.problem(prompt)
                programs.append(problem.head + response)  # the head has the imports of APPS
                tests.append(problem.tests)
            outcomes = self.executor.run(programs, tests)
            self.known |= dict(zip(new, outcomes, strict=True))
        return [self.known[pair] for pair in pairs]

    def shares(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return the share of its tests that each response passed: the gold score of a program."""
        return [outcome.share for outcome in self(prompts, responses)]


class TestReward:
    """The reward of Appendix B.5 as a function of texts; `metrics` counts the outcomes of the last programs."""

    __test__ = False  # pytest collects classes with such names

    def __init__(self, tests: ProgramTests, strict: bool = False):
        self.tests, self.strict, self.outcomes = tests, strict, []

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.outcomes = self.tests(prompts, responses)
        return [program_reward(outcome, self.strict) for outcome in self.outcomes]

    def metrics(self) -> dict[str, float]:
        """Return the shares of the last programs of all processes by outcome, under the names of `SHARES`."""
        counts = sum(gather_object([Counter(map(_metric_that_counts, self.outcomes))]), Counter())
        return {name: counts[name] / max(counts.total(), 1) for name in SHARES}


def _metric_that_counts(outcome: Outcome) -> str:
    """Return the metric of `SHARES` that counts this outcome: the status of the program, or if it ran, its tests."""
    ran = "passed" if all(outcome.passed) else "failed"
    return f"share_{ran if outcome.status == 'ran' else outcome.status}"


def with_tests(task: Task, config: ProgramConfig, bad_rows: str = "error") -> Task:
    """Return the task with its unit tests ready, and the share of tests passed as its gold score.

    A task whose rows have no column `tests` is returned unchanged. Otherwise the parts `JUDGED` lose some problems:
    those without tests, counted as `no_tests`; those that have the same prompt and different tests, counted as
    `different_tests`; and, with `bad_rows="drop"`, those whose tests do not parse, counted as `bad_tests`.

    Raises `InputError` for tests that do not parse, if no problem is left, and if the executor is not installed.
    """
    if not any("tests" in task.splits[part].column_names for part in JUDGED):
        return task
    counts: Counter[str] = Counter(no_tests=0, different_tests=0, bad_tests=0)
    kept = {part: _rows_with_usable_tests(task, part, bad_rows, counts) for part in JUDGED}
    tests_of_prompt = {}
    for rows in kept.values():
        tests_of_prompt |= zip(rows["prompt"], rows["tests"], strict=True)
    tests = ProgramTests(tests_of_prompt, config)
    sizes = {part: len(rows) for part, rows in kept.items()}
    splits = datasets.DatasetDict({**task.splits, **kept})
    return replace(
        task,
        splits=splits,
        gold=tests.shares,
        tests=tests,
        counts=task.counts | sizes | dict(counts),
    )


def _rows_with_usable_tests(
    task: Task, part: str, bad_rows: str, counts: Counter
) -> datasets.Dataset:
    """Return the rows of a part with tests that can judge a response, and add the other rows to `counts` by reason.

    Raises `InputError` if no row is left, and with `bad_rows="error"` for tests that do not parse.
    """
    rows = task.splits[part]
    # How many different tests a prompt has. If there is more than one, nobody can tell which of them a response should
    # pass.
    different_tests: Counter[str] = Counter()
    # Embedded problems are not counted: those with the same prompt are one problem with different inputs, so the tests
    # of any of them will do.
    if task.name not in EMBEDDED:
        for prompt, text in set(zip(rows["prompt"], rows["tests"], strict=True)):
            if text:
                different_tests[prompt] += 1

    good = []
    for i, (prompt, text) in enumerate(zip(rows["prompt"], rows["tests"], strict=True)):
        fault = ""
        if not text:
            fault = "no_tests"
        else:
            try:
                read_problem(text)  # raises for tests that do not parse
                if different_tests[prompt] > 1:
                    fault = "different_tests"
            except InputError as error:
                if bad_rows == "error":
                    problem = " ".join(prompt.split())[:60]
                    hint = "correct them, or drop such problems with --bad_rows drop"
                    raise InputError(f"{task.name}: problem {problem!r}: {error}: {hint}") from None
                fault = "bad_tests"
        if fault:
            counts[fault] += 1
        else:
            good.append(i)
    if len(rows) and not good:
        raise InputError(
            f"{task.name}: no problem of the part {part} has tests: give problems with unit tests"
        )
    return rows.select(good)

"""Unit tests of the problems of a task: what responses to their prompts score, as gold scores and as a reward."""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import datasets
from accelerate.utils import gather_object

from marlhf_lite.config.options import ProgramConfig
from marlhf_lite.extras.programs import Outcome, Problem, TestRunner, program_reward, read_problem
from marlhf_lite.tasks.embedded import EMBEDDED
from marlhf_lite.tasks.splits import Task
from marlhf_lite.utils.errors import InputError

# The name of a share of a rollout's programs in its metrics; together they are 1.
SHARES = tuple(
    f"share_{name}" for name in ("compile_error", "runtime_error", "timeout", "unsupported", "failed", "passed")
)
JUDGED = ("ppo", "test")  # the parts of a task whose programs are run


class ProgramTests:
    """Runs each response with the tests of its prompt's problem: `(prompts, responses) -> outcomes`.

    Args:
        texts: prompt to tests, in a form of `read_problem`.
        config: the executor and its limits.
    """

    def __init__(self, texts: Mapping[str, str], config: ProgramConfig):
        self.runner = TestRunner(config.executor, config.test_seconds, config.test_memory)
        self.problem = functools.cache(lambda prompt: read_problem(texts[prompt]))
        limits = [config.executor, config.test_seconds, config.test_memory]
        digest = hashlib.sha256(json.dumps([limits, sorted(texts.items())]).encode()).hexdigest()
        self.name = f"tests {digest[:12]}"  # of what the scores depend on

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Outcome]:
        problems: list[Problem] = [self.problem(prompt) for prompt in prompts]
        programs = [problem.head + response for problem, response in zip(problems, responses, strict=True)]
        return self.runner.run(programs, [problem.tests for problem in problems])

    def shares(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return the share of its tests that each response passed: the gold score of a program."""
        return [outcome.share for outcome in self(prompts, responses)]


class TestReward:
    """The reward of Appendix B.5 as a function of texts; `metrics` tells what became of the last programs."""

    __test__ = False  # pytest takes classes of this name for its own

    def __init__(self, tests: ProgramTests, strict: bool = False):
        self.tests, self.strict, self.outcomes = tests, strict, []

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.outcomes = self.tests(prompts, responses)
        return [program_reward(outcome, self.strict) for outcome in self.outcomes]

    def metrics(self) -> dict[str, float]:
        """Return the shares of all processes' last programs by what became of them, under the names of SHARES."""
        counts = sum(gather_object([Counter(map(_kind, self.outcomes))]), Counter())
        return {name: counts[name] / max(counts.total(), 1) for name in SHARES}


def _kind(outcome: Outcome) -> str:
    ran = "passed" if all(outcome.passed) else "failed"
    return f"share_{ran if outcome.status == 'ran' else outcome.status}"


def with_tests(task: Task, config: ProgramConfig, bad_rows: str = "error") -> Task:
    """Return the task with its unit tests ready, and with the share of tests passed as its gold score.

    A task whose rows have no column `tests` is returned as it is. Problems without tests are left out of the parts
    whose programs are run, and counted as `no_tests`; so are those that share a prompt and not their tests, as
    `different_tests`, and with `bad_rows="drop"` those whose tests do not parse, as `bad_tests`.

    Raises:
        InputError: tests that do not parse, no problem left, an executor that is not installed, or limits out of range.
    """
    if not any("tests" in task.splits[part].column_names for part in JUDGED):
        return task
    counts: Counter[str] = Counter(no_tests=0, different_tests=0, bad_tests=0)
    kept = {part: _readable(task, part, bad_rows, counts) for part in JUDGED}
    texts = {prompt: text for rows in kept.values() for prompt, text in zip(rows["prompt"], rows["tests"], strict=True)}
    tests = ProgramTests(texts, config)
    sizes = {part: len(rows) for part, rows in kept.items()}
    splits = datasets.DatasetDict({**task.splits, **kept})
    return replace(task, splits=splits, gold=tests.shares, tests=tests, counts=task.counts | sizes | dict(counts))


def _readable(task: Task, part: str, bad_rows: str, counts: Counter) -> datasets.Dataset:
    rows, good = task.splits[part], []
    # Embedded problems of one prompt are the same problem with other inputs: the tests of either judge both.
    different = set() if task.name in EMBEDDED else {*zip(rows["prompt"], rows["tests"], strict=True)}
    forms = Counter(prompt for prompt, text in different if text)
    for i, (prompt, text) in enumerate(zip(rows["prompt"], rows["tests"], strict=True)):
        try:
            if text:
                read_problem(text)
                good += [i] if forms[prompt] < 2 else []
                counts["different_tests"] += forms[prompt] > 1
            counts["no_tests"] += not text
        except InputError as error:
            if bad_rows == "error":
                problem = " ".join(prompt.split())[:60]
                hint = "correct them, or drop such problems with --bad_rows drop"
                raise InputError(f"{task.name}: problem {problem!r}: {error}: {hint}") from None
            counts["bad_tests"] += 1
    if len(rows) and not good:
        raise InputError(f"{task.name}: no problem of the part {part} has tests: give problems with unit tests")
    return rows.select(good)

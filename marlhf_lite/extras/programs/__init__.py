"""Generated programs: unit tests, the sandboxes that run them, and the reward of the results (paper, Appendix B.5).

A generated program is hostile input. It runs only in a sandbox, expected outputs stay outside, and this process
compares the plain data that come out.
"""

from collections.abc import Sequence

from marlhf_lite.extras.programs.bubblewrap import BubblewrapExecutor
from marlhf_lite.extras.programs.monty import MontyExecutor
from marlhf_lite.extras.programs.protocol import Executor
from marlhf_lite.extras.programs.tests import Outcome, Problem, Test, program_reward, read_problem

EXECUTORS: dict[str, type[Executor]] = {"monty": MontyExecutor, "bubblewrap": BubblewrapExecutor}


def TestRunner(executor: str = "monty", *limits: float, **named_limits: float) -> Executor:
    """Return the sandbox of this name, with the limits that `Executor` takes; its `run` runs many programs."""
    return EXECUTORS[executor](*limits, **named_limits)


def run_tests(
    program: str, tests: Sequence[Test], executor: str = "monty", **limits: float
) -> Outcome:
    """Run one program against its tests in a sandbox. To run many programs, use `TestRunner`."""
    return TestRunner(executor, **limits, workers=1).run([program], [tests])[0]

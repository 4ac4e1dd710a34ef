"""Run programs against their tests: many at a time, each (program, tests) once."""

import hashlib
import marshal
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm.auto import tqdm

from marlhf_lite.extras.programs.bubblewrap import BubblewrapExecutor
from marlhf_lite.extras.programs.monty import MontyExecutor
from marlhf_lite.extras.programs.protocol import PROGRAM_CHARACTERS, Executor
from marlhf_lite.extras.programs.tests import Outcome, Test

EXECUTORS: dict[str, type[Executor]] = {"monty": MontyExecutor, "bubblewrap": BubblewrapExecutor}
SHOWN_FROM = 200  # programs from which a bar is shown: an update has fewer, and a bar of its own


class TestRunner:
    """Runs programs in a sandbox, and keeps what came of them, so that no program runs twice with the same tests.

    Args:
        executor: monty or bubblewrap.
        seconds, memory_mb: limits of one program with all its tests.
        workers: programs at a time; 0: one a core.

    Raises `InputError` for an executor that is not installed. There is no way to run a program without a sandbox.
    """

    __test__ = False  # pytest takes classes of this name for its own

    def __init__(self, executor: str = "monty", seconds: float = 4.0, memory_mb: int = 256, workers: int = 0):
        self.workers = workers or os.cpu_count() or 1
        self.executor = EXECUTORS[executor](seconds, memory_mb, self.workers)
        self.known: dict[bytes, Outcome] = {}

    def run(self, programs: Sequence[str], tests: Sequence[Sequence[Test]]) -> list[Outcome]:
        """Return the outcome of each program with its tests, at least one."""
        tasks = list(zip(programs, tests, strict=True))
        keys = [_key(program, cases) for program, cases in tasks]
        new = {key: task for key, task in zip(keys, tasks, strict=True) if key not in self.known}
        if new:
            self.known |= dict(zip(new, self._run_all(list(new.values())), strict=True))
        return [self.known[key] for key in keys]

    def _run_all(self, tasks: Sequence[tuple[str, Sequence[Test]]]) -> list[Outcome]:
        with self.executor, ThreadPoolExecutor(self.workers) as threads:
            outcomes = threads.map(lambda task: self._outcome(*task), tasks)
            try:
                hidden = len(tasks) < SHOWN_FROM
                return list(tqdm(outcomes, total=len(tasks), desc="programs", leave=False, disable=hidden))
            finally:  # after an interrupt, what has not begun does not begin
                threads.shutdown(cancel_futures=True)

    def _outcome(self, program: str, tests: Sequence[Test]) -> Outcome:
        if len(program) > PROGRAM_CHARACTERS:
            return Outcome("unsupported", [False] * len(tests))
        report = self.executor.run(program, tests)
        passed = [test.passes(output) for test, output in zip(tests, report.outputs, strict=True)]
        return Outcome(report.status, passed)


def _key(program: str, tests: Sequence[Test]) -> bytes:
    """Return a hash of what decides the outcome: tests may be long, and a run has many programs."""
    cases = [tuple(vars(test).values()) for test in tests]
    return hashlib.sha256(marshal.dumps((program, cases), 2)).digest()


def run_tests(
    program: str, tests: Sequence[Test], executor: str = "monty", seconds: float = 4.0, memory_mb: int = 256
) -> Outcome:
    """Run one program against its tests in a sandbox; see `TestRunner`, which runs many."""
    return TestRunner(executor, seconds, memory_mb, workers=1).run([program], [tests])[0]

"""Run programs against their tests: many at a time, each pair of program and tests once."""

import hashlib
import marshal
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm.auto import tqdm

from marlhf_lite.extras.programs.bubblewrap import BubblewrapExecutor
from marlhf_lite.extras.programs.monty import MontyExecutor
from marlhf_lite.extras.programs.protocol import PROGRAM_CHARACTERS, Executor
from marlhf_lite.extras.programs.tests import NO_OUTPUT, STATUSES, Outcome, Test

EXECUTORS: dict[str, type[Executor]] = {"monty": MontyExecutor, "bubblewrap": BubblewrapExecutor}


class TestRunner:
    """Run programs in a sandbox, and keep the outcomes: no program runs twice with the same tests.

    Args:
        executor: monty or bubblewrap.
        seconds, memory_mb: limits of one program with all its tests.
        workers: programs at a time; 0: one per core.

    The constructor raises `InputError` for an executor that is not installed. Programs run only in a sandbox.
    """

    __test__ = False  # pytest collects classes with such names

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
                return list(tqdm(outcomes, total=len(tasks), desc="programs", leave=False, delay=5))
            finally:  # after an interrupt, no other program begins
                threads.shutdown(cancel_futures=True)

    def _outcome(self, program: str, tests: Sequence[Test]) -> Outcome:
        if len(program) > PROGRAM_CHARACTERS:
            return Outcome("unsupported", [False] * len(tests))
        results = self.executor.run(program, tests)
        status = min((status for status, _ in results), key=STATUSES.index, default="ran")
        outputs = [output for _, output in results] + [NO_OUTPUT] * len(tests)
        return Outcome(status, [test.passes(output) for test, output in zip(tests, outputs, strict=False)])


def _key(program: str, tests: Sequence[Test]) -> bytes:
    """Return a hash of everything that decides the outcome; tests may be long, and a run has many programs."""
    cases = [tuple(vars(test).values()) for test in tests]
    return hashlib.sha256(marshal.dumps((program, cases), 2)).digest()


def run_tests(
    program: str, tests: Sequence[Test], executor: str = "monty", seconds: float = 4.0, memory_mb: int = 256
) -> Outcome:
    """Run one program against its tests in a sandbox; `TestRunner` runs many."""
    return TestRunner(executor, seconds, memory_mb, workers=1).run([program], [tests])[0]

"""Run programs against their tests: many at a time, each (program, tests) once."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm.auto import tqdm

from marlhf_lite.programs.bubblewrap import BubblewrapExecutor
from marlhf_lite.programs.monty import MontyExecutor
from marlhf_lite.programs.protocol import PROGRAM_CHARACTERS, Executor, Limits
from marlhf_lite.programs.tests import Outcome, Test
from marlhf_lite.utils.errors import InputError

EXECUTORS: dict[str, Callable[[Limits, int], Executor]] = {"monty": MontyExecutor, "bubblewrap": BubblewrapExecutor}
SHOWN_FROM = 200  # programs from which a bar is shown: an update has fewer, and a bar of its own


class TestRunner:
    """Runs programs in a sandbox, and keeps what came of them; outcomes of a timeout are not kept.

    Args:
        executor: monty or bubblewrap.
        seconds, memory_mb: limits of one program with all its tests.
        workers: programs at a time; 0: one a core.

    Raises `InputError` for an unknown executor, one that is not installed, and limits that are not above 0. There is no
    way to run a program without a sandbox.
    """

    __test__ = False  # pytest takes classes of this name for its own

    def __init__(self, executor: str = "monty", seconds: float = 4.0, memory_mb: int = 256, workers: int = 0):
        if executor not in EXECUTORS:
            raise InputError(f"executor {executor!r}: unknown: choose from {', '.join(EXECUTORS)}")
        self.workers = workers or os.cpu_count() or 1
        self.executor = EXECUTORS[executor](Limits(seconds, memory_mb), self.workers)
        self.known: dict[tuple, Outcome] = {}

    def run(self, programs: Sequence[str], tests: Sequence[Sequence[Test]]) -> list[Outcome]:
        """Return the outcome of each program with its tests. Raises `InputError` where one has no tests."""
        keys = [(program, _key(cases)) for program, cases in zip(programs, tests, strict=True)]
        new = {key: cases for key, cases in zip(keys, tests, strict=True) if key not in self.known}
        for program, cases in new.items():
            if not cases:
                raise InputError(f"program {program[0][:40]!r}: it has no tests: give at least one")
        found = self._run_new(new) if new else {}
        self.known |= {key: outcome for key, outcome in found.items() if outcome.status != "timeout"}
        return [found.get(key) or self.known[key] for key in keys]

    def _run_new(self, new: dict[tuple, Sequence[Test]]) -> dict[tuple, Outcome]:
        def one(key: tuple) -> Outcome:
            return self._outcome(key[0], new[key])

        with self.executor, ThreadPoolExecutor(self.workers) as threads:
            outcomes = threads.map(one, new)
            bar = tqdm(outcomes, total=len(new), desc="programs", leave=False, disable=len(new) < SHOWN_FROM)
            try:
                return dict(zip(new, bar, strict=True))
            finally:  # after an interrupt, what has not begun does not begin
                threads.shutdown(cancel_futures=True)

    def _outcome(self, program: str, tests: Sequence[Test]) -> Outcome:
        if len(program) > PROGRAM_CHARACTERS:
            return Outcome("unsupported", [False] * len(tests))
        report = self.executor.run(program, tests)
        passed = [test.passes(output) for test, output in zip(tests, report.outputs, strict=True)]
        return Outcome(report.status, passed)


def _key(tests: Sequence[Test]) -> bytes:
    return marshal.dumps([(test.input, test.output, test.call, test.unwrap) for test in tests], 2)


def run_tests(
    program: str, tests: Sequence[Test], executor: str = "monty", seconds: float = 4.0, memory_mb: int = 256
) -> Outcome:
    """Run one program against its tests in a sandbox; see `TestRunner`, which runs many."""
    return TestRunner(executor, seconds, memory_mb, workers=1).run([program], [tests])[0]

"""What both executors share: limits, many programs at a time, and the encoding of values that leave a sandbox.

Code in a sandbox writes each value as text with `ENCODE`, which Monty and CPython both run; `decode` turns the text
into plain data. A program can write any text, as it can return any value, but it never sees an expected output.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm.auto import tqdm

from marlhf_lite.extras.programs.tests import NO_OUTPUT, STATUSES, Outcome, Result, Test

OUTPUT_BYTES = 4 * 2**20  # what a program may print or return, all tests together
PROGRAM_CHARACTERS = 100_000  # longer programs are not run

# int in base 16, because CPython limits the digits of base 10; str as bytes in base 16, because a report is ASCII.
ENCODE = """
def marlhf_encode(value):
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return '["plain","' + repr(value) + '"]'
    if kind is int:
        return '["int","' + hex(value) + '"]'
    if kind is str:
        return '["str","' + value.encode("utf-8", "surrogatepass").hex() + '"]'
    for name, kinds in (("dict", dict), ("list", (list, tuple)), ("set", (set, frozenset))):
        if isinstance(value, kinds):
            items = [item for pair in value.items() for item in pair] if name == "dict" else value
            return '["' + name + '"' + "".join(["," + marlhf_encode(item) for item in items]) + "]"
    return '["none"]'
"""
_CONSTANTS = {"None": None, "True": True, "False": False}


class Executor:
    """A sandbox for programs. The constructor raises `InputError` if it cannot start.

    Args:
        seconds, memory_mb: limits of one program with all its tests.
        workers: programs at a time, each in a separate thread; 0: one per core.
    """

    def __init__(self, seconds: float = 4.0, memory_mb: int = 256, workers: int = 0):
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.workers = workers or os.cpu_count() or 1

    def run(self, programs: Sequence[str], tests: Sequence[Sequence[Test]]) -> list[Outcome]:
        """Return the outcome of each program with its tests; each program has at least one test."""
        with ThreadPoolExecutor(self.workers) as threads:
            outcomes = threads.map(self._outcome, programs, tests)
            try:
                return list(
                    tqdm(outcomes, total=len(programs), desc="programs", leave=False, delay=5)
                )
            finally:  # after an interrupt, programs that have not begun are left out
                threads.shutdown(cancel_futures=True)

    def _outcome(self, program: str, tests: Sequence[Test]) -> Outcome:
        """Return the worst status of a program's tests, and for each test whether it passed."""
        if len(program) > PROGRAM_CHARACTERS:
            return Outcome("unsupported", [False] * len(tests))
        results = self.results(program, tests)
        statuses = [status for status, _ in results]
        worst = min(statuses, key=STATUSES.index, default="ran")  # `STATUSES` has the worst first
        # A program that ended early has fewer results than tests: the other tests have no output. There are now more
        # outputs than tests, and `zip` stops after the last test.
        outputs = [output for _, output in results] + [NO_OUTPUT] * len(tests)
        passed = [test.passes(output) for test, output in zip(tests, outputs, strict=False)]
        return Outcome(worst, passed)

    def results(self, program: str, tests: Sequence[Test]) -> list[Result]:
        """Run the program with the inputs of the tests; the sandbox does not get the expected outputs.

        Return one result per test, in order, or fewer if the program ends early.
        """
        raise NotImplementedError


def decode(text: str) -> Any:
    """Return the plain value that `ENCODE` wrote; NO_OUTPUT for any other text."""
    try:
        return _plain(json.loads(text))
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
        return NO_OUTPUT


def _plain(value: Any) -> Any:
    """Return the value that `marlhf_encode` wrote as `["kind", item, ...]`; lists come back as tuples.

    Raises one of many errors for anything else, because a program can write what it likes.
    """
    kind, *items = value
    if kind == "plain":  # None, True, False and floats, by their `repr`
        text = items[0]
        return _CONSTANTS[text] if text in _CONSTANTS else float(text)
    if kind == "int":
        return int(items[0], 16)
    if kind == "str":
        return bytes.fromhex(items[0]).decode("utf-8", "surrogatepass")
    items = tuple(map(_plain, items))
    if kind == "list":
        return items
    if kind == "dict":  # key, value, key, value, ...
        keys = _keys(items[::2])
        values = items[1::2]
        return dict(zip(keys, values, strict=True))
    if kind == "set":
        return frozenset(_keys(items))
    raise ValueError("not plain data")


def _keys(items: tuple) -> tuple:
    """Return the items, which become keys of a dict or a set.

    Keys with equal hashes make a large dict slow, and a program could return many of them, such as multiples of
    2**61 − 1. Raises `ValueError` for more than 100 items unless all are texts or small integers, whose hashes differ.
    """
    if len(items) > 100 and not all(
        isinstance(x, str) or (isinstance(x, int) and abs(x) < 2**60) for x in items
    ):
        raise ValueError("too many keys")
    return items

"""What both executors share: limits, and the encoding of values that leave a sandbox.

Code in a sandbox writes each value as text with `ENCODE`, which Monty and CPython both run; `decode` turns the text
into plain data. A program can write any text, as it can return any value, but it never sees an expected output.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from marlhf_lite.extras.programs.tests import NO_OUTPUT, Result, Test

OUTPUT_BYTES = 4 * 2**20  # what a program may print or return, all tests together
PROGRAM_CHARACTERS = 100_000  # longer programs are not run

# int in base 16, because CPython limits the digits of base 10; text beyond ASCII letters and digits as code points.
ENCODE = """
def marlhf_encode(value):
    kind = type(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return '["int","' + hex(value) + '"]'
    if kind is float:
        return '["float","' + repr(value) + '"]'
    if kind is str:
        if value.isalnum() and value.isascii():
            return '"' + value + '"'
        return '["str"' + "".join(["," + str(ord(letter)) for letter in value]) + "]"
    if isinstance(value, dict):
        items = [item for pair in value.items() for item in pair]
        return '["dict"' + "".join(["," + marlhf_encode(item) for item in items]) + "]"
    if isinstance(value, (list, tuple, set, frozenset)):
        name = "list" if isinstance(value, (list, tuple)) else "set"
        return '["' + name + '"' + "".join(["," + marlhf_encode(item) for item in value]) + "]"
    return '["none"]'
"""


class Executor(AbstractContextManager):
    """A sandbox, used as a context manager. The constructor raises `InputError` if it cannot start.

    Args:
        seconds, memory_mb: limits of one program with all its tests.
        workers: programs at a time, each in a separate thread.
    """

    def __init__(self, seconds: float = 4.0, memory_mb: int = 256, workers: int = 1):
        self.seconds, self.memory_mb, self.workers = seconds, memory_mb, workers

    def __exit__(self, *error) -> None:
        """Do nothing: a sandbox that is made for each program ends with it."""

    def run(self, program: str, tests: Sequence[Test]) -> list[Result]:
        """Run the program with the inputs of the tests, and with nothing else of them.

        Return one result per test, in order; fewer if the program ends early.
        """
        raise NotImplementedError


def decode(text: str) -> Any:
    """Return the plain value that `ENCODE` wrote; NO_OUTPUT for any other text."""
    try:
        return _plain(json.loads(text))
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
        return NO_OUTPUT


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    kind, *items = value
    if kind == "int":
        return int(items[0], 16)
    if kind == "float":
        return float(items[0])
    if kind == "str":
        return "".join(map(chr, items))
    items = tuple(map(_plain, items))
    if kind == "list":
        return items
    if kind == "dict":
        return dict(zip(_keys(items[::2]), items[1::2], strict=True))
    if kind == "set":
        return frozenset(_keys(items))
    raise ValueError("not plain data")


def _keys(items: tuple) -> tuple:
    """Return the items. Raise `ValueError` for many items whose hashes a program could make collide: it takes hours."""
    if len(items) > 100 and not all(isinstance(x, str) or (isinstance(x, int) and abs(x) < 2**60) for x in items):
        raise ValueError("too many keys")
    return items

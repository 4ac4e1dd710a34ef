"""Unit tests of a program, the outcome of running them, its reward, and the formats that tests are read from."""

import json
import keyword
import math
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from marlhf_lite.utils.errors import InputError

Status = Literal["compile_error", "runtime_error", "timeout", "unsupported", "ran"]
# The worst first: a program gets the worst status of its tests.
STATUSES: tuple[Status, ...] = ("compile_error", "runtime_error", "timeout", "unsupported", "ran")
# What APPS's own harness imports before each program, except numpy; one by one, because Monty lacks some names.
_IMPORTS = Path(__file__).with_name("apps_imports.txt").read_text(encoding="utf-8").splitlines()
APPS_IMPORTS = "".join(f"try:\n    {line}\nexcept ImportError:\n    pass\n" for line in _IMPORTS)
# The output of a test whose program gave no value, or one that is not plain data. It equals no expected output.
NO_OUTPUT = object()
Result = tuple[Status, Any]  # of one test: its status, and the output as plain data or NO_OUTPUT


@dataclass(frozen=True)
class Test:
    """One unit test.

    With `call`, the name of a function, `input` is the list of its arguments and `output` the value that it returns.
    Without it, `input` and `output` are the texts of standard input and output.
    """

    __test__ = False  # pytest collects classes with such names

    input: Any
    output: Any
    call: str | None = None
    as_apps: bool = False  # compare as APPS's own harness does; see `read_problem`

    def passes(self, output: Any) -> bool:
        """Return whether the program's output is the expected one.

        `output` is plain data. If the program gave none, it is NO_OUTPUT, which equals no expected output. If
        the test is compared `as_apps`, floats may differ by rounding, as APPS's own harness allows.
        """
        if self.call is None:  # the program reads and writes text
            return isinstance(output, str) and _same_text(self.output, output, rounded=self.as_apps)
        right_values = [self.output]
        # APPS has a list around some values, so what is in a list of one value is right, too.
        if self.as_apps and isinstance(self.output, list) and len(self.output) == 1:
            right_values.append(self.output[0])
        return any(same(value, output, rounded=self.as_apps) for value in right_values)


@dataclass(frozen=True)
class Problem:
    """A problem's tests. The program to run is `head` (imports, as APPS has them) followed by a response."""

    tests: tuple[Test, ...]
    head: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: its status, the earliest in `STATUSES` of its tests, and which tests it passed."""

    status: Status
    passed: list[bool]

    @property
    def share(self) -> float:
        """Return the share of the tests that passed."""
        return sum(self.passed) / len(self.passed)


def program_reward(outcome: Outcome, strict: bool = False) -> float:
    """Return −0.3 + 1.3 · passed / tests for a program that ran, −0.6 for a runtime error, −1 for a compile error.

    These are the rewards of Appendix B.5. Timeouts and programs that the executor does not support count as runtime
    errors. With `strict`, a program that ran gets 1 if it passed all tests, else −0.3.
    """
    if outcome.status == "compile_error":
        return -1.0
    if outcome.status != "ran":
        return -0.6
    return -0.3 + 1.3 * (float(all(outcome.passed)) if strict else outcome.share)


def same(expected: Any, output: Any, rounded: bool = False) -> bool:
    """Return whether two plain values are equal. Lists equal tuples, 2 equals 2.0, True does not equal 1.

    Keys of dicts are compared as Python compares them. With `rounded`, two numbers may differ by rounding (see `_near`)
    if one of them is a float. A list of pairs that are still to be compared stands in for recursion, because a program
    may return values nested to any depth.
    """
    still_to_compare = [(expected, output)]
    while still_to_compare:
        expected, output = still_to_compare.pop()
        if isinstance(expected, list | tuple):
            if not isinstance(output, list | tuple) or len(expected) != len(output):
                return False
            still_to_compare += zip(expected, output, strict=True)
        elif isinstance(expected, dict):
            if not isinstance(output, dict) or expected.keys() != output.keys():
                return False
            still_to_compare += [(value, output[key]) for key, value in expected.items()]
        elif not _same_single_values(expected, output, rounded):
            return False
    return True


def _same_single_values(expected: Any, output: Any, rounded: bool) -> bool:
    """Return whether an expected value that is neither list nor dict equals the output; see `same`."""
    # In Python True equals 1, and here it does not. There is one True and one False, so `is` compares them.
    if isinstance(expected, bool) or isinstance(output, bool):
        return expected is output
    # Two integers must be equal. Only if at least one of two numbers is a float may they differ by rounding.
    types = {type(expected), type(output)}
    if rounded and float in types and types <= {float, int}:
        return _near(expected, output)
    return expected == output


def _near(expected: float, output: float) -> bool:
    """Return whether two numbers are equal up to rounding.

    Their difference may be 1e-8, or 1e-5 of the larger number; if an integer is expected, 1e-9 instead of 1e-5.
    """
    try:
        return math.isclose(
            expected, output, rel_tol=1e-5 if isinstance(expected, float) else 1e-9, abs_tol=1e-8
        )
    except OverflowError:  # the integer is larger than any float
        return False


def _same_text(expected: str, output: str, rounded: bool) -> bool:
    """Return whether the texts have the same words line by line; blank lines do not count.

    With `rounded`, words that are numbers may differ by rounding (see `_same_word`).
    """
    ours = [line.split() for line in expected.split("\n") if line.strip()]
    theirs = [line.split() for line in output.split("\n") if line.strip()]
    if ours == theirs:
        return True
    # Otherwise only numbers may differ, so both texts must have as many words in each line.
    if not rounded or [len(line) for line in ours] != [len(line) for line in theirs]:
        return False
    return all(map(_same_word, chain(*ours), chain(*theirs)))


def _same_word(expected: str, output: str) -> bool:
    """Return whether two words are equal, or two numbers are equal up to rounding; 2.0 equals 2."""
    if expected == output:
        return True
    # Two integers must be equal. Only if a word is written as a float (2.0, or an output 1e6) may the numbers differ.
    if "." not in expected + output and "e" not in output:
        return False
    try:
        number = float(expected) if "." in expected else _whole(expected)
        return _near(number, float(output))
    except (ValueError, ArithmeticError):  # a word that is no number
        return False


# Formats


def read_problem(text: str) -> Problem:
    """Read the tests of a problem from JSON text, in the form of APPS's `input_output`.

    The text is `{"inputs": [...], "outputs": [...]}`. With a key `fn_name`, these are arguments and values of the
    function of that name; without the key, they are texts that the program reads and prints. Of texts, only the words
    of lines that are not blank are compared.

    As in APPS's own harness, an output may have a list around it, floats may differ by rounding (see `_near`), and
    programs may use `APPS_IMPORTS` without importing them. The key `"exact": true` turns all three off.

    Raises `InputError`, without the name of the problem, if the tests do not parse or there are none.
    """
    try:
        row = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError, ArithmeticError):
        raise InputError("the tests are not JSON") from None
    if not isinstance(row, dict):
        raise InputError("the tests are not a JSON object")
    problem = _problem_of_row(row)
    if not problem.tests:
        raise InputError("the problem has no tests")
    return problem


def _whole(digits: str) -> int:
    """Return an integer of any length: `int` refuses text of more than 4300 digits, `Decimal` does not."""
    return int(digits) if len(digits) < 4000 else int(Decimal(digits))


def _problem_of_row(row: dict) -> Problem:
    """Return the problem of a row in the form of APPS; see `read_problem`. Raises `InputError` for other forms."""
    name = row.get("fn_name")
    inputs = row.get("inputs")
    outputs = row.get("outputs")
    is_exact = row.get("exact")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise InputError(
            "the tests need 'inputs' and 'outputs', two lists of one length, as in APPS"
        )
    if name:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"{name!r} is not the name of a function")
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise InputError("with 'fn_name' each of 'inputs' is a list of arguments")
        inputs = [_with_int_keys(arguments) for arguments in inputs]
        outputs = [_with_int_keys(value) for value in outputs]
    else:
        inputs = [_as_text(value) for value in inputs]
        outputs = [_as_text(value) for value in outputs]
    tests = []
    for given, expected in zip(inputs, outputs, strict=True):
        tests.append(Test(given, expected, name or None, as_apps=not is_exact))
    head = "" if is_exact else APPS_IMPORTS
    return Problem(tuple(tests), head)


def _as_text(value: Any) -> str:
    """Return a text; APPS has some as lists of lines, which are joined. Raises `InputError` for other values."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise InputError("without 'fn_name' inputs and outputs are texts")
    return "\n".join(lines)


def _with_int_keys(value: Any) -> Any:
    """Return a dict whose keys are digits with integers as keys: APPS means integers, but keys in JSON are texts.

    If `value` is a list, the dicts in it are changed so. Other values, and dicts deeper inside, stay unchanged.
    """
    if isinstance(value, list):
        return [_dict_with_int_keys(item) for item in value]
    return _dict_with_int_keys(value)


def _dict_with_int_keys(value: Any) -> Any:
    if isinstance(value, dict) and value and all(key.isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value

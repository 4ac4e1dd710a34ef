"""The embedded task `tiny-steps`: arithmetic in 4, 8 or 16 steps, written out one a line, with an exact reward.

An early slip makes all later steps wrong, and the first wrong step is known (`verify`). Writers slip as people do: they
forget the carry of an addition, the borrow of a subtraction, or the carry of a doubling, at their own rates.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from marlhf_lite.tasks.tiny_steps.gold import LETTERS, MODULUS, NUMBER, Problem, apply, read_prompt

STEPS = (4, 8, 16)
SIGNS = (
    "++--*"  # one is drawn for each step, so `*`, which doubles, is half as frequent as the others
)
CARRY_SLIPS = {"+": 0.08, "-": 0.2, "*": 0.5}  # chance to forget a carry or borrow, if there is one
OTHER_SLIP = 0.01  # chance to be one too high or too low, if there is no carry or borrow
_LINE = re.compile(rf"([a-p])([+*-])([1-9]):{NUMBER}>{NUMBER}")
_ANSWER = re.compile(rf"Answer {NUMBER}")


def make_problem(rng: random.Random, steps: int | None = None) -> Problem:
    """Make a random problem of this many steps; of 4, 8 or 16 if `steps` is not given."""
    signs = rng.choices(SIGNS, k=steps or rng.choice(STEPS))
    operations = tuple((sign, 2 if sign == "*" else rng.randint(1, 9)) for sign in signs)
    return Problem(rng.randrange(MODULUS), operations)


def carries(value: int, operation: tuple[str, int]) -> bool:
    """Whether an operation carries into the tens, or borrows from them."""
    sign, k = operation
    ones = value % 10
    if sign == "-":
        return ones < k
    if sign == "+":
        return ones + k > 9
    return ones * k > 9


def slip(rng: random.Random, value: int, operation: tuple[str, int]) -> int:
    """The wrong result of a writer who slips at this step.

    If there is a carry or a borrow, the writer forgets it, and is wrong by 10; otherwise the result is wrong by 1.
    """
    if carries(value, operation):
        # Without the borrow the result is too large, without the carry too small.
        error = 10 if operation[0] == "-" else -10
    else:
        error = rng.choice((1, -1))
    return (apply(value, operation) + error) % MODULUS


def write(problem: Problem, results: list[int]) -> str:
    """The response with these results, one for each step. Each step starts from the result of the step before it."""
    lines = []
    value = problem.start
    # There are letters for 16 steps; a problem may have fewer.
    for letter, (sign, k), result in zip(LETTERS, problem.operations, results, strict=False):
        lines.append(f"{letter}{sign}{k}:{value}>{result}")
        value = result
    return "\n".join([*lines, f"Answer {value}"])


def demonstrate(rng: random.Random, problem: Problem) -> str:
    """A response as people write it: it may slip at any step, with the chances of `CARRY_SLIPS` and `OTHER_SLIP`."""

    def slips_here(number: int, value: int, operation: tuple[str, int]) -> bool:
        chance = CARRY_SLIPS[operation[0]] if carries(value, operation) else OTHER_SLIP
        return rng.random() < chance

    return _respond(rng, problem, slips_here)


def one_slip(rng: random.Random, problem: Problem, at: int) -> str:
    """A response with a slip only at step `at`; its answer is wrong, because no later step can undo the slip."""
    return _respond(rng, problem, lambda number, value, operation: number == at)


def _respond(
    rng: random.Random, problem: Problem, slips_here: Callable[[int, int, tuple[str, int]], bool]
) -> str:
    """A response with a slip at each step for which `slips_here` is true.

    `slips_here` takes the number of the step, from 0, the value before it and its operation.
    """
    results = []
    value = problem.start
    for number, operation in enumerate(problem.operations):
        if slips_here(number, value, operation):
            value = slip(rng, value, operation)
        else:
            value = apply(value, operation)
        results.append(value)
    return write(problem, results)


def make_row(rng: random.Random) -> dict[str, str]:
    """Make a row: a problem with a demonstration, and with a preference.

    The right response ("chosen") is preferred to one with a slip at one random step ("rejected").
    """
    problem = make_problem(rng)
    return {
        "prompt": problem.prompt,
        "chosen": write(problem, problem.results),
        "rejected": one_slip(rng, problem, rng.randrange(len(problem.operations))),
        "demonstration": demonstrate(rng, problem),
    }


# The first wrong step


@dataclass(frozen=True)
class Fault:
    """The first wrong line of a response.

    `reason` is one of

    * `form`: the line has not the form of a step, or that of the answer if the answer is due;
    * `operation`: the problem has another operation at this step;
    * `begin`: the step does not start from the result of the line before;
    * `result`: wrong arithmetic;
    * `answer`: the answer is not the last result;
    * `missing`: the response ends before this line, so the line has no characters;
    * `more`: there is text after the answer.
    """

    line: int  # its number, from 0
    start: int  # its first character in the response
    end: int  # the character after its last one
    reason: str


def verify(prompt: str, response: str) -> Fault | None:
    """Find the first wrong line of a response; None if every step and the answer are right.

    A step is judged by what comes before it in the response: if it continues correctly from a wrong result, only the
    earlier slip is wrong. White space at the end is ignored. If the prompt is of another task, every line is wrong.
    """
    problem = read_prompt(prompt)
    if (
        problem is None
    ):  # the prompt is of another task: the answer is due at once, and −1 makes any number wrong
        operations = []
        value = -1
    else:
        operations = list(problem.operations)
        value = problem.start
    text = response.rstrip()
    lines = text.split("\n") if text else []
    place = 0  # the first character of the line
    for number, line in enumerate(lines):
        reason, value = _check_line(line, number, operations, value)
        if reason:
            return Fault(number, place, place + len(line), reason)
        place += len(line) + 1  # with its line break
    lines_due = len(operations) + 1  # the last one is the answer
    if len(lines) < lines_due:
        return Fault(len(lines), len(text), len(text), "missing")
    return None


def _check_line(
    line: str, number: int, operations: list[tuple[str, int]], value: int
) -> tuple[str, int]:
    """Return the `reason` of the `Fault` in a line, or "" if the line is right, and the value after the line.

    `number` counts lines from 0. `value` is the result of the line before, or the problem's start. If the line is a
    step, the value after it is the result that it states.
    """
    if number > len(operations):
        return "more", value
    if number == len(operations):  # after one line for each operation, the answer is due
        answer = _ANSWER.fullmatch(line)
        if answer is None:
            return "form", value
        return ("" if int(answer[1]) == value else "answer"), value
    step = _LINE.fullmatch(line)
    if step is None:
        return "form", value
    letter, sign, k, begin, result = step.groups()
    if letter != LETTERS[number] or (sign, int(k)) != operations[number]:
        return "operation", value
    if int(begin) != value:
        return "begin", value
    is_right = int(result) == apply(value, operations[number])
    return ("" if is_right else "result"), int(result)
